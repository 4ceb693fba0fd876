"""The learner of an adapter, with real DeepSpeed on a small model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dora.config import Config
from dora.consumers.learner.deepspeed_learner import DeepSpeedLearner
from dora.errors import PolicyError
from dora.weights.adapters import check_adapter, model_shapes, write_adapter, write_adapter_config
from dora.weights.tensors import read_tensors, weights_checksum
from tests.adapters import ALPHA, RANK, merged_logprobs
from tests.integration.test_learner import config, groups, make_model

LINEAR = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("lora") / "base")


def settings(
    model: Path, *, seed: int = 3, lora: dict[str, Any] | None = None, **trainer: Any
) -> Config:
    data = config(model, trainer).model_dump(mode="json", exclude={"home"})
    data["run"]["seed"] = seed
    data["policy"]["lora"] = {"rank": RANK, "alpha": ALPHA} | (lora or {})
    return Config.model_validate(data)


def test_the_adapter_alone_is_trained_and_exported_as_peft_writes_it(
    model: Path, tmp_path: Path
) -> None:
    learner = DeepSpeedLearner(model, settings(model))
    network = learner._engine.module
    frozen = {n: p.detach().clone() for n, p in network.named_parameters() if not p.requires_grad}
    base = weights_checksum(read_tensors(model))
    start = {name: tensor.clone() for name, tensor in learner.export_state().items()}
    tokens = groups(1)[3][0].token_ids.tolist()
    write_adapter(tmp_path, start)
    write_adapter_config(tmp_path, learner.adapter_settings or {})
    check_adapter(tmp_path, model_shapes(model), RANK)
    untrained = learner.sequence_logprobs(tokens)
    assert untrained == pytest.approx(merged_logprobs(model, tmp_path, tokens), abs=1e-5)
    for version in range(3):
        learner.update(groups(version), version=version)
    after = learner.export_state()
    assert after.keys() == start.keys() and len(after) == 2 * 2 * len(LINEAR)
    assert all(float((after[name] - start[name]).abs().max()) > 0 for name in after)
    assert all(torch.equal(p, frozen[n]) for n, p in network.named_parameters() if n in frozen)
    assert weights_checksum(read_tensors(model)) == base
    write_adapter(tmp_path, after)
    trained = learner.sequence_logprobs(tokens)
    assert trained == pytest.approx(merged_logprobs(model, tmp_path, tokens), abs=1e-5)
    assert float(np.abs(trained - untrained).max()) > 1e-3
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["target_modules"]) == (RANK, 8, LINEAR)
    assert written["base_model_name_or_path"] == "base", "not where it lies on this machine"


def test_the_starting_adapter_depends_on_the_seed_alone(model: Path) -> None:
    torch.manual_seed(99)
    first = DeepSpeedLearner(model, settings(model)).weights_checksum()
    assert DeepSpeedLearner(model, settings(model)).weights_checksum() == first
    assert DeepSpeedLearner(model, settings(model, seed=4)).weights_checksum() != first


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_redo_of_an_adapter_from_a_checkpoint_is_bit_identical(
    model: Path, tmp_path: Path, stage: int
) -> None:
    zero = {"zero_optimization": {"stage": stage}}
    wanted = settings(model, updates_per_step=2, deepspeed=zero)
    learner = DeepSpeedLearner(model, wanted)
    learner.update(groups(1), version=0)
    learner.save_checkpoint(tmp_path)
    learner.update(groups(2), version=1)
    checksum = learner.weights_checksum()
    redo = DeepSpeedLearner(model, wanted)
    redo.update(groups(3), version=0)
    redo.load_checkpoint(tmp_path)
    redo.update(groups(2), version=1)
    assert redo.weights_checksum() == checksum
    states = torch.load(next(tmp_path.rglob("*model_states.pt")), weights_only=False)
    assert all("lora_" in name for name in states["module"]), "the base model is not stored again"


@pytest.mark.parametrize("stage", [1, 2])
def test_every_zero_stage_gives_an_adapter_the_same_update(model: Path, stage: int) -> None:
    zero = {"zero_optimization": {"stage": stage}}
    learners = [
        DeepSpeedLearner(model, settings(model)),
        DeepSpeedLearner(model, settings(model, deepspeed=zero)),
    ]
    plain, sharded = [learner.update(groups(1), version=0) for learner in learners]
    assert sharded == pytest.approx(plain, rel=1e-4, abs=1e-6)
    expected, found = [learner.export_state() for learner in learners]
    for name in expected:
        assert torch.isclose(found[name], expected[name], atol=2e-5).float().mean() > 0.99, name


def test_mismatch_is_measured_under_the_adapter_that_generated(model: Path) -> None:
    learner = DeepSpeedLearner(model, settings(model, optimizer={"learning_rate": 1e-2}))
    batch = groups(5)
    flat = [sample for group in batch for sample in group]
    for sample, scores in zip(flat, learner.logprobs(flat), strict=True):
        sample.behaviour[:] = scores + 0.25
    for version in range(2):  # both times the samples are of version 0
        metrics = learner.update(batch, version=version)
        assert metrics["logprob_mismatch_mean"] == pytest.approx(0.25, abs=1e-4)
    assert abs(metrics["logprob_drift_mean"] - 0.25) > 1e-3, "training moved the policy"


def test_the_base_model_is_the_reference_policy(model: Path) -> None:
    learner = DeepSpeedLearner(model, settings(model, loss={"kl_coefficient": 0.5}))
    assert learner._runner._reference is None, "no second copy of the model"
    assert learner.update(groups(1), version=0)["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert learner.update(groups(1), version=1)["reference_kl"] > 1e-6


@pytest.mark.parametrize(
    ("targets", "reason"), [(["w_proj"], "w_proj"), (["embed_tokens"], "embed_tokens.*not linear")]
)
def test_layers_that_cannot_be_adapted_are_refused(
    model: Path, targets: list[str], reason: str
) -> None:
    with pytest.raises(PolicyError, match=f"target_modules.*{reason}") as caught:
        DeepSpeedLearner(model, settings(model, lora={"target_modules": targets}))
    assert caught.value.hint and ", ".join(LINEAR[:2]) in caught.value.hint
