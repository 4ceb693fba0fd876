"""Which versions of a run are closed, where each lies in the log, and which records are its own.

Of a closed version nothing changes any more: no group starts under it, and the ledger
says of each of its groups what became of it. A record belongs to the version whose group it names
only with that group's version and partition, a sample that the group has, and the name of both.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dora.core.groups import misfit
from dora.core.ring import partition, slot_partitions, trajectory_id, version_starts
from dora.schemas.records import Admission, GroupRef, Policy, RunStarted, Step, Trajectory

_NAMED = 3


@dataclass(frozen=True, slots=True)
class TopicBounds:
    """The topic of trajectories: of each partition the first offset that is there, and the end."""

    topic: str
    begins: Mapping[int, int]
    ends: Mapping[int, int]


class RunVersions:
    """The versions of a run, by what its log says.

    With `ended` the run counts as over: nothing that is outstanding is waited for. Without
    `journal_whole` the journal of admissions has lost its beginning, so that a group that is not in
    `admissions` may have started all the same.
    """

    def __init__(
        self,
        started: RunStarted,
        policies: Mapping[int, Policy],
        admissions: Mapping[str, Admission],
        ledger: Iterable[Step],
        bounds: TopicBounds,
        *,
        ended: bool = False,
        journal_whole: bool = True,
    ) -> None:
        self._started = started
        self._policies = policies
        self._admissions = admissions
        self._bounds = bounds
        self._ended = ended
        self._journal_whole = journal_whole
        self._newest = 0
        self._groups: dict[int, list[Admission]] = defaultdict(list)
        self._refs: dict[int, list[GroupRef]] = defaultdict(list)
        settled: set[str] = set()
        for entry in ledger:
            self._newest = max(self._newest, entry.version_out)
            for ref in (*entry.trained, *entry.set_aside):
                settled.add(ref.group_id)
                self._refs[ref.version].append(ref)
        for group in admissions.values():
            self._groups[group.policy_version].append(group)
        self._outstanding = Counter(
            group.policy_version
            for group in admissions.values()
            if group.purpose == "train" and group.group_id not in settled
        )
        self._over = ended or self._newest == _last_version(started)

    @property
    def numbers(self) -> list[int]:
        """The versions of which the log knows a group, in order."""
        return sorted(self._groups.keys() | self._refs.keys())

    def started(self, version: int) -> int:
        """How many groups started under `version`."""
        return len(self._groups.get(version, ()))

    def outstanding(self, version: int) -> int:
        """How many of them were neither trained nor set aside, evaluations not counted."""
        return self._outstanding[version]

    def open_reason(self, version: int) -> str | None:
        """Why `version` may still change; None if it is closed."""
        if self._ended:
            return None
        live = version >= self._newest - self._started.max_staleness
        outstanding = self._outstanding[version]
        if live and not self._over:
            return "groups may still start under it"
        if outstanding:
            why = "are outstanding" if live else "were never trained: see `dora audit`"
            return f"{outstanding} of its groups {why}"
        return None

    def gone_reason(self, version: int) -> str | None:
        """What retention deleted of `version`; None if all of it is there."""
        topic = self._bounds.topic
        for number, (first, end) in self.extent(version).items():
            begin = self._bounds.begins[number]
            if first < min(begin, end):
                return (
                    f"{topic} partition {number} begins at offset {begin}: "
                    f"{first} to {min(begin, end) - 1}, which are its, were deleted by retention"
                )
        if not self._journal_whole and version not in self._groups:
            return "its part of the journal of admissions was deleted by retention"
        return None

    def extent(self, version: int) -> dict[int, tuple[int, int]]:
        """Where `version` lies: offsets `[first, end)` by partition, up to where the next version
        of its slot begins."""
        heir = self._heir(version)
        firsts = self._starts(version)
        ends = {} if heir is None else self._starts(heir)
        extent = {}
        for number in slot_partitions(version, self._started.ring, self._started.lanes):
            first = firsts.get(number, 0)
            extent[number] = first, max(first, ends.get(number, self._bounds.ends[number]))
        return extent

    def misfit(self, record: Trajectory, place: int) -> str | None:
        """Why `record`, in partition `place`, does not belong there; None if it may."""
        if record.run != self._started.run:
            return f"is of run {record.run}"
        group = self._admissions.get(record.group_id)
        if group is None:
            if self._journal_whole:
                return f"is of group {record.group_id}, which never started"
            return None
        version, ring, lanes = group.policy_version, self._started.ring, self._started.lanes
        home = partition(version, record.group_id, ring, lanes)
        return misfit(record, version, group.group_size, place=place, home=home)

    def lost(self, version: int, found: Collection[str]) -> str | None:
        """Which samples of `version` the ledger names that are not among the trajectories `found`;
        None if all are."""
        named = [
            f"{identity} (partition {sample.partition} offset {sample.offset})"
            for ref in self._refs.get(version, ())
            for sample in ref.samples
            if (identity := trajectory_id(ref.group_id, sample.sample)) not in found
        ]
        return f"the ledger names {_some(named)}, which cannot be read there" if named else None

    def unevaluated(self, version: int, found: Collection[str]) -> str | None:
        """Which evaluations of `version` may still grow, with the trajectories `found`; None if
        none."""
        if self._ended or self._heir(version) is not None:
            return None
        unfinished = [
            group.group_id
            for group in self._groups.get(version, ())
            if group.purpose == "eval"
            and any(trajectory_id(group.group_id, n) not in found for n in range(group.group_size))
        ]
        return f"not evaluated to the end: {_some(unfinished)}" if unfinished else None

    def _heir(self, version: int) -> int | None:
        """The next version of its slot; nothing of `version` is written behind its beginning."""
        ring = self._started.ring
        later = (v for v in self._policies if v > version and (v - version) % ring == 0)
        return min(later, default=None)

    def _starts(self, version: int) -> dict[int, int]:
        starts = version_starts(self._policies.get(version), self._bounds.topic)
        return {number: offset for (_, number), offset in starts.items()}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _last_version(started: RunStarted) -> int | None:
    """The version with which the run ends, as it was configured when it began."""
    try:
        steps = json.loads(started.config or "{}")["trainer"]["steps"]
    except (ValueError, KeyError, TypeError):
        return None
    return steps if isinstance(steps, int) else None
