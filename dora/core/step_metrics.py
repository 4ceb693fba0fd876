"""Numbers of a run from its steps' metrics, for the live view, the summary and the report."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

PART = "reward_part_"
"""Before the name of a reward part: the metric with its mean."""


class VersionSpans:
    """The time from first start to last finish, by version."""

    def __init__(self) -> None:
        self._started: dict[int, int] = {}
        self._finished: dict[int, int] = {}

    def start(self, version: int, time_ms: int) -> None:
        """A group of the version started."""
        self._started[version] = min(self._started.get(version, time_ms), time_ms)

    def finish(self, version: int, time_ms: int) -> None:
        """A trajectory of the version finished."""
        self._finished[version] = max(self._finished.get(version, time_ms), time_ms)

    def most_at_once(self) -> int:
        """Largest number of versions whose spans overlap in a moment."""
        events: list[tuple[int, int]] = []
        for version, started in self._started.items():
            finished = self._finished.get(version)
            if finished is not None and finished > started:
                events += [(started, 1), (finished, -1)]
        most = live = 0
        for _, change in sorted(events):  # an end at the moment of a start comes first
            live += change
            most = max(most, live)
        return most


Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Success:
    """Share of successes at both ends of a run, None where nothing is known, and of what: held-out
    prompts, or training batches where nothing was evaluated."""

    first: float | None
    last: float | None
    source: Literal["evaluation", "training"]


def success(evaluated: Sequence[float], steps: Sequence[Metrics]) -> Success:
    """From the success rates of the versions that were evaluated, and the steps' metrics."""
    if evaluated:
        return Success(evaluated[0], evaluated[-1], "evaluation")
    ends = [step.get("success_rate") for step in (*steps[:1], *steps[-1:])] or [None]
    return Success(ends[0], ends[-1], "training")


def total(steps: Iterable[Metrics], name: str) -> float:
    """The sum of a metric; steps without it count as 0."""
    return math.fsum(step.get(name, 0.0) for step in steps)


def share(steps: Iterable[Metrics], name: str) -> float | None:
    """Mean of a step's share over all trajectories; None if no step has it."""
    pairs = [(s[name], s.get("trajectories", 1.0)) for s in steps if name in s]
    weight = math.fsum(count for _, count in pairs)
    return math.fsum(value * count for value, count in pairs) / weight if weight else None


def idle_share(steps: Sequence[Metrics]) -> float | None:
    """Share of the trainer's time that it waited for batches; None if it has done nothing."""
    idle = total(steps, "idle_seconds")
    busy = idle + total(steps, "train_seconds") + total(steps, "publish_seconds")
    return idle / busy if busy > 0 else None


def mismatch_mean(steps: Iterable[Metrics]) -> float | None:
    """Mean difference between engine and trainer log-probabilities (nats) over all tokens."""
    pairs = [
        (step["logprob_mismatch_mean"], step.get("tokens", 1.0))
        for step in steps
        if "logprob_mismatch_mean" in step
    ]
    weight = math.fsum(tokens for _, tokens in pairs)
    return math.fsum(value * tokens for value, tokens in pairs) / weight if weight else None
