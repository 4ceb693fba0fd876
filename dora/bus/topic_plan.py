"""The shape of a run's topics: names, partitions, configuration.

The plan follows from the configuration alone, so every process of a run agrees on where a record
belongs.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dora.config import Config

SUFFIXES = (
    "dispatch",
    "chunks",
    "trajectories",
    "handovers",
    "policies",
    "steps",
    "workers",
    "dead-letters",
)
"""Last parts of the names of a run's topics."""

SHOWN_CONFIGS = frozenset(
    {
        "cleanup.policy",
        "compression.type",
        "max.message.bytes",
        "min.insync.replicas",
        "retention.bytes",
        "retention.ms",
        "segment.ms",
    }
)
"""Configurations of topics that matter to a run."""


@dataclass(frozen=True, slots=True)
class RunTopics:
    """Names of a run's topics."""

    run: str

    @property
    def dispatch(self) -> str:
        """Admissions (partition 0) and commands to workers (the others)."""
        return f"{self.run}.dispatch"

    @property
    def chunks(self) -> str:
        """Tokens while they are generated."""
        return f"{self.run}.chunks"

    @property
    def trajectories(self) -> str:
        """Finished trajectories."""
        return f"{self.run}.trajectories"

    @property
    def handovers(self) -> str:
        """Tokens of trajectories that move, for the worker that takes over; a shortcut past the
        chunks, which are the truth."""
        return f"{self.run}.handovers"

    @property
    def policies(self) -> str:
        """Policy versions."""
        return f"{self.run}.policies"

    @property
    def steps(self) -> str:
        """The ledger."""
        return f"{self.run}.steps"

    @property
    def workers(self) -> str:
        """Status of processes."""
        return f"{self.run}.workers"

    @property
    def dead_letters(self) -> str:
        """What could not be read or scored."""
        return f"{self.run}.dead-letters"

    @property
    def all(self) -> tuple[str, ...]:
        """All names."""
        return tuple(f"{self.run}.{suffix}" for suffix in SUFFIXES)


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic as it should be."""

    name: str
    partitions: int
    configs: dict[str, str]
    replication_factor: int = 1


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as it is. Offsets by partition; `records` counts transaction markers too."""

    name: str
    topic_id: str
    partitions: int
    begin_offsets: dict[int, int]
    end_offsets: dict[int, int]
    configs: dict[str, str]

    @property
    def records(self) -> int:
        """Offsets between beginning and end: records, transaction markers and aborted records."""
        return sum(end - self.begin_offsets.get(p, 0) for p, end in self.end_offsets.items())


def topic_plan(config: Config) -> list[TopicSpec]:
    """The topics that a run needs.

    `dispatch`, `steps` and `dead-letters` are kept for ever: the ledger and the admission journal
    are the run. A handover is read at once or not at all: `handovers` are kept for an hour.
    `policies` and `workers` keep the latest record of each key (version, process).
    """
    kafka, topics = config.kafka, RunTopics(config.run.name)
    shared = {
        "compression.type": "producer",
        "max.message.bytes": str(kafka.max_message_bytes),
        "min.insync.replicas": str(max(1, kafka.replication_factor - 1)),
        "retention.bytes": "-1",
    }
    hours = kafka.retention_hours
    data_ms = "-1" if hours is None else str(max(1, round(hours * 3_600_000)))
    forever = {**shared, "cleanup.policy": "delete", "retention.ms": "-1"}
    data = {**shared, "cleanup.policy": "delete", "retention.ms": data_ms}
    latest = {
        **shared,
        "cleanup.policy": "compact",
        "retention.ms": "-1",
        # Heartbeats arrive every second: compact them hourly rather than weekly.
        "segment.ms": "3600000",
        "min.cleanable.dirty.ratio": "0.2",
    }
    passing = {**shared, "cleanup.policy": "delete", "retention.ms": "3600000"}
    versioned = config.window.ring * kafka.lanes

    def spec(name: str, partitions: int, configs: dict[str, str]) -> TopicSpec:
        return TopicSpec(name, partitions, configs, kafka.replication_factor)

    return [
        spec(topics.dispatch, kafka.dispatch_partitions, forever),
        spec(topics.chunks, versioned, data),
        spec(topics.trajectories, versioned, data),
        spec(topics.handovers, 1, passing),
        spec(topics.policies, 1, latest),
        spec(topics.steps, 1, forever),
        spec(topics.workers, 1, latest),
        spec(topics.dead_letters, 1, forever),
    ]


def config_problems(spec: TopicSpec, found: dict[str, str]) -> list[str]:
    """What in a topic's configuration would lose records or refuse them."""
    problems = []

    def differs(key: str, bad: Callable[[str, str], bool]) -> None:
        if key in found and bad(found[key], spec.configs[key]):
            problems.append(
                f"{spec.name} has {key}={found[key]}, the run needs {spec.configs[key]}"
            )

    def forever(value: str) -> float:
        return float("inf") if int(value) < 0 else int(value)

    differs("cleanup.policy", lambda is_, needed: is_ != needed)
    differs("max.message.bytes", lambda is_, needed: int(is_) < int(needed))
    if spec.configs["cleanup.policy"] == "delete":
        differs("retention.ms", lambda is_, needed: forever(is_) < forever(needed))
        differs("retention.bytes", lambda is_, needed: forever(is_) < forever(needed))
    return problems


def similar_names(name: str, names: Iterable[str]) -> list[str]:
    """At most three names that look like `name`, the most similar first."""
    return difflib.get_close_matches(name, list(names), n=3, cutoff=0.6)


def unknown_run_hint(run: str, runs: Sequence[str]) -> str:
    """What to do where there is no run of that name, but these."""
    similar = similar_names(run, runs)
    if similar:
        return f"did you mean {', '.join(similar)}?"
    if runs:
        return f"the runs there are: {', '.join(runs[:20])}"
    return "there is no run at all; start one with: dora run CONFIG"
