"""Which keys of a run's configuration may differ when its processes are started again.

Every key has one rule, that of its longest prefix in `RULES`. docs/operations.md shows the table.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dora.config import Config
from dora.config.run import EvaluationSection
from dora.config.trainer import TrainerSection

Kind = Literal["recorded", "input", "free", "fixed"]
"""`recorded`: may change; the ledger says from which entry on. `input`: may name another file,
whose content `dora.log.inputs` compares. `free`: may change. `fixed`: may not."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What holds for the keys below `prefixes`, and why."""

    kind: Kind
    prefixes: tuple[str, ...]
    why: str


_NOT_THE_DATA = "where, how fast and how watched a run is: no token and no weight depends on it"

RULES = (
    Rule(
        "recorded",
        ("trainer.optimizer", "trainer.loss", "trainer.updates_per_step", "trainer.streamed"),
        "how a step trains its batch: each step is redone with the values of its time",
    ),
    Rule(
        "recorded",
        (
            *("trainer.steps", "trainer.max_tokens_per_micro_batch", "trainer.logits_mib"),
            "trainer.threads",
        ),
        "the learning rate's schedule depends on the first, rounding on the others",
    ),
    Rule("recorded", ("evaluation",), "versions are evaluated as the coordinator's start says"),
    Rule("input", ("task.path", "policy.tokenizer"), "what it holds is compared, not its place"),
    Rule(
        "free",
        ("run.directory", "weights", "home"),
        "what lies there must be moved along",
    ),
    Rule(
        "free",
        ("trainer", "policy.attention"),
        "waits, checkpoints, devices. Checkpoints fit only the ranks and the ZeRO stage that wrote "
        "them, and a redo repeats bits only with the deepspeed, ranks, sequence_parallel, "
        "deterministic, packing and attention of its time",
    ),
    Rule(
        "free",
        (
            *("run", "rollout", "schedule", "recovery", "metrics", "traces", "lineage", "kafka"),
            *("policy.prepare", "policy.trust_remote_code"),
            *("task.verifier_timeout_seconds", "task.verifier_processes"),
        ),
        _NOT_THE_DATA,
    ),
    Rule("fixed", ("run.name", "run.seed"), "it is another run"),
    Rule(
        "fixed",
        ("policy", "trainer.engine"),
        "checkpoints, adapters and announced weights are of this model",
    ),
    Rule(
        "fixed",
        ("task",),
        "a group's samples and a resumed response need the prompt and the score they began with",
    ),
    Rule(
        "fixed",
        (
            "rollout.max_new_tokens",
            "rollout.temperature",
            "rollout.top_p",
            "rollout.top_k",
            "rollout.stop_token_ids",
        ),
        "all tokens of a response come from one distribution, and others may go on with it",
    ),
    Rule(
        "fixed",
        ("window", "schedule.kind"),
        "the window's proof holds for one window, and its size is in the topics' partitions",
    ),
    Rule("fixed", ("kafka.lanes", "kafka.dispatch_partitions"), "the topics have that many"),
)


def rule_of(key: str) -> Rule:
    """The rule of a key (`section.key`); KeyError for one that has none."""
    by_prefix = {prefix: rule for rule in RULES for prefix in rule.prefixes}
    while key not in by_prefix:
        key, dot, _ = key.rpartition(".")
        if not dot:
            raise KeyError(key)
    return by_prefix[key]


def recorded_values(config: Config | Mapping[str, Any]) -> dict[str, str]:
    """The values of all keys that are recorded, as JSON, by key. Of a mapping (a recorded
    configuration) those that it has."""
    data = config.model_dump(mode="json") if isinstance(config, Config) else config
    return {
        key: json.dumps(value)
        for key, value in _leaves("", {s: data.get(s, {}) for s in ("trainer", "evaluation")})
        if rule_of(key).kind == "recorded"
    }


def values_of(config: Config, keys: Collection[str]) -> dict[str, str]:
    """The values of the `keys` of the section `trainer`, or of all keys below them, as
    `with_settings` takes them."""
    return {
        leaf: json.dumps(value)
        for leaf, value in _leaves("trainer.", config.trainer.model_dump(mode="json"))
        if any(f"{leaf}.".startswith(f"{key}.") or key.startswith(f"{leaf}.") for key in keys)
    }


def with_settings(config: Config, values: Mapping[str, str]) -> Config:
    """`config` with `values` (JSON) of keys of the sections `trainer` and `evaluation`; one that
    this version of dora has no more is left out."""
    data = {
        "trainer": config.trainer.model_dump(mode="json"),
        "evaluation": config.evaluation.model_dump(mode="json"),
    }
    for key, value in values.items():
        *path, name = key.split(".")
        table: Any = data
        for part in path:
            table = table.get(part, {})
        if name in table:
            table[name] = json.loads(value)
    sections = {
        "trainer": TrainerSection.model_validate(data["trainer"]),
        "evaluation": EvaluationSection.model_validate(data["evaluation"]),
    }
    return config.model_copy(update=sections)


def _leaves(prefix: str, data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        key = f"{prefix}{name}"
        # a table that is a value, and not a section
        if isinstance(value, Mapping) and key != "trainer.deepspeed":
            yield from _leaves(f"{key}.", value)
        else:
            yield key, value
