"""A small run, record by record, whose log can be damaged at will: for tests of the audit."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from dora.core import ring
from dora.core.audit.audit import Audit
from dora.core.audit.report import AuditReport, Place
from dora.schemas.records import (
    Admission,
    Chunk,
    GroupRef,
    Policy,
    Record,
    RunStarted,
    SampleRef,
    Step,
    Trajectory,
)
from tests import factories
from tests.factories import RING, G, policy

LANES = 2


def admission(ordinal: int, version: int, size: int = G) -> Admission:
    return factories.admission(ordinal, version, group_size=size, created_ms=0)


def trajectory(group: Admission, sample: int, attempt: int = 0) -> Trajectory:
    """One prompt token and three generated ones, of two chunks."""
    return factories.trajectory(group, sample, prompt=(7,), attempt=attempt, chunks=2)


def chunk(of: Trajectory, sequence: int, position: int, tokens: int, *, resumed: int = 0) -> Chunk:
    """The trajectory's generated tokens `position .. position + tokens - 1`."""
    return factories.chunk(of, sequence, position, position + tokens, resumed_tokens=resumed)


@dataclass
class Log:
    """A run with K=1, B=2, G=2: g0..g3 of version 0, g4 and g5 of version 1.

    Offsets are those that Kafka gives when each step is a transaction with its policy, whose marker
    takes an offset, and everything else is written as it comes.
    """

    ledger: list[RunStarted | Step] = field(default_factory=list)
    policies: list[Policy] = field(default_factory=list)
    journal: list[Admission] = field(default_factory=list)
    trajectories: dict[int, dict[int, Trajectory]] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)

    def finish(self, finished: Trajectory, partition: int | None = None) -> SampleRef:
        """Append to the trajectory's partition."""
        if partition is None:
            partition = ring.partition(finished.policy_version, finished.group_id, RING, LANES)
        records = self.trajectories.setdefault(partition, {})
        offset = max(records, default=-1) + 1
        records[offset] = finished
        return SampleRef(finished.sample, finished.attempt, partition, offset)

    def group(self, group: Admission) -> GroupRef:
        """Start a group, generate and finish it."""
        self.journal.append(group)
        refs = []
        for sample in range(group.group_size):
            finished = trajectory(group, sample)
            self.chunks += [chunk(finished, 0, 0, 2), chunk(finished, 1, 2, 1)]
            refs.append(self.finish(finished))
        return GroupRef(group.group_id, group.ordinal, group.policy_version, tuple(refs))

    def train(self, *refs: GroupRef) -> None:
        """Append a step and its policy."""
        version = self.newest
        self.ledger.append(step(version, *refs))
        self.policies.append(policy(version + 1))

    def change(self, position: int, **values: object) -> None:
        """Replace fields of the ledger's entry at `position` (0 is the start of the run)."""
        self.ledger[position] = replace(self.ledger[position], **values)  # type: ignore[arg-type]

    def rewrite(self, trajectory_id: str, /, **values: object) -> None:
        """Replace fields of a finished trajectory, where it lies."""
        for records in self.trajectories.values():
            for offset, finished in records.items():
                if finished.trajectory_id == trajectory_id:
                    records[offset] = replace(finished, **values)  # type: ignore[arg-type]

    def record(self, trajectory_id: str) -> Trajectory:
        """The counted record of a trajectory."""
        at = self.place(trajectory_id)
        return self.trajectories[at.partition][at.offset]

    def step(self, position: int) -> Step:
        entry = self.ledger[position]
        assert isinstance(entry, Step)
        return entry

    def ref(self, group_id: str) -> GroupRef:
        """The finished group as a ledger entry would name it."""
        group = next(each for each in self.journal if each.group_id == group_id)
        samples = {
            finished.sample: SampleRef(finished.sample, finished.attempt, partition, offset)
            for partition, records in self.trajectories.items()
            for offset, finished in sorted(records.items(), reverse=True)
            if finished.group_id == group_id
        }
        refs = tuple(samples[sample] for sample in sorted(samples))
        return GroupRef(group_id, group.ordinal, group.policy_version, refs)

    def chunk_index(self, trajectory_id: str, sequence: int) -> int:
        """Position in `chunks` of the first record of a chunk."""
        return next(
            index
            for index, each in enumerate(self.chunks)
            if (each.trajectory_id, each.sequence) == (trajectory_id, sequence)
        )

    @property
    def newest(self) -> int:
        """The newest version published."""
        return max(each.version for each in self.policies)

    def entry_place(self, position: int) -> Place:
        return Place("r.steps", 0, 2 * (position % len(self.ledger)))

    def policy_place(self, position: int) -> Place:
        return Place("r.policies", 0, 2 * (position % len(self.policies)))

    def journal_place(self, position: int) -> Place:
        return Place("r.dispatch", 0, position % len(self.journal))

    def place(self, trajectory_id: str) -> Place:
        """Where the first record of a trajectory lies."""
        return next(
            Place("r.trajectories", partition, offset)
            for partition, records in self.trajectories.items()
            for offset, finished in records.items()
            if finished.trajectory_id == trajectory_id
        )

    def chunk_place(self, position: int) -> Place:
        """Where `chunks[position]` lies."""
        return self.chunk_places()[position]

    def chunk_places(self) -> list[Place]:
        ends: dict[int, int] = {}
        places = []
        for each in self.chunks:
            index = ring.partition(each.policy_version, each.group_id, RING, LANES)
            places.append(Place("r.chunks", index, ends.get(index, 0)))
            ends[index] = ends.get(index, 0) + 1
        return places

    def records(self, *, chunks: bool = True) -> Iterator[tuple[Record, Place]]:
        """The log in the order in which an audit reads it."""
        for position, published in enumerate(self.policies):
            yield published, self.policy_place(position)
        for position, entry in enumerate(self.ledger):
            yield entry, self.entry_place(position)
        for position, started in enumerate(self.journal):
            yield started, self.journal_place(position)
        for partition, records in self.trajectories.items():
            for offset, finished in sorted(records.items()):
                yield finished, Place("r.trajectories", partition, offset)
        if chunks:
            yield from zip(self.chunks, self.chunk_places(), strict=True)

    def audit(self, *, chunks: bool = True) -> AuditReport:
        audit = Audit(chunks=chunks)
        for record, place in self.records():
            audit.feed(record, place.topic, place.partition, place.offset)
        first = audit.report()
        assert audit.report() == first
        return first


def step(sequence: int, *trained: GroupRef, aside: tuple[GroupRef, ...] = ()) -> Step:
    return factories.step(sequence, sequence, trained, aside=aside)


def live_log() -> Log:
    """A run after two steps, of which the audit finds nothing: g4 and g5 are outstanding."""
    log = Log(policies=[policy(0)])
    log.ledger = [factories.run_started(identity="{}", lanes=LANES)]
    refs = [log.group(admission(ordinal, 0)) for ordinal in range(4)]
    log.group(admission(4, 1))
    log.group(admission(5, 1))
    log.train(*refs[:2])
    log.train(*refs[2:])
    return log


def finished_log() -> Log:
    """The same run at its end: every group is trained."""
    log = live_log()
    log.train(log.ref("g4"), log.ref("g5"))
    return log
