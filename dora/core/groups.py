"""Groups while they are outstanding, and the tallies that a run keeps of them.

A group holds at most one finished record per sample index, the one that counts.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dora.core.ring import trajectory_id
from dora.core.window import Candidate
from dora.schemas.records import Purpose, Step, Trajectory

_NUMBERS = re.compile(r"\d+")
_LONGEST_SHOWN = 200
_REASONS_HELD = 2_000
OTHER_REASONS = "other reasons"
NO_SIGNAL = "no_signal"
"""Reason for setting a group aside whose rewards are all equal."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The facts of a Trajectory record and where it lies, without its tokens."""

    trajectory_id: str
    group_id: str
    sample: int
    attempt: int
    policy_version: int
    purpose: Purpose
    reward: float | None
    error: str | None
    generated_tokens: int
    finish_reason: str
    worker: str
    partition: int
    offset: int


def misfit(
    record: Finished | Trajectory,
    version: int,
    size: int,
    *,
    place: int | None = None,
    home: int | None = None,
) -> str | None:
    """Why `record` is no trajectory of the group that it names; None if it is one.

    That group was started under `version` with `size` samples. Where it is known, `place` is the
    partition in which the record lies and `home` the group's.
    """
    if record.policy_version != version or not 0 <= record.sample < size:
        return (
            f"is {record.trajectory_id} of version {record.policy_version}, but that group "
            f"started with {size} samples under version {version}"
        )
    if record.trajectory_id != trajectory_id(record.group_id, record.sample):
        return (
            f"is called {record.trajectory_id}, but is sample {record.sample} of group "
            f"{record.group_id}"
        )
    if place != home:
        return f"is {record.trajectory_id}, whose partition is {home}"
    return None


def finished_facts(trajectory: Trajectory, partition: int, offset: int) -> Finished:
    """The facts of `trajectory`, read at `offset` of `partition` of the trajectories topic."""
    return Finished(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        sample=trajectory.sample,
        attempt=trajectory.attempt,
        policy_version=trajectory.policy_version,
        purpose=trajectory.purpose,
        reward=trajectory.reward,
        error=trajectory.error,
        generated_tokens=trajectory.generated_tokens,
        finish_reason=trajectory.finish_reason,
        worker=trajectory.worker,
        partition=partition,
        offset=offset,
    )


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ at all.

    Groups without signal are what dynamic sampling filters (DAPO, arXiv 2503.14476, section 3.2).
    """
    return any(reward != rewards[0] for reward in rewards[1:])


@dataclass(slots=True)
class Group:
    """A started group and its finished samples; owned and changed by RunState alone."""

    group_id: str
    ordinal: int
    version: int
    size: int
    purpose: Purpose
    samples: dict[int, Finished] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all samples are finished."""
        return len(self.samples) == self.size

    @property
    def missing(self) -> tuple[int, ...]:
        """Sample indices that are not finished, in order."""
        return tuple(sample for sample in range(self.size) if sample not in self.samples)

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """Rewards of the finished samples in order of their index; None where there is none."""
        return tuple(self.samples[sample].reward for sample in sorted(self.samples))

    @property
    def tokens(self) -> int:
        """Generated tokens of the finished samples."""
        return sum(finished.generated_tokens for finished in self.samples.values())

    @property
    def failure(self) -> str | None:
        """Why the first sample without a reward has none, or None if all finished ones have one."""
        for sample in sorted(self.samples):
            finished = self.samples[sample]
            if finished.reward is None:
                return finished.error or finished.finish_reason
        return None

    @property
    def candidate(self) -> Candidate:
        """The group as `core.window.pick_batch` takes it."""
        return Candidate(self.version, self.ordinal, self.group_id, self.tokens)


@dataclass(slots=True)
class EvaluationTally:
    """What the evaluation of one version has yielded; counts are trajectories."""

    version: int
    admitted: int = 0
    finished: int = 0
    successes: int = 0
    failed: int = 0
    reward_sum: float = 0.0
    generated_tokens: int = 0

    def count(self, reward: float | None, success_threshold: float) -> None:
        """One more trajectory is finished."""
        self.finished += 1
        if reward is None:
            self.failed += 1
        else:
            self.reward_sum += reward
            self.successes += reward >= success_threshold

    @property
    def complete(self) -> bool:
        """Whether all admitted trajectories are finished."""
        return self.finished == self.admitted

    @property
    def scored(self) -> int:
        """Finished trajectories that have a reward."""
        return self.finished - self.failed

    @property
    def success_rate(self) -> float:
        """Successes as a share of those that have a reward; 0 while none has."""
        return self.successes / self.scored if self.scored else 0.0

    @property
    def reward_mean(self) -> float:
        """Mean reward of those that have one; 0 while none has."""
        return self.reward_sum / self.scored if self.scored else 0.0


@dataclass(slots=True)
class Counters:
    """Totals over the records seen. `trajectories` and `generated_tokens` count, for training and
    evaluation together, the first finished record of each trajectory."""

    trajectories: int = 0
    generated_tokens: int = 0
    duplicates: int = 0
    late: int = 0
    foreign: int = 0
    trained_groups: int = 0
    set_aside_groups: int = 0


@dataclass(slots=True)
class TokenSums:
    """What finished training samples say about the lengths of those to come."""

    samples: int = 0
    """Counted so far in the run."""
    tokens: int = 0
    """Generated tokens of these."""
    known: int = 0
    """Generated tokens of the finished samples of outstanding groups."""
    missing: int = 0
    """Unfinished samples of outstanding groups."""

    @property
    def mean(self) -> float:
        """Mean length in tokens; 0 while nothing is known."""
        return self.tokens / self.samples if self.samples else 0.0

    @property
    def expected(self) -> float:
        """Tokens that the outstanding groups will have."""
        return self.known + self.missing * self.mean


@dataclass(frozen=True, slots=True)
class CommonReason:
    """The commonest of the reasons for something that happened `total` times."""

    reason: str
    """As it was first given."""
    count: int
    total: int

    @property
    def text(self) -> str:
        """`27 of 30 because of: KeyError ...`, on one line."""
        reason = " ".join(self.reason.split())
        shown = reason if len(reason) <= _LONGEST_SHOWN else f"{reason[:_LONGEST_SHOWN]}..."
        return f"{self.count} of {self.total} because of: {shown}"


class ReasonTally:
    """Counts reasons. Those that differ in numbers only, such as ids and times, count as one."""

    def __init__(self) -> None:
        self.total = 0
        """Reasons counted."""
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, reason: str) -> None:
        """One more; beyond so many different ones it counts as one of `OTHER_REASONS`."""
        kind = _NUMBERS.sub("#", reason)
        if kind not in self._counts and len(self._counts) >= _REASONS_HELD:
            kind = reason = OTHER_REASONS
        self.total += 1
        self._counts[kind] += 1
        self._examples.setdefault(kind, reason)

    def most(self, number: int) -> tuple[tuple[str, int], ...]:
        """The commonest reasons, as they were first given, with their counts; then the rest, if
        there is one, as `OTHER_REASONS`."""
        top = [(k, c) for k, c in self._counts.most_common(number + 1) if k != OTHER_REASONS]
        found = [(self._examples[kind], count) for kind, count in top[:number]]
        rest = self.total - sum(count for _, count in found)
        return (*found, (OTHER_REASONS, rest)) if rest else tuple(found)

    @property
    def commonest(self) -> CommonReason | None:
        """The commonest reason; None without any."""
        if not self._counts:
            return None
        reason, count = self.most(1)[0]
        return CommonReason(reason, count, self.total)


class SetAsideStreak:
    """The groups that were set aside since the last one was trained, counted by reason."""

    def __init__(self) -> None:
        self.reasons = ReasonTally()

    def on_step(self, step: Step) -> None:
        """An entry of the ledger was committed."""
        if step.trained:
            self.reasons = ReasonTally()
            return
        for ref in step.set_aside:
            self.reasons.add(ref.reason or "no reason")
