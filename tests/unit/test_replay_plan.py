"""What a replay is asked for, what it may change, and how it judges."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dora.cli.replay.tables import show
from dora.config import Config
from dora.config.loading import load_config, to_toml
from dora.consumers.replay.metrics import (
    COMPARED,
    NOT_COMPARED,
    FirstDifference,
    ReplayedStep,
    compared,
)
from dora.consumers.replay.plan import check_sets, parse_steps
from dora.consumers.replay.replay import ReplayReport, batches
from dora.errors import UsageError
from dora.log.retention import gone
from dora.schemas.records import Step
from tests.factories import admission, step


def steps(*offsets: tuple[int, ...]) -> list[Step]:
    """Steps of two groups of two samples each, whose trajectories lie at these offsets."""
    made = []
    for version, (a, b, c, d) in enumerate(offsets):
        groups = [admission(2 * version, version), admission(2 * version + 1, version)]
        ids = [f"{group.group_id}/{sample}" for group in groups for sample in (0, 1)]
        places = dict(zip(ids, ((version % 3, at) for at in (a, b, c, d)), strict=True))
        made.append(step(version, version, groups, places))
    return made


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2:5", (2, 5)), ("2:", (2, None)), (":5", (None, 5)), ("3", (3, 3)), (" 1 : 1 ", (1, 1))],
)
def test_a_span_of_steps_is_read(text: str, expected: tuple[int | None, int | None]) -> None:
    assert parse_steps(text) == expected


@pytest.mark.parametrize("text", ["", "a:b", "1-3", "-1:2", "1:2:3", "5:2"])
def test_what_is_no_span_of_steps_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--steps"):
        parse_steps(text)


def test_a_replay_may_change_the_training_and_be_told_where_files_lie() -> None:
    assert check_sets(["trainer.loss.kind=gspo", "run.directory=/elsewhere"])
    assert not check_sets(["run.directory=/elsewhere", "weights.store=file:///x"])


@pytest.mark.parametrize(
    "key",
    [
        "window.max_staleness",
        "window.group_size",
        "task.name",
        "policy.model",
        "rollout.temperature",
        "kafka.lanes",
        "run.name",
        "run.seed",
        "trainer.engine",
        "trainer.ranks",
    ],
)
def test_what_logged_data_cannot_follow_is_refused_by_name(key: str) -> None:
    with pytest.raises(UsageError, match=f"--set {key}: "):
        check_sets(["trainer.loss.kind=gspo", f"{key}=1"])


def test_deleted_trajectories_are_named_with_the_steps_that_trained_them() -> None:
    trained = steps((0, 1, 2, 3), (0, 1, 2, 3), (5, 6, 7, 8), (4, 5, 6, 9))
    assert gone(trained, {0: 0, 1: 0, 2: 0}) == {}
    assert gone(trained, {0: 5, 1: 2, 2: 5}) == {0: ([0, 1, 2, 3, 4], [1, 4]), 1: ([0, 1], [2])}


def test_trajectories_are_fetched_in_runs_of_whole_steps() -> None:
    made = steps((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3))
    assert [len(batch) for batch in batches(made, 8)] == [2, 1]
    assert [len(batch) for batch in batches(made, 1)] == [1, 1, 1]
    assert list(batches([])) == []


def replayed(**changes: object) -> ReplayedStep:
    metrics = {"reward_mean": 0.5, "loss": math.nan, "grad_norm": 2.0}
    made = ReplayedStep(3, True, 4, metrics, dict(metrics), "a", "a", 0.1)
    return replace(made, **changes)


def test_a_step_that_came_out_the_same_differs_in_nothing() -> None:
    assert replayed().differing == []
    assert replayed(replayed={"reward_mean": 0.5}).differing == [], "of another version of dora"


def test_causes_are_named_before_effects_and_weights_last() -> None:
    other = {"grad_norm": 2.0000001, "reward_mean": 0.25, "loss": 1.0}
    found = replayed(replayed=other, checksum="b").differing
    assert found == ["reward_mean", "loss", "grad_norm", "weights"]


def test_what_a_trainer_measures_of_its_surroundings_is_not_compared() -> None:
    assert not set(COMPARED) & set(NOT_COMPARED) and len(set(COMPARED)) == len(COMPARED)
    assert compared({"train_seconds": 1.0, "loss": 2.0, "logprob_mismatch_max": 3.0}) == {
        "loss": 2.0
    }


def test_a_first_difference_is_a_sentence_with_both_values() -> None:
    assert str(FirstDifference(3, "loss", 0.5, 0.25)) == "step 3: loss was 0.5, is 0.25"
    weights = FirstDifference(3, "weights", "abc", "def", 0.125, "lm_head.weight")
    assert "abc" in str(weights) and "def" in str(weights)
    assert "0.12 of the largest weight of its tensor, in lm_head.weight" in str(weights)
    assert "not stored" in str(replace(weights, largest=None, tensor=None))


def test_a_configuration_written_as_toml_reads_back(tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "run": {"name": "r", "seed": 5},
            "policy": {"model": 'a "quoted" \\ path', "lora": {"target_modules": ["q", "k"]}},
            "task": {
                "kind": "reasoning-gym",
                "name": "x",
                "parameters": {"min word": 3, "nested": {"a": [1, 2.5, True]}},
            },
            "trainer": {
                "steps": 2,
                "deepspeed": {"zero_optimization": {"stage": 1}},
                "optimizer": {"learning_rate": 1e-6},
            },
            "recovery": {"tolerance": math.inf},
            "kafka": {
                "bootstrap_servers": "b:1",
                "lanes": 2,
                "properties": {"sasl.password": "hidden"},
            },
            "home": str(tmp_path),
        }
    )
    text = to_toml(config)
    assert "hidden" not in text and "b:1" not in text
    (tmp_path / "run.toml").write_text(text)
    found = load_config(tmp_path / "run.toml", environment={})
    assert json.dumps(found.recorded()) == json.dumps(config.recorded())


def report(*results: ReplayedStep, **changes: object) -> ReplayReport:
    made = ReplayReport(
        run="r",
        base_version=2,
        checkpoint="step-00000002-x",
        first=3,
        results=results,
        differing=(),
        first_difference=None,
        sets=(),
        deterministic=True,
        recorded_ranks=1,
        checksum="a",
        loading_seconds=1.0,
        seconds=2.0,
        notes=(),
    )
    return replace(made, **changes)


def shown(made: ReplayReport) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    show(made, console)
    return console.export_text()


def test_the_verdict_is_given_in_words() -> None:
    same = report(replayed())
    assert same.identical is True and "bit-identical: weights and metrics of 1 step" in shown(same)
    first = FirstDifference(3, "loss", 0.5, 0.25)
    other = report(replayed(checksum="b"), first_difference=first, deterministic=False)
    text = shown(other)
    assert other.identical is False and "bit-identical" not in text
    assert "first difference: step 3: loss was 0.5, is 0.25" in text
    assert "trainer.deterministic was off" in text


def test_a_change_is_shown_beside_the_record_and_gives_no_verdict() -> None:
    tried = replayed(replayed={"reward_mean": 0.5, "loss": 0.25}, checksum="b")
    made = report(replace(tried, step=2, asked=False), tried, sets=("trainer.loss.kind=gspo",))
    text = shown(made)
    assert made.identical is None and made.to_json()["identical"] is None
    assert "1 step before it redone on the way" in text
    assert "what if trainer.loss.kind=gspo" in text
    [loss] = [line for line in text.splitlines() if " loss " in line]
    assert "nan" in loss and "0.25" in loss


def test_a_run_of_several_ranks_says_that_bits_may_differ() -> None:
    assert "trainer.ranks = 4" in shown(report(replayed(), recorded_ranks=4))
