"""A run's configuration in its ledger: whole, without secrets, and enough to replay the run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dora.config import Config, KafkaSection
from dora.errors import ConfigError, RunError
from dora.log.recorded_config import recorded_config
from tests.factories import run_started

KAFKA = KafkaSection(bootstrap_servers="here:9092")


def config(**kafka: object) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "r"},
            "policy": {"model": "m"},
            "task": {"kind": "reasoning-gym", "name": "x"},
            "trainer": {"steps": 1, "max_tokens_per_micro_batch": 77},
            "weights": {"store": "s3://user:hidden@bucket/x"},
            "kafka": {"bootstrap_servers": "there:1", "properties": {"sasl.password": "hidden"}}
            | kafka,
            "home": "/somewhere",
        }
    )


def started(given: Config):  # type: ignore[no-untyped-def]
    return replace(
        run_started(), identity=json.dumps(given.identity()), config=json.dumps(given.recorded())
    )


def test_it_comes_back_whole_and_reaches_the_cluster_that_was_named() -> None:
    given = config(lanes=3)
    found = recorded_config(started(given), KAFKA)
    assert found.identity() == given.identity()
    assert found.trainer == given.trainer
    assert found.kafka.bootstrap_servers == "here:9092" and found.kafka.lanes == 3
    assert found.home == Path("/somewhere")


def test_no_secret_is_recorded() -> None:
    text = json.dumps(config().recorded())
    assert "hidden" not in text and "there:1" not in text
    assert "s3://bucket/x" in text


def test_assignments_are_applied_last_and_checked() -> None:
    found = recorded_config(started(config()), KAFKA, sets=["trainer.optimizer.learning_rate=0.5"])
    assert found.trainer.optimizer.learning_rate == 0.5
    with pytest.raises(ConfigError, match="learning_rat"):
        recorded_config(started(config()), KAFKA, sets=["trainer.optimizer.learning_rat=0.5"])


def test_a_run_that_recorded_none_asks_for_the_file(tmp_path: Path) -> None:
    old = replace(started(config()), config="")
    with pytest.raises(RunError, match="did not record the whole configuration"):
        recorded_config(old, KAFKA)


def test_a_file_of_another_run_is_refused_with_the_differences(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text(
        '[run]\nname="r"\n[policy]\nmodel="other"\n[task]\nkind="reasoning-gym"\nname="x"\n'
        "[trainer]\nsteps=1\n[window]\nmax_staleness=3\n"
    )
    with pytest.raises(RunError) as caught:
        recorded_config(started(config()), KAFKA, file)
    assert "policy.model: recorded 'm', given 'other'" in str(caught.value)
    assert "window.max_staleness: recorded 1, given 3" in str(caught.value)
