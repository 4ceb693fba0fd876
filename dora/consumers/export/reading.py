"""A run's trajectories, version by version, for an export.

Each record of the trajectories is read once, whatever the number of versions: the versions of a
slot follow one another in its partitions, and a reader of its own goes through them. A version is
complete only with every sample that the ledger names. A foreign record becomes a dead letter.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

from dora import __version__
from dora.bus.offsets import Partition
from dora.bus.reader import LogReader, Message, Unreadable
from dora.bus.settings import ClusterSettings
from dora.closeable import Closeable
from dora.consumers.export.rows import Source
from dora.core.closed_versions import RunVersions, TopicBounds
from dora.core.ring import JOURNAL, slot
from dora.errors import DeadlineError, DoraError
from dora.log.dead_letters import ForeignRecords
from dora.log.run_log import Placed, RunLog
from dora.schemas.records import Trajectory

_QUEUE_KIB = 16_384
"""What a reader fetches ahead: there are as many readers as slots."""


class NotWhole(DoraError):
    """Records of a version that the ledger names are gone or damaged."""


class StillOpen(DoraError):
    """Something of a version is not finished yet."""


class ExportLog(RunLog):
    """A run's log that keeps the foreign records of ledger, policies and journal."""

    def __init__(
        self, settings: ClusterSettings, run: str, *, deadline: float, write_dead_letters: bool
    ) -> None:
        self._foreign: list[tuple[Message, str]] = []
        super().__init__(settings, run, deadline=deadline)
        self.dead_letters = ForeignRecords(
            settings,
            self.topics,
            "export",
            write=write_dead_letters and self.topics.dead_letters in self._partitions,
            deadline=deadline,
        )

    def write_foreign(self) -> None:
        """Make dead letters of the foreign records that were read so far."""
        for message, reason in self._foreign:
            self.dead_letters.add(message, reason)
        self._foreign.clear()

    def _note(self, message: Message, what: str | None = None) -> None:
        self._foreign.append((message, what or _misplaced(message)))
        super()._note(message, what)


class VersionReader(Closeable):
    """Reads the versions of `log` as they are now; `versions` says what they are. Not for use from
    several threads.

    With `ended` the run counts as over. Reading takes at most `deadline` seconds together
    (DeadlineError); BusError if the cluster fails.
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
        self.duplicates = 0
        """Finished records of trajectories that had finished before."""
        started, topic = log.started, log.topics.trajectories
        places = [(topic, number) for number in range(started.ring * started.lanes)]
        journal = (log.topics.dispatch, JOURNAL)
        with self._reader() as reader:
            begins = reader.start_offsets([*places, journal])
            ends = reader.end_offsets(places)
        journal_whole = begins.pop(journal) == 0
        self._begins = {number: at for (_, number), at in begins.items()}
        self.versions = RunVersions(
            started,
            log.policies,
            log.admissions,
            log.ledger,
            TopicBounds(topic, self._begins, {number: at for (_, number), at in ends.items()}),
            ended=ended,
            journal_whole=journal_whole,
        )

    def source(self, version: int) -> Source:
        """What a target notes about `version`."""
        started, versions = self._log.started, self.versions
        return Source(
            run=started.run,
            run_id=started.run_id,
            cluster_id=started.cluster_id,
            topic=self._log.topics.trajectories,
            version=version,
            ranges=versions.extent(version),
            groups=versions.started(version),
            outstanding=versions.outstanding(version),
            dora_version=__version__,
        )

    def changed(self, source: Source) -> bool:
        """Whether the version has got rows or fates since `source` was exported: a run that had
        ended went on."""
        return (
            self.versions.started(source.version) > source.groups
            or self.versions.outstanding(source.version) < source.outstanding
        )

    def trajectories(self, version: int) -> Iterator[Placed[Trajectory]]:
        """The counted trajectories of `version`, lane by lane as they come.

        After the last one: NotWhole if one is missing that the ledger names, StillOpen if an
        evaluation is not finished. Dead letters are then in the log.
        """
        seen: set[str] = set()
        for message in self._messages(version):
            record = self._own_trajectory(message)
            if record is None:
                continue
            if record.trajectory_id in seen or record.policy_version != version:
                self.duplicates += 1  # of another version: a slow worker's, behind its successor's
                continue
            seen.add(record.trajectory_id)
            yield Placed(message.partition, message.offset, record)
        self._log.dead_letters.flush()
        if reason := self.versions.lost(version, seen):
            raise NotWhole(reason)
        if reason := self.versions.unevaluated(version, seen):
            raise StillOpen(reason)

    def close(self) -> None:
        """Close the connections to the cluster."""
        self._stack.close()

    def _own_trajectory(self, message: Message) -> Trajectory | None:
        """The trajectory of a group of the run, if that is what was read."""
        record = message.value
        if not isinstance(record, Trajectory):
            self._log.dead_letters.add(message, _misplaced(message))
        elif reason := self.versions.misfit(record, message.partition):
            self._log.dead_letters.add(message, reason)
        elif record.group_id in self._log.admissions:
            return record
        return None

    def _messages(self, version: int) -> Iterator[Message]:
        topic, index = self._log.topics.trajectories, slot(version, self._log.started.ring)
        firsts: dict[Partition, int] = {}
        ends: dict[Partition, int] = {}
        for number, (first, end) in self.versions.extent(version).items():
            begin = self._begins[number]  # an empty range may lie before what retention left
            firsts[topic, number], ends[topic, number] = max(first, begin), max(end, begin)
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = self._stack.enter_context(self._reader())
        if self._at.pop(index, None) != firsts:
            reader.assign(firsts)
        yield from reader.read_until(ends, self._left())
        self._at[index] = ends

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


def _misplaced(message: Message) -> str:
    value = message.value
    if isinstance(value, Unreadable):
        return f"cannot be read: {value.reason}"
    return f"holds a {type(value).__name__}, which does not belong there"


def _modest(settings: ClusterSettings) -> dict[str, str]:
    kib = max(_QUEUE_KIB, 2 * settings.max_message_bytes // 1024)
    return {"queued.max.messages.kbytes": str(kib), **settings.properties}
