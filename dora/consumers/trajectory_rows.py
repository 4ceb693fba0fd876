"""Trajectories and groups as rows of a table.

Invariant: a row follows from one counted trajectory and from what the ledger says of its group;
what is not known is None, never a number that stands for it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from dora.consumers.run_log import Placed, RunLog
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


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory. `length` counts generated tokens; `logprob` is their mean log-probability
    (nats) and `mismatch` the mean absolute difference to the trainer's, if that was recomputed."""

    id: str
    group: str
    sample: int
    purpose: Purpose
    version: int
    ordinal: int
    fate: Fate
    reward: float | None
    length: int
    finish: str
    attempts: int
    worker: str
    engine: str
    logprob: float | None
    mismatch: float | None
    error: str | None
    text: str | None
    partition: int
    offset: int

    @property
    def staleness(self) -> int | None:
        """Versions between generation and training."""
        return self.fate.staleness

    def to_json(self) -> dict[str, Any]:
        """The row as JSON-able values, its fate laid flat."""
        return _flat(asdict(self))


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group: means over those of its trajectories that are finished. `worker` and `finish` name
    all that occur, `attempts` is the largest number."""

    id: str
    purpose: Purpose
    version: int
    ordinal: int
    fate: Fate
    finished: int
    size: int
    reward: float | None
    reward_min: float | None
    reward_max: float | None
    length: float
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
        return _flat(asdict(self))


R = TypeVar("R", Row, GroupRow)


@dataclass(slots=True)
class Scope:
    """Which trajectories are asked for: of these versions and groups (None: of all)."""

    versions: frozenset[int] | None = None
    groups: frozenset[str] | None = None

    def admissions(self, run: RunLog) -> Iterator[Admission]:
        """The groups within the scope."""
        for admission in run.admissions.values():
            if self.groups is not None and admission.group_id not in self.groups:
                continue
            if self.versions is None or admission.policy_version in self.versions:
                yield admission


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
        record = placed.record
        if scope.groups is None or record.group_id in scope.groups:
            yield row_of(placed, fates.of(run.admissions[record.group_id]))


def row_of(placed: Placed[Trajectory], fate: Fate) -> Row:
    """The row of one trajectory."""
    record = placed.record
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
        logprob=mean_logprob(record),
        mismatch=None,
        error=record.error,
        text=record.text,
        partition=placed.partition,
        offset=placed.offset,
    )


def mean_logprob(record: Trajectory) -> float | None:
    """Mean recorded log-probability (nats) of the generated tokens; None where there are none."""
    mask = np.frombuffer(record.mask, dtype=np.uint8).astype(bool)
    values = unpack_logprobs(record.logprobs)[mask]
    return float(values.astype(np.float64).mean()) if len(values) else None


@dataclass(slots=True)
class _Gathered:
    admission: Admission
    fate: Fate
    rows: list[Row] = field(default_factory=list)


def group_rows(run: RunLog, rows: Iterable[Row]) -> list[GroupRow]:
    """The groups of `rows`, in the order of their first row."""
    gathered: dict[str, _Gathered] = {}
    for row in rows:
        admission = run.admissions[row.group]
        gathered.setdefault(row.group, _Gathered(admission, row.fate)).rows.append(row)
    return [_group_row(each) for each in gathered.values()]


def _group_row(group: _Gathered) -> GroupRow:
    rows, admission = group.rows, group.admission
    rewards = [row.reward for row in rows if row.reward is not None]
    return GroupRow(
        id=admission.group_id,
        purpose=admission.purpose,
        version=admission.policy_version,
        ordinal=admission.ordinal,
        fate=group.fate,
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


def sort_rows(rows: Iterable[Row], key: str | None, *, reverse: bool = False) -> list[Row]:
    """Rows by `key`, one of SORT_KEYS, smallest first, or largest with `reverse`; by version and
    prompt without one, and where it is equal. Those without a value come last either way."""
    return _sorted(list(rows), key, reverse=reverse)


def sort_groups(
    rows: Iterable[GroupRow], key: str | None, *, reverse: bool = False
) -> list[GroupRow]:
    """The same for groups."""
    return _sorted(list(rows), key, reverse=reverse)


def unfinished(run: RunLog, scope: Scope, found: Mapping[str, int]) -> int:
    """Trajectories within `scope` that were started and are not in the log as finished; `found` are
    those that are, by group."""
    return sum(group.group_size - found.get(group.group_id, 0) for group in scope.admissions(run))


def _sorted(rows: list[R], key: str | None, *, reverse: bool) -> list[R]:
    rows.sort(key=lambda row: (row.version, row.ordinal, row.id), reverse=reverse and key is None)
    if key is None:
        return rows
    known = [row for row in rows if getattr(row, key) is not None]
    known.sort(key=lambda row: getattr(row, key), reverse=reverse)
    return known + [row for row in rows if getattr(row, key) is None]


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _counted(names: Iterable[str]) -> str:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    fate = values.pop("fate")
    at = list(values).index("ordinal") + 1
    items = list(values.items())
    return dict([*items[:at], *fate.items(), *items[at:]])
