"""A coordinator: the real `core.coordination`, started and fed as its shell does it."""

from dataclasses import dataclass, field

from dora.core import ring
from dora.core.processes import GONE
from dora.core.ring import trajectory_id
from dora.core.scheduling.coordination import Coordination
from dora.core.scheduling.prefixes import Prefix, PrefixCollector
from dora.core.scheduling.records import DecisionRecords
from dora.core.scheduling.scheduler import Decision, Rules
from dora.schemas.records import Admission, Chunk, Command, Policy, Record, Status, Trajectory
from tests.protocol.log import (
    CHUNKS,
    DISPATCH,
    HANDOVERS,
    JOURNAL,
    LEDGER,
    POLICIES,
    RUN,
    STATUSES,
    TRAJECTORIES,
    Crash,
    Place,
    Reader,
    SimulatedLog,
)
from tests.protocol.worker import DISPATCH_PARTITIONS

ID = f"{RUN}.coordinator"
STOP_SECONDS = 30.0


@dataclass
class ModelCoordinator:
    log: SimulatedLog
    rules: Rules
    maker: DecisionRecords
    lanes: int
    incarnation: str
    compacted: bool  # the topic of statuses
    phase: int = 0  # of the rebuilding; 3 is live
    policies: dict[int, Policy] = field(default_factory=dict)
    pending: tuple[Decision, list[Record]] | None = None
    scanned: dict[str, Prefix] = field(default_factory=dict)  # read, not yet taken

    def __post_init__(self) -> None:
        self.epoch = self.log.fence(ID)
        self.core = Coordination(self.rules, self.incarnation)
        self.reader = Reader(self.log)
        self.slots = self.rules.window.max_staleness + 2
        self.beat()

    def rebuild(self, now: float) -> None:
        """One more part of what `producers.run_fold` reads at start; others act between the
        parts."""
        if self.phase == 0:
            self._read_policies()
        elif self.phase == 1:
            self._read_ledger_and_commands(now)
        elif self.phase == 2:
            self._read_trajectories(now)
        self.phase = min(3, self.phase + 1)

    def _read_policies(self) -> None:
        self.reader.positions[POLICIES] = 0
        for policy, _ in self.reader.read(POLICIES):
            assert isinstance(policy, Policy)
            self.policies[policy.version] = policy

    def _read_ledger_and_commands(self, now: float) -> None:
        newest = max(self.policies, default=-1)
        oldest = max(0, self.rules.window.oldest_live(newest) - 1)
        places = [LEDGER, *((DISPATCH, index) for index in range(DISPATCH_PARTITIONS))]
        starts = dict.fromkeys(places, 0)
        if oldest > 0:
            announced = {(s.topic, s.partition): s.offset for s in self.policies[oldest].slots}
            starts = {place: announced[place] for place in places}
            self.core.state.begin_at(oldest)
        self.reader.positions |= starts
        self._read_statuses(now)
        for place in (LEDGER, POLICIES, *places[1:]):
            self.take(place, now, live=False)
        if oldest > 0 and self.core.state.next_ordinal == 0:
            earlier = self.log.partitions[JOURNAL][: starts[JOURNAL]]
            admissions = [
                (offset, record)
                for offset, record in enumerate(earlier)
                if isinstance(record, Admission) and record.purpose == "train"
            ]
            for offset, record in admissions[-1:]:
                self.core.handle(record, 0, offset, now=now, live=False)
        self.core.commands_read(now)

    def _read_statuses(self, now: float) -> None:
        """All, or what compaction left: the last of each process."""
        self.reader.positions[STATUSES] = 0
        statuses = [s for s in self.reader.read(STATUSES) if isinstance(s[0], Status)]
        last = {status.process: offset for status, offset in statuses if isinstance(status, Status)}
        for status, offset in statuses:
            if not self.compacted or offset in last.values():
                self.core.handle(status, 0, offset, now=now, live=False)

    def _read_trajectories(self, now: float) -> None:
        newest = self.core.state.newest
        every = [(TRAJECTORIES, index) for index in range(self.slots * self.lanes)]
        for place in every:
            self.reader.positions[place] = 0 if newest < 0 else self.log.end(place)
        for version in range(self.rules.window.oldest_live(newest), newest + 1):
            if version in self.policies or version != newest:
                self.reader.positions |= self._starts(TRAJECTORIES, version)
        for place in self.reader.positions:
            self.take(place, now, live=False)
        self.reader.positions[HANDOVERS] = self.log.end(HANDOVERS)
        self.core.rebuilt(now)

    def _starts(self, topic: str, version: int) -> dict[Place, int]:
        slots = self.policies[version].slots
        return {(s.topic, s.partition): s.offset for s in slots if s.topic == topic}

    def take(
        self, place: Place, now: float, count: int | None = None, *, live: bool = True
    ) -> None:
        """Feeds the next records of a partition."""
        for record, offset in self.reader.read(place, count):
            if isinstance(record, Policy):
                self.policies[record.version] = record
            self.core.handle(record, place[1], offset, now=now, live=live)

    def decide(self, now: float) -> None:
        """A tick up to its transaction; nothing of it is in the log yet."""
        rival, self.core.rival = self.core.rival, None
        if rival is not None:
            self.log.check(ID, self.epoch)
        decision = self.core.decide(now)
        self.pending = decision, self.maker.of_decision(decision)
        self._check_none_forgotten(decision)

    def _check_none_forgotten(self, decision: Decision) -> None:
        """Whatever was started and is not finished is in somebody's hands, or about to be."""
        core, oldest = self.core, self.rules.window.oldest_live(self.core.state.newest)
        complete = decision.last_yields or core.state.newest >= self.rules.steps
        for group, missing in core.state.unfinished():
            if group.version < oldest or (complete and group.purpose == "train"):
                continue
            for sample in missing:
                identity = trajectory_id(group.group_id, sample)
                places = (
                    identity in core.pending,
                    identity in core.scans,
                    core.workers.held(identity) is not None,
                )
                assert sum(places) == 1 or identity in core.given_up or identity in self.gave_up, (
                    f"{identity}: unplaced, being read, held: {places}"
                )

    @property
    def gave_up(self) -> set[str]:
        """Trajectories that this coordinator ended; their records may not have come back yet."""
        return {
            record.trajectory_id
            for place, records in self.log.partitions.items()
            if place[0] == TRAJECTORIES
            for record in records
            if record is not None and getattr(record, "worker", "") == "coordinator"
        }

    def commit(self, now: float, crash: Crash | None = None) -> bool:
        """The tick's transaction; False if the coordinator died on the way. If it was aborted, the
        next tick decides anew. Raises Fenced."""
        if self.pending is None:
            return True
        decision, records = self.pending
        self.pending = None
        placed = [(self._place(record), record) for record in records]
        if crash == "before":
            return False
        if crash in ("inside", "aborted"):
            self.log.abort(placed)
            return crash == "aborted"
        if placed:
            self.log.commit(ID, self.epoch, placed)
        if crash == "after":
            return False
        self.core.committed(decision, records, now)
        return True

    def _place(self, record: Record) -> Place:
        if isinstance(record, Command):
            return DISPATCH, ring.worker_partition(record.worker, DISPATCH_PARTITIONS)
        if isinstance(record, Trajectory):
            index = ring.partition(record.policy_version, record.group_id, self.slots, self.lanes)
            return TRAJECTORIES, index
        return JOURNAL

    def done(self, now: float) -> bool:
        """Whether the run is complete and all workers confirmed it, or had their time for it."""
        at, members = self.core.stopped_at, self.core.workers.workers()
        return at is not None and (
            now - at > STOP_SECONDS or all(member.status.state in GONE for member in members)
        )

    def scan(self) -> None:
        """Reads the chunks of lost trajectories as they are now; `take_over` brings them in."""
        for identity, work in self.core.scans.items():
            index = ring.partition(work.version, work.group_id, self.slots, self.lanes)
            place = CHUNKS, index
            start = 0
            if work.version in self.policies:
                start = self._starts(CHUNKS, work.version).get(place, 0)
            collector = PrefixCollector({identity: work.version})
            for record in self.log.partitions.get(place, [])[start:]:
                if isinstance(record, Chunk):
                    collector.add_chunk(record)
            self.scanned.setdefault(identity, collector.best(identity))

    def take_over(self) -> None:
        """What the scan found is taken."""
        for identity, prefix in self.scanned.items():
            self.core.scanned(identity, prefix)
        self.scanned.clear()

    def beat(self) -> None:
        """Tells a rival."""
        status = Status(RUN, "coordinator", "coordinator", self.incarnation, "ready", 0)
        self.log.append(STATUSES, status)
