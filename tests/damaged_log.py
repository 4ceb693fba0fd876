"""A small run, record by record, whose log can be damaged at will: for tests of the audit."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from dora.core import ring
from dora.core.audit import Audit
from dora.core.audit_report import AuditReport
from dora.schemas.records import (
    Admission,
    Chunk,
    GroupRef,
    Policy,
    Record,
    RunStarted,
    SampleRef,
    Sampling,
    Step,
    Trajectory,
    VersionRun,
    pack_logprobs,
    pack_tokens,
)

K, B, G, RING, LANES = 1, 2, 2, 3, 2
SAMPLING = Sampling(1.0, 1.0, 0, 16, (2,))


def policy(version: int) -> Policy:
    return Policy("r", version, "full", "w", (), f"sum{version}", b"", b"", (), 0)


def admission(ordinal: int, version: int, size: int = G) -> Admission:
    return Admission("r", ring.train_group_id(ordinal), ordinal, version, size, "train", 0)


def trajectory(group: Admission, sample: int, attempt: int = 0) -> Trajectory:
    version = group.policy_version
    return Trajectory(
        run="r",
        trajectory_id=ring.trajectory_id(group.group_id, sample),
        group_id=group.group_id,
        sample=sample,
        attempt=attempt,
        chunks=2,
        policy_version=version,
        ordinal=group.ordinal,
        purpose=group.purpose,
        token_ids=pack_tokens([7, 1, 2, 3]),
        mask=b"\0\1\1\1",
        logprobs=pack_logprobs([0, -1, -1, -1]),
        version_runs=(VersionRun(version, 3),),
        finish_reason="stop",
        reward=1.0,
        reward_parts={},
        error=None,
        text=None,
        worker="w",
        engine="emulated",
        sampling=SAMPLING,
        started_ms=0,
        generated_ms=0,
        created_ms=0,
    )


def chunk(of: Trajectory, sequence: int, position: int, tokens: int) -> Chunk:
    return Chunk(
        run="r",
        trajectory_id=of.trajectory_id,
        group_id=of.group_id,
        sample=of.sample,
        attempt=of.attempt,
        sequence=sequence,
        policy_version=of.policy_version,
        ordinal=of.ordinal,
        purpose=of.purpose,
        position=position,
        token_ids=pack_tokens([1] * tokens),
        logprobs=pack_logprobs([-1] * tokens),
        last=False,
        worker="w",
        sampling=SAMPLING,
        created_ms=0,
    )


@dataclass
class Log:
    """A run of two steps with K=1, B=2, G=2: g0..g3 of version 0, g4 and g5 of version 1."""

    ledger: list[RunStarted | Step] = field(default_factory=list)
    policies: list[Policy] = field(default_factory=list)
    journal: list[Admission] = field(default_factory=list)
    trajectories: dict[int, list[tuple[int, Trajectory]]] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    stride: int = 3  # distance between offsets: transaction markers leave gaps

    def finish(self, finished: Trajectory) -> SampleRef:
        """Append to the trajectory's partition."""
        partition = ring.partition(finished.policy_version, finished.group_id, RING, LANES)
        records = self.trajectories.setdefault(partition, [])
        offset = records[-1][0] + self.stride if records else 0
        records.append((offset, finished))
        return SampleRef(finished.sample, finished.attempt, partition, offset)

    def group(self, group: Admission) -> GroupRef:
        self.journal.append(group)
        refs = []
        for sample in range(group.group_size):
            finished = trajectory(group, sample)
            self.chunks += [chunk(finished, 0, 0, 2), chunk(finished, 1, 2, 1)]
            refs.append(self.finish(finished))
        return GroupRef(group.group_id, group.ordinal, group.policy_version, tuple(refs))

    def change(self, position: int, **values: object) -> None:
        """Replace fields of the ledger's entry at `position` (0 is the start of the run)."""
        self.ledger[position] = replace(self.ledger[position], **values)  # type: ignore[arg-type]

    def rewrite(self, trajectory_id: str, **values: object) -> None:
        """Replace fields of a finished trajectory, where it lies."""
        for records in self.trajectories.values():
            for index, (offset, finished) in enumerate(records):
                if finished.trajectory_id == trajectory_id:
                    records[index] = offset, replace(finished, **values)  # type: ignore[arg-type]

    def step(self, position: int) -> Step:
        entry = self.ledger[position]
        assert isinstance(entry, Step)
        return entry

    def audit(self, *, chunks: bool = True) -> AuditReport:
        audit = Audit(chunks=chunks)
        topics: list[tuple[str, Iterable[Record]]] = [
            ("r.policies", self.policies),
            ("r.steps", self.ledger),
            ("r.dispatch", self.journal),
        ]
        for topic, records in topics:
            for offset, record in enumerate(records):
                audit.feed(record, topic, 0, 2 * offset)
        for partition, finished in self.trajectories.items():
            for offset, record in finished:
                audit.feed(record, "r.trajectories", partition, offset)
        for offset, record in enumerate(self.chunks):
            audit.feed(record, "r.chunks", 0, offset)
        first = audit.report()
        assert audit.report() == first
        return first


def step(sequence: int, *trained: GroupRef, aside: tuple[GroupRef, ...] = ()) -> Step:
    return Step(
        "r", "step", sequence, sequence, sequence + 1, trained, aside, {}, f"sum{sequence + 1}",
        None, "t", 0,
    )  # fmt: skip


def clean_log(stride: int = 3) -> Log:
    """A run of which the audit finds nothing."""
    log = Log(policies=[policy(version) for version in range(3)], stride=stride)
    started = RunStarted("r", "id", "0", "{}", K, B, G, RING, LANES, "c", {}, 0)
    refs = [log.group(admission(ordinal, 0)) for ordinal in range(4)]
    log.group(admission(4, 1))
    log.group(admission(5, 1))
    log.ledger = [started, step(0, *refs[:2]), step(1, *refs[2:])]
    return log
