"""Reads a run's log into what the coordinator knows (`dora.core.scheduling.coordination`).

`rebuild` and then `follow` leave the same knowledge as following from the run's first record, but
read only what concerns the live versions: a policy record names the offsets at which its version
begins in ledger, journal and commands, and groups of versions that left the window are closed. So
the time to start is bounded by the window, not by the length of the run.
"""

import logging
from collections.abc import Callable, Sequence

from dora.bus.offsets import Partition
from dora.bus.reader import BEGINNING, LogReader, Message, Unreadable
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.config import Config
from dora.core.ring import JOURNAL, slot_partitions, version_starts
from dora.core.scheduling.coordination import Coordination
from dora.errors import RunError
from dora.log.continuation import check_configuration
from dora.log.presence import recent_statuses
from dora.schemas.records import Admission, Policy, RunStarted

log = logging.getLogger(__name__)

REBUILD_SECONDS = 300.0


class LogFollower:
    """Feeds `coordination`; `clock` is a monotonic one, in seconds."""

    def __init__(
        self,
        config: Config,
        settings: ClusterSettings,
        coordination: Coordination,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._settings = settings
        self._coordination = coordination
        self._clock = clock
        self._run = config.run.name
        self._topics = RunTopics(self._run)
        self._window = coordination.rules.window
        self._policies: dict[int, Policy] = {}
        self.run_id = ""
        """Of the ledger's first record; empty before it is read."""
        self._reader = LogReader(settings, client_id="coordinator")

    def rebuild(self) -> int:
        """Reads the log to its end; afterwards everything that was started and has no holder is
        found. Returns how many records were read; DeadlineError if that takes too long."""
        started = self._clock()
        self._check_first()
        base, count = self._read_policies()
        positions = self._positions(base)
        if base is not None:
            self._coordination.state.begin_at(base.version)
        self._reader.assign(positions)
        count += self._read_to_end()
        if base is not None and self._coordination.state.next_ordinal == 0:
            self._read_last_admission(positions[self._topics.dispatch, JOURNAL])
        self._coordination.commands_read(self._clock())
        self._follow_trajectories()
        count += self._read_to_end()
        self._coordination.rebuilt(self._clock())
        state = self._coordination.state
        log.info(
            "rebuilt from the log (%d records) in %.2f s: version %d, %d groups outstanding, "
            "%d trajectories to place, %d to take over",
            count,
            self._clock() - started,
            state.newest,
            state.outstanding_total,
            len(self._coordination.pending),
            len(self._coordination.scans),
        )
        return count

    def follow(self, timeout: float) -> None:
        """Takes what has arrived; waits up to `timeout` seconds for something to come."""
        for message in self._reader.poll(timeout=timeout):
            self._apply(message, live=True)

    def start_of(self, topic: str, version: int) -> dict[Partition, int]:
        """Where the version's slot of `topic` starts, by partition: the announced offsets."""
        return version_starts(self._policies.get(version), topic)

    def close(self) -> None:
        """Close the connections to the cluster."""
        self._reader.close()

    def _aside(self) -> LogReader:
        """A reader that leaves the positions of the one that is followed alone."""
        return LogReader(self._settings, client_id="coordinator")

    def _read_to_end(self) -> int:
        count = 0
        for message in self._reader.read_to_end(REBUILD_SECONDS):
            self._apply(message, live=False)
            count += 1
        return count

    def _check_first(self) -> None:
        """The ledger's first record says whose run this is."""
        with self._aside() as reader:
            reader.assign({(self._topics.steps, 0): BEGINNING})
            first = next(reader.read_to_end(REBUILD_SECONDS), None)
        if first is None:
            return
        if isinstance(first.value, RunStarted):
            self._check_identity(first.value)
        elif isinstance(first.value, Unreadable):
            self._unreadable(first, first.value)
        else:
            raise RunError(
                f"{first.place} is the ledger's first record, but it does not start the run",
                hint="Its beginning was deleted (retention), or something else wrote to the topic. "
                "A run cannot go on without it: give run.name another value.",
            )

    def _read_policies(self) -> tuple[Policy | None, int]:
        """Reads the newest policies; returns the one to begin at (None: with the run), and how many
        records were read.

        One version more than the window's is allowed for: a step may show in the policies before it
        shows in the ledger.
        """
        found = self._reader.read_back(
            (self._topics.policies, 0), self._holds_window, REBUILD_SECONDS
        )
        for message in found:
            self._apply(message, live=False)
        newest = max(self._policies, default=-1)
        oldest = max(0, self._window.oldest_live(newest) - 1)
        base = self._policies.get(oldest)
        if base is None or base.version == 0:
            return None, len(found)
        topics = {topic for topic, _ in version_starts(base)}
        return base if {self._topics.steps, self._topics.dispatch} <= topics else None, len(found)

    def _holds_window(self, found: Sequence[Message]) -> bool:
        versions = {m.value.version for m in found if isinstance(m.value, Policy)}
        newest = max(versions, default=-1)
        oldest = max(0, self._window.oldest_live(newest) - 1)
        return bool(versions) and versions.issuperset(range(oldest, newest + 1))

    def _positions(self, base: Policy | None) -> dict[Partition, int]:
        topics = self._topics
        places = [(topics.steps, 0)]
        places += [(topics.dispatch, i) for i in range(self._config.kafka.dispatch_partitions)]
        positions = dict.fromkeys(places, BEGINNING)
        if base is not None:
            announced = version_starts(base)
            positions = {place: announced.get(place, BEGINNING) for place in places}
        return positions | recent_statuses(self._reader, topics)

    def _read_last_admission(self, before: int) -> None:
        """Looks back from offset `before` of the journal for the newest train admission: where the
        prompt stream goes on."""

        def train_admissions(found: Sequence[Message]) -> list[Message]:
            return [
                m for m in found if isinstance(m.value, Admission) and m.value.purpose == "train"
            ]

        place = (self._topics.dispatch, JOURNAL)
        with self._aside() as reader:
            found = reader.read_back(
                place, lambda m: bool(train_admissions(m)), REBUILD_SECONDS, before=before
            )
        for message in train_admissions(found)[-1:]:
            self._apply(message, live=False)

    def _follow_trajectories(self) -> None:
        """Reads finished trajectories from where the live versions start."""
        kafka, ring = self._config.kafka, self._config.window.ring
        topic, newest = self._topics.trajectories, self._coordination.state.newest
        every = [
            (topic, index)
            for version in range(ring)
            for index in slot_partitions(version, ring, kafka.lanes)
        ]
        # nothing is generated for a version before this coordinator says so: the slots of versions
        # that are not live are followed from here on
        fresh = newest < 0
        positions = dict.fromkeys(every, BEGINNING) if fresh else self._reader.end_offsets(every)
        for version in range(self._window.oldest_live(newest), newest + 1):
            if version not in self._policies:
                if version == newest:
                    continue  # its announcement is about to be read; nothing is generated yet
                raise RunError(f"{self._topics.policies} has no record of version {version}")
            positions.update(self.start_of(topic, version))
        # what was handed over to an earlier coordinator is found in the chunks
        handovers = (self._topics.handovers, 0)
        positions |= self._reader.end_offsets([handovers])
        self._reader.assign(positions)

    def _apply(self, message: Message, *, live: bool) -> None:
        value = message.value
        match value:
            case Unreadable():
                self._unreadable(message, value)
                return
            case RunStarted():
                self._check_identity(value)
            case Policy():
                self._policies[value.version] = value
                # the ledger may be read a step behind the policies
                oldest = self._window.oldest_live(max(self._policies)) - 1
                for version in [v for v in self._policies if v < oldest]:
                    del self._policies[version]
        try:
            self._coordination.handle(
                value, message.partition, message.offset, now=self._clock(), live=live
            )
        except ValueError as error:
            raise RunError(
                f"{message.place} contradicts the log before it: {error}",
                hint="Something else than this run wrote to the topic, or it was damaged.",
            ) from error

    def _unreadable(self, message: Message, value: Unreadable) -> None:
        """What the rules rest on must be readable; a trajectory is the trainer's to report, and
        commands and status are their readers'."""
        topics = self._topics
        journal = message.topic == topics.dispatch and message.partition == JOURNAL
        if journal or message.topic in (topics.steps, topics.policies):
            raise RunError(
                f"{message.place} cannot be read ({value.code}): {value.reason}",
                hint="It is needed to know what was started or trained. The topic is damaged, "
                "or was written by a newer dora.",
            )
        log.warning("%s cannot be read (%s): %s", message.place, value.code, value.reason)

    def _check_identity(self, started: RunStarted) -> None:
        self.run_id = started.run_id
        check_configuration(started, self._config, self._coordination.state.newest)
