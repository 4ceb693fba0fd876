"""Which keys may differ when a run is started again, and the values that each step had."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from dora.config import Config
from dora.config.changes import RULES, recorded_values, rule_of, values_of, with_settings
from dora.errors import RunError, UncommittedError
from dora.log.continuation import check_configuration
from dora.log.recorded_config import RecordedSettings
from tests.factories import run_started, step


def config(**changes: dict[str, Any]) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": "r"},
        "policy": {"model": "m"},
        "task": {"kind": "reasoning-gym", "name": "x"},
        "trainer": {"steps": 4},
    }
    for name, keys in changes.items():
        sections[name] = sections.get(name, {}) | keys
    return Config.model_validate(sections)


def keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        inner = [
            part
            for part in (info.annotation, *get_args(info.annotation))
            if isinstance(part, type) and issubclass(part, BaseModel)
        ]
        for section in inner:
            yield from keys(section, f"{prefix}{name}.")
        if not inner:
            yield f"{prefix}{name}"


def started(given: Config):  # type: ignore[no-untyped-def]
    return replace(
        run_started(), identity=json.dumps(given.identity()), config=json.dumps(given.recorded())
    )


def test_every_key_has_a_rule_and_every_rule_a_key() -> None:
    used = {rule_of(key).why for key in keys()}
    assert used == {rule.why for rule in RULES}
    for prefix in (prefix for rule in RULES for prefix in rule.prefixes):
        assert any(f"{key}.".startswith(f"{prefix}.") for key in keys()), prefix
    with pytest.raises(KeyError):
        rule_of("no.such.key")


def test_what_the_identity_holds_is_never_free_to_change_unrecorded() -> None:
    def leaves(data: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in data.items():
            key = f"{prefix}{name}"
            yield from leaves(value, f"{key}.") if isinstance(value, dict) and value else [key]

    whole = config(policy={"lora": {}}, trainer={"streamed": True}, window={"tokens_per_step": 9})
    assert {rule_of(key).kind for key in leaves(whole.identity())} == {
        "recorded",
        "input",
        "fixed",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"trainer": {"optimizer": {"learning_rate": 0.5, "betas": [0.5, 0.6]}}},
        {"trainer": {"loss": {"kind": "gspo", "kl_coefficient": 0.1}, "updates_per_step": 2}},
        {"trainer": {"steps": 9, "max_tokens_per_micro_batch": 7, "streamed": True}},
        {"evaluation": {"prompts": 3, "every": 2}},
    ],
)
def test_a_recorded_key_may_change_and_comes_back_from_its_recorded_value(
    change: dict[str, Any],
) -> None:
    before, after = config(), config(**change)
    check_configuration(started(before), after, newest=3)
    assert with_settings(before, recorded_values(after)) == after
    assert with_settings(after, recorded_values(before)) == before


def test_a_fixed_key_may_not_change_and_the_message_says_why_and_how_to_go_on() -> None:
    with pytest.raises(RunError) as caught:
        check_configuration(
            started(config()),
            config(window={"max_staleness": 2}, schedule={"kind": "partial"}),
            newest=3,
        )
    said = str(caught.value)
    assert "window.max_staleness: recorded 1, given 2" in said
    assert "schedule.kind: recorded None, given 'partial'" in said
    assert rule_of("window.max_staleness").why in said
    assert "dora run CONFIG --from r@3 --as NEWRUN" in said
    with pytest.raises(UncommittedError, match="dora topics delete r --yes"):
        check_configuration(started(config()), config(window={"group_size": 2}), newest=0)


def test_each_step_has_the_values_of_its_time() -> None:
    def rate(value: float) -> dict[str, str]:
        return {"trainer.optimizer.learning_rate": json.dumps(value)}

    entries = [
        step(0, 0),
        replace(step(1, 1), settings=rate(0.5) | {"trainer.gone": "1"}),
        step(2, 2),
        replace(step(3, 3), settings=rate(0.25)),
    ]
    now = config(trainer={"optimizer": {"learning_rate": 0.75}, "checkpoint_every": 7})
    recorded = RecordedSettings(started(config()), entries)
    found = [recorded.config(entry, now) for entry in entries]
    assert [c.trainer.optimizer.learning_rate for c in found] == [1e-6, 0.5, 0.5, 0.25]
    assert {c.trainer.checkpoint_every for c in found} == {7}
    assert recorded.newest["trainer.optimizer.learning_rate"] == "0.25"


def test_the_values_below_keys_are_those_that_a_replay_tries() -> None:
    given = config(trainer={"deepspeed": {"zero_optimization": {"stage": 1}}})
    assert values_of(given, ["trainer.optimizer.learning_rate"]) == {
        "trainer.optimizer.learning_rate": "1e-06"
    }
    assert values_of(given, ["trainer.deepspeed.zero_optimization.stage"]) == {
        "trainer.deepspeed": '{"zero_optimization": {"stage": 1}}'
    }
    assert set(values_of(given, ["trainer.loss"])) == {
        key for key in keys() if key.startswith("trainer.loss.")
    }
