"""What of a run may be exported, and its trajectories version by version.

Invariant: each record of the trajectories is read once, whatever the number of versions: those of a
slot follow one another in its partitions, and a reader of their own goes through them. A version is
given out only with every sample that the ledger names; a record that is none of the run's becomes a
dead letter and nothing more.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from dora import __version__
from dora.bus.offsets import Partition
from dora.bus.reader import LogReader, Message, Unreadable
from dora.bus.settings import ClusterSettings
from dora.consumers.export_letters import DeadLetters
from dora.consumers.export_rows import Source
from dora.consumers.run_log import Placed, RunLog
from dora.core.ring import JOURNAL, slot, slot_partitions, trajectory_id
from dora.errors import DeadlineError, DoraError
from dora.schemas.records import Admission, GroupRef, RunStarted, Trajectory

_NAMED = 3
_QUEUE_KIB = 16_384
"""What a reader fetches ahead: there are as many readers as slots."""


class NotWhole(DoraError):
    """Records of a version that the ledger names are gone or damaged."""


class StillOpen(DoraError):
    """Something of a version is not finished yet."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a version lies: offsets `[first, end)` by partition, and whether more may still be
    written at its end."""

    ranges: Mapping[int, tuple[int, int]]
    growing: bool


class ExportLog(RunLog):
    """A run's log that knows which records of ledger, policies and journal do not belong there."""

    def __init__(
        self, settings: ClusterSettings, run: str, *, deadline: float, write_letters: bool
    ) -> None:
        self._foreign: list[tuple[Message, str]] = []
        super().__init__(settings, run, deadline=deadline)
        self.letters = DeadLetters(
            settings,
            self.topics,
            write=write_letters and self.topics.dead_letters in self._partitions,
            deadline=deadline,
        )
        journal = f"{self.topics.dispatch} partition {JOURNAL} begins"
        self.journal_whole = not any(text.startswith(journal) for text in self.missing)
        """Whether the journal still has its beginning, so that who is not in it never started."""

    def hand_over(self) -> None:
        """Make what was found so far dead letters."""
        for message, what in self._foreign:
            self.letters.take(message, what)
        self._foreign.clear()

    def _note(self, message: Message, what: str | None = None) -> None:
        self._foreign.append((message, what or _what(message)))
        super()._note(message, what)


class Versions:
    """The versions of `log`, as they are now. Not for use from several threads.

    With `ended` the run counts as over: nothing that is outstanding is waited for. Reading takes at
    most `deadline` seconds together (DeadlineError); BusError if the cluster fails.
    """

    def __init__(
        self, settings: ClusterSettings, log: ExportLog, *, ended: bool, deadline: float
    ) -> None:
        self._log = log
        self._seconds = deadline
        self._until = time.monotonic() + deadline
        self._settings = replace(settings, properties=_modest(settings))
        self._readers: dict[int, LogReader] = {}
        self._at: dict[int, dict[Partition, int]] = {}
        self._stack = ExitStack()
        self.newest = log.steps[-1].version_out if log.steps else 0
        self.ended = ended
        self.over = ended or self.newest == _last_version(log.started)
        """Whether no group will start any more, as far as the log says."""
        self.duplicates = 0
        """Finished records of trajectories that had finished before."""
        self._groups: dict[int, list[Admission]] = {}
        for admission in log.admissions.values():
            self._groups.setdefault(admission.policy_version, []).append(admission)
        self._refs: dict[int, list[GroupRef]] = {}
        settled: set[str] = set()
        for entry in log.ledger:
            for ref in (*entry.trained, *entry.set_aside):
                settled.add(ref.group_id)
                self._refs.setdefault(ref.version, []).append(ref)
        self._outstanding = Counter(
            a.policy_version
            for a in log.admissions.values()
            if a.purpose == "train" and a.group_id not in settled
        )
        topic = log.topics.trajectories
        count = log.started.ring * log.started.lanes
        with self._reader() as reader:
            places = [(topic, number) for number in range(count)]
            self._begin = {p: at for (_, p), at in reader.start_offsets(places).items()}
            self._end = {p: at for (_, p), at in reader.end_offsets(places).items()}

    @property
    def numbers(self) -> list[int]:
        """The versions of which the log knows a group, in order."""
        return sorted(self._groups.keys() | self._refs.keys())

    def open_reason(self, version: int) -> str | None:
        """Why the rows of `version` may still change; None if they cannot."""
        oldest_live = self.newest - self._log.started.max_staleness
        outstanding = self._outstanding[version]
        if self.ended:
            return None
        if version >= oldest_live and not self.over:
            return "groups may still start under it"
        if outstanding and version < oldest_live:
            return f"{outstanding} of its groups were never trained: see `dora audit`"
        if outstanding:
            return f"{outstanding} of its groups are outstanding"
        return None

    def gone_reason(self, version: int) -> str | None:
        """What retention deleted of `version`; None if all of it is there."""
        for number, (first, end) in self.extent(version).ranges.items():
            begin = self._begin[number]
            if first < min(begin, end):
                return (
                    f"{self._log.topics.trajectories} partition {number} begins at offset {begin}: "
                    f"{first} to {min(begin, end) - 1}, which are its, were deleted by retention"
                )
        if not self._log.journal_whole and version not in self._groups:
            return f"its part of {self._log.topics.dispatch} was deleted by retention"
        return None

    def source(self, version: int) -> Source:
        """What a target notes about `version`."""
        started = self._log.started
        return Source(
            run=started.run,
            run_id=started.run_id,
            cluster_id=started.cluster_id,
            topic=self._log.topics.trajectories,
            version=version,
            ranges=self.extent(version).ranges,
            groups=len(self._groups.get(version, ())),
            outstanding=self._outstanding[version],
            dora_version=__version__,
        )

    def changed(self, source: Source) -> bool:
        """Whether the version has got rows or fates since `source` was exported: a run that had
        ended went on."""
        return (
            len(self._groups.get(source.version, ())) > source.groups
            or self._outstanding[source.version] < source.outstanding
        )

    def extent(self, version: int) -> Extent:
        """Where `version` lies in the trajectories."""
        started = self._log.started
        first = self._starts(version)
        policies = self._log.policies
        later = range(version + started.ring, max(policies, default=0) + 1, started.ring)
        heir = next((v for v in later if v in policies), None)
        end = {} if heir is None else self._starts(heir)
        ranges = {}
        for number in slot_partitions(version, started.ring, started.lanes):
            begin = first.get(number, 0)
            ranges[number] = (begin, max(begin, end.get(number, self._end[number])))
        return Extent(ranges, growing=heir is None)

    def trajectories(self, version: int) -> Iterator[Placed[Trajectory]]:
        """The counted trajectories of `version`, lane by lane as they come.

        When all were given out: NotWhole if one is missing that the ledger names, StillOpen if an
        evaluation is not finished; dead letters are then in the log.
        """
        extent = self.extent(version)
        seen: set[str] = set()
        for message in self._messages(version, extent):
            placed = self._counted(message, version)
            if placed is None:
                continue
            if placed.record.trajectory_id in seen:
                self.duplicates += 1
                continue
            seen.add(placed.record.trajectory_id)
            yield placed
        self._log.letters.flush()
        self._check_whole(version, seen)
        if extent.growing and not self.ended:
            self._check_evaluated(version, seen)

    def close(self) -> None:
        """Let go of the cluster's connections."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _counted(self, message: Message, version: int) -> Placed[Trajectory] | None:
        value = message.value
        if not isinstance(value, Trajectory):
            self._log.letters.take(message, _what(message))
            return None
        group = self._log.admissions.get(value.group_id)
        if value.run != self._log.run:
            self._log.letters.take(message, f"is of run {value.run}")
        elif group is None and self._log.journal_whole:
            self._log.letters.take(message, f"is of group {value.group_id}, which never started")
        elif group is not None and not (
            value.policy_version == group.policy_version and 0 <= value.sample < group.group_size
        ):
            self._log.letters.take(
                message,
                f"is {value.trajectory_id} of version {value.policy_version}, but that group "
                f"started with {group.group_size} samples under version {group.policy_version}",
            )
        elif group is not None and value.policy_version == version:
            return Placed(message.partition, message.offset, value)
        elif group is not None:
            self.duplicates += 1  # a slow worker's, of a version that had left the window
        return None

    def _messages(self, version: int, extent: Extent) -> Iterator[Message]:
        started, topic = self._log.started, self._log.topics.trajectories
        index = slot(version, started.ring)
        # An empty range may lie before what retention left.
        firsts = {(topic, n): max(first, self._begin[n]) for n, (first, _) in extent.ranges.items()}
        ends = {(topic, n): max(end, self._begin[n]) for n, (_, end) in extent.ranges.items()}
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = self._stack.enter_context(self._reader())
        if self._at.pop(index, None) != firsts:
            reader.assign(firsts)
        yield from reader.read_until(ends, self._left())
        self._at[index] = ends

    def _check_whole(self, version: int, seen: set[str]) -> None:
        lost = [
            (f"{trajectory_id(ref.group_id, sample.sample)}", sample.partition, sample.offset)
            for ref in self._refs.get(version, ())
            for sample in ref.samples
            if trajectory_id(ref.group_id, sample.sample) not in seen
        ]
        if lost:
            named = ", ".join(f"{i} (partition {p} offset {o})" for i, p, o in lost[:_NAMED])
            more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
            raise NotWhole(f"the ledger names {named}{more}, which cannot be read there")

    def _check_evaluated(self, version: int, seen: set[str]) -> None:
        unfinished = [
            group.group_id
            for group in self._groups.get(version, ())
            if group.purpose == "eval"
            and any(
                trajectory_id(group.group_id, sample) not in seen
                for sample in range(group.group_size)
            )
        ]
        if unfinished:
            more = f" and {len(unfinished) - _NAMED} more" if len(unfinished) > _NAMED else ""
            raise StillOpen(f"not evaluated to the end: {', '.join(unfinished[:_NAMED])}{more}")

    def _starts(self, version: int) -> dict[int, int]:
        policy = self._log.policies.get(version)
        topic = self._log.topics.trajectories
        return {s.partition: s.offset for s in policy.slots if s.topic == topic} if policy else {}

    def _reader(self) -> LogReader:
        return LogReader(self._settings, client_id=f"{self._log.run}.export")

    def _left(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise DeadlineError(
                f"exporting run {self._log.run} took more than {self._seconds:g} s",
                hint="Give it more time with --timeout; what was exported stays, and the same "
                "command goes on from there.",
            )
        return left


def _what(message: Message) -> str:
    value = message.value
    if isinstance(value, Unreadable):
        return f"cannot be read: {value.reason}"
    return f"holds a {type(value).__name__}, which does not belong there"


def _last_version(started: RunStarted) -> int | None:
    """The version with which the run ends, as it was configured when it began."""
    try:
        steps = json.loads(started.config or "{}")["trainer"]["steps"]
    except (ValueError, KeyError, TypeError):
        return None
    return steps if isinstance(steps, int) else None


def _modest(settings: ClusterSettings) -> dict[str, str]:
    kib = max(_QUEUE_KIB, 2 * settings.max_message_bytes // 1024)
    return {"queued.max.messages.kbytes": str(kib), **settings.properties}
