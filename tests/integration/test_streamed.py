"""Streamed training with real DeepSpeed: the same step, group by group."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from dora.config import Config
from dora.consumers.learner.batches import Sample
from dora.consumers.learner.deepspeed_learner import DeepSpeedLearner
from dora.errors import PolicyError
from tests.integration.test_learner import config, groups, make_model

LOSSES: dict[str, dict[str, Any]] = {
    "token": {},
    "sequence": {"normalization": "sequence", "importance_cap": 2.0},
    "constant": {"normalization": "constant", "constant_length": 20, "kind": "gspo"},
    "overlong": {"mask_overlong": True, "kl_coefficient": 0.1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def settings(model: Path, *, streamed: bool, updates: int = 1, **loss: Any) -> Config:
    trainer = {
        "streamed": streamed,
        "updates_per_step": updates,
        "loss": loss,
        "optimizer": {"learning_rate": 1e-3, "gradient_clip": 0.05, "eps": 1e-5},
    }
    return config(model, trainer)


def step(seed: int = 5) -> list[list[Sample]]:
    """Four groups, of which one has no signal and some samples are cut or of an older version."""
    made = groups(seed, version=1)
    made[1][2] = replace(made[1][2], truncated=True)
    made[2] = [replace(sample, version=0) for sample in made[2]]
    return made


def weights(learner: DeepSpeedLearner) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1).clone() for tensor in learner.export_state().values()])


def stream(
    learner: DeepSpeedLearner, made: Sequence[Sequence[Sample]], version: int
) -> dict[str, float]:
    learner.begin(version)
    for group in made:
        learner.add(group)
    return learner.finish()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("updates", [1, 2])
def test_a_streamed_step_gives_the_weights_of_the_whole_batch(
    model: Path, loss: str, updates: int
) -> None:
    whole = DeepSpeedLearner(
        model, settings(model, streamed=False, updates=updates, **LOSSES[loss])
    )
    before = weights(whole)
    expected = whole.update(step(), 1)
    streamed = DeepSpeedLearner(
        model, settings(model, streamed=True, updates=updates, **LOSSES[loss])
    )
    found = stream(streamed, step(), 1)
    moved = (weights(whole) - before).abs().max()
    assert moved > 1e-4
    assert (weights(streamed) - weights(whole)).abs().max() < 1e-3 * moved
    assert streamed.updates == whole.updates == updates
    assert expected["grad_norm"] > 0.05, "the gradient is not clipped"
    for name in ("loss", "grad_norm", "learning_rate", "trained_tokens", "optimizer_updates"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3), name
    for name in ("reward_mean", "tokens", "staleness_mean", "mixed_version_share"):
        assert found[name] == expected[name], name
    assert found["logprob_mismatch_mean"] > 0


def test_a_redo_of_a_streamed_step_is_bit_identical_and_its_order_matters(
    model: Path, tmp_path: Path
) -> None:
    configured = settings(model, streamed=True, updates=2, importance_cap=2.0)
    learner = DeepSpeedLearner(model, configured)
    learner.save_checkpoint(tmp_path)
    order = [step()[index] for index in (2, 0, 3, 1)]
    stream(learner, order, 0)
    stream(learner, step(6), 1)
    checksum = learner.weights_checksum()
    again = DeepSpeedLearner(model, configured)
    again.load_checkpoint(tmp_path)
    again.update(order, 0)
    again.update(step(6), 1)
    assert again.weights_checksum() == checksum
    again.load_checkpoint(tmp_path)
    again.update(step(), 0)
    again.update(step(6), 1)
    assert again.weights_checksum() != checksum


def test_a_step_that_was_left_leaves_no_gradient_behind(model: Path, tmp_path: Path) -> None:
    configured = settings(model, streamed=True, updates=2)
    learner = DeepSpeedLearner(model, configured)
    before = learner.weights_checksum()
    learner.begin(0)
    learner.add(step()[1])
    learner.begin(0)
    assert learner.weights_checksum() == before
    for group in step():
        learner.add(group)
    learner.finish()
    fresh = DeepSpeedLearner(model, configured)
    stream(fresh, step(), 0)
    assert learner.weights_checksum() == fresh.weights_checksum()
    learner.begin(1)
    for group in step()[1:3]:
        learner.add(group)
    with pytest.raises(PolicyError, match="after it changed weights"):
        learner.begin(1)


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(1, "float32"), (0, "bfloat16"), (1, "bfloat16"), (2, "bfloat16")],
)
def test_gradients_are_divided_wherever_deepspeed_keeps_them(
    model: Path, stage: int, dtype: str
) -> None:
    def learner(*, streamed: bool) -> DeepSpeedLearner:
        configured = settings(model, streamed=streamed, updates=2)
        sharding = {"zero_optimization": {"stage": stage}} if stage else {}
        trainer = configured.trainer.model_copy(update={"deepspeed": sharding})
        policy = configured.policy.model_copy(update={"dtype": dtype})
        return DeepSpeedLearner(
            model, configured.model_copy(update={"trainer": trainer, "policy": policy})
        )

    whole, streamed = learner(streamed=False), learner(streamed=True)
    before = weights(whole).float()
    for version in (0, 1):
        expected, found = whole.update(step(), version), streamed.update(step(), version)
        coarse = 0.05 if dtype == "bfloat16" else 0.02
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=coarse), version
    moved = (weights(whole).float() - before).abs()
    apart = (weights(streamed).float() - weights(whole).float()).abs()
    assert moved.max() > 1e-4
    assert apart.mean() < (1e-3 if dtype == "float32" else 0.1) * moved.mean()


def test_groups_without_signal_make_no_update(model: Path) -> None:
    learner = DeepSpeedLearner(model, settings(model, streamed=True))
    before = learner.weights_checksum()
    found = stream(learner, [groups(1)[0]] * 4, 0)
    assert learner.weights_checksum() == before
    assert found["optimizer_updates"] == 0
    with pytest.raises(PolicyError, match="not begun"):
        learner.finish()


@pytest.mark.parametrize(
    ("trainer", "other", "reason"),
    [
        ({"ranks": 2}, {}, "trainer.ranks = 1"),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, {}, "0, 1 and 2 (not 3)"),
        ({}, {"policy": {"model": "m", "dtype": "float16"}}, "bfloat16 (not float16)"),
        (
            {},
            {"schedule": {"kind": "sync", "colocated": True}, "window": {"max_staleness": 0}},
            "remove schedule.colocated",
        ),
    ],
)
def test_what_cannot_be_streamed_is_refused(
    trainer: dict[str, Any], other: dict[str, Any], reason: str
) -> None:
    sections = {
        "run": {"name": "r"},
        "policy": {"model": "m"},
        "task": {"kind": "reasoning-gym", "name": "x"},
        "trainer": {"steps": 1, "streamed": True, **trainer},
        **other,
    }
    with pytest.raises(ValidationError, match=re.escape(reason)):
        Config.model_validate(sections)
