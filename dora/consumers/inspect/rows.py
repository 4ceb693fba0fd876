"""Trajectories and groups as rows of a table.

A row follows from one counted trajectory and from what the ledger says of its group;
what is not known is None, never a number that stands for it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from dora.log.run_log import Placed, RunLog
from dora.schemas.records import Admission, Purpose, Trajectory, unpack_logprobs

State = Literal["trained", "set-aside", "outstanding", "evaluation"]
SORT_KEYS = ("reward", "length", "mismatch", "staleness")


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a group: the step that trained it, with its staleness then, or the reason for
    which it was set aside."""

    state: State
    step: int | None = None
    staleness: int | None = None
    reason: str | None = None

    def __str__(self) -> str:
        if self.state == "trained":
            return f"step {self.step}"
        return f"set aside: {self.reason}" if self.state == "set-aside" else self.state


class Fates:
    """The fate of every group of a run."""

    def __init__(self, run: RunLog) -> None:
        self._trained = run.trained_at()
        self._set_aside = run.set_aside()

    def of(self, group: Admission) -> Fate:
        """What the ledger says of `group`."""
        step = self._trained.get(group.group_id)
        if step is not None:
            return Fate("trained", step, step - 1 - group.policy_version)
        if group.group_id in self._set_aside:
            return Fate("set-aside", reason=self._set_aside[group.group_id])
        return Fate("evaluation" if group.purpose == "eval" else "outstanding")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """What a trajectory and a group have in common. `logprob` is the mean log-probability (nats) of
    the generated tokens and `mismatch` the mean absolute difference to the trainer's, if that was
    recomputed."""

    id: str
    purpose: Purpose
    version: int
    ordinal: int
    fate: Fate
    reward: float | None
    finish: str
    attempts: int
    worker: str
    logprob: float | None
    mismatch: float | None

    @property
    def staleness(self) -> int | None:
        """Versions between generation and training."""
        return self.fate.staleness

    def to_json(self) -> dict[str, Any]:
        """The row as JSON-able values, its fate laid flat."""
        values = asdict(self)
        fate: dict[str, Any] = values.pop("fate")
        return values | fate


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Listed):
    """One trajectory. `length` counts generated tokens."""

    group: str
    sample: int
    length: int
    engine: str
    error: str | None
    text: str | None
    partition: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow(Listed):
    """One group: means over those of its trajectories that are finished. `worker` and `finish` name
    all that occur, `attempts` is the largest number."""

    finished: int
    size: int
    reward_min: float | None
    reward_max: float | None
    length: float


R = TypeVar("R", bound=Listed)


@dataclass(frozen=True, slots=True)
class Scope:
    """Which trajectories are asked for: of these versions and groups (None: of all)."""

    versions: frozenset[int] | None = None
    groups: frozenset[str] | None = None

    def holds(self, group: Admission) -> bool:
        """Whether `group` is within the scope."""
        return (self.versions is None or group.policy_version in self.versions) and (
            self.groups is None or group.group_id in self.groups
        )


def scope_of(run: RunLog, version: int | None, step: int | None) -> Scope:
    """The trajectories of `version` and of the groups that `step` trained or set aside.

    RunError if the run has no such version or step.
    """
    groups: frozenset[str] | None = None
    versions: frozenset[int] | None = None
    if step is not None:
        entry = run.step(step)
        refs = (*entry.trained, *entry.set_aside)
        groups = frozenset(ref.group_id for ref in refs)
        versions = frozenset(ref.version for ref in refs)
    if version is not None:
        run.check_version(version)
        versions = frozenset({version}) if versions is None else versions & {version}
    return Scope(versions, groups)


def rows_of(run: RunLog, scope: Scope) -> Iterator[Row]:
    """The finished trajectories within `scope`, as they lie in the log."""
    fates = Fates(run)
    if scope.versions is not None and not scope.versions:
        return
    for placed in run.trajectories(scope.versions):
        group = run.admissions[placed.record.group_id]
        if scope.holds(group):
            yield row_of(placed, fates.of(group))


def row_of(placed: Placed[Trajectory], fate: Fate) -> Row:
    """The row of one trajectory."""
    record, logprobs = placed.record, generated_logprobs(placed.record)
    return Row(
        id=record.trajectory_id,
        group=record.group_id,
        sample=record.sample,
        purpose=record.purpose,
        version=record.policy_version,
        ordinal=record.ordinal,
        fate=fate,
        reward=record.reward,
        length=record.generated_tokens,
        finish=record.finish_reason,
        attempts=record.attempt + 1,
        worker=record.worker,
        engine=record.engine,
        logprob=float(logprobs.mean()) if len(logprobs) else None,
        mismatch=None,
        error=record.error,
        text=record.text,
        partition=placed.partition,
        offset=placed.offset,
    )


def generated_logprobs(record: Trajectory) -> npt.NDArray[np.float64]:
    """Recorded log-probabilities (nats) of the generated tokens, shape [m]."""
    mask = np.frombuffer(record.mask, dtype=np.bool_)
    return unpack_logprobs(record.logprobs)[mask].astype(np.float64)


def group_rows(run: RunLog, rows: Iterable[Row]) -> list[GroupRow]:
    """The groups of `rows`, in the order of their first row."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return [_group_row(run.admissions[group], own) for group, own in groups.items()]


def _group_row(admission: Admission, rows: Sequence[Row]) -> GroupRow:
    rewards = [row.reward for row in rows if row.reward is not None]
    return GroupRow(
        id=admission.group_id,
        purpose=admission.purpose,
        version=admission.policy_version,
        ordinal=admission.ordinal,
        fate=rows[0].fate,
        finished=len(rows),
        size=admission.group_size,
        reward=_mean(rewards),
        reward_min=min(rewards, default=None),
        reward_max=max(rewards, default=None),
        length=sum(row.length for row in rows) / len(rows),
        finish=_counted(row.finish for row in rows),
        attempts=max(row.attempts for row in rows),
        worker=", ".join(sorted({row.worker for row in rows})),
        logprob=_mean([row.logprob for row in rows if row.logprob is not None]),
        mismatch=_mean([row.mismatch for row in rows if row.mismatch is not None]),
    )


def sort_rows(rows: Iterable[R], key: str | None, *, reverse: bool = False) -> list[R]:
    """Rows by `key`, one of SORT_KEYS, smallest first, or largest with `reverse`; by version and
    prompt without one, and where it is equal. Those without a value come last either way."""
    ordered = sorted(rows, key=lambda row: (row.version, row.ordinal, row.id))
    if key is None:
        return ordered[::-1] if reverse else ordered
    known = [row for row in ordered if getattr(row, key) is not None]
    known.sort(key=lambda row: getattr(row, key), reverse=reverse)
    return known + [row for row in ordered if getattr(row, key) is None]


def unfinished(run: RunLog, scope: Scope, found: Mapping[str, int]) -> int:
    """Trajectories within `scope` that were started and are not in the log as finished; `found` are
    those that are, by group."""
    return sum(
        group.group_size - found.get(group.group_id, 0)
        for group in run.admissions.values()
        if scope.holds(group)
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _counted(names: Iterable[str]) -> str:
    counts = Counter(names)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
