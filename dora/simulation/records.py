"""Records of a simulated run: those of a real one, without tokens.

Invariant: whatever the core reads of a record is what it would be in a real run; only payloads that
it does not look into are empty.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dora.core.ring import trajectory_id
from dora.core.scheduling.pending import PendingAttempt
from dora.core.scheduling.scheduler import Decision
from dora.schemas.records import (
    Admission,
    Chunk,
    Command,
    Purpose,
    Record,
    Sampling,
    Status,
    Trajectory,
    VersionRun,
)

RUN = "simulation"
SAMPLING = Sampling(1.0, 1.0, 0, 1, ())


@dataclass(frozen=True, slots=True)
class TokenlessTrajectory(Trajectory):
    """A trajectory of `length` generated tokens that are not there."""

    length: int = 0

    def __post_init__(self) -> None:
        """Nothing to check."""

    @property
    def generated_tokens(self) -> int:
        """Number of tokens that the policy generated."""
        return self.length


@dataclass(frozen=True, slots=True)
class TokenlessCommand(Command):
    """A command without a prefix."""

    def __post_init__(self) -> None:
        """Nothing to check."""


def trajectory(
    command: Command, worker: str, runs: tuple[VersionRun, ...], started: float, now: float
) -> TokenlessTrajectory:
    """The record of the finished attempt that `command` started; times in seconds."""
    ended = int(now * 1000)
    return TokenlessTrajectory(
        RUN, command.trajectory_id, command.group_id, command.sample, command.attempt, 0,
        command.policy_version, command.ordinal, command.purpose, b"", b"", b"", runs, "stop",
        1.0, {}, None, None, worker, "simulated", SAMPLING, int(started * 1000), ended, ended, 0,
        sum(run.tokens for run in runs),
    )  # fmt: skip


def handover(command: Command, worker: str, now: float) -> Chunk:
    """What a worker that was told to move an attempt hands over."""
    return Chunk(
        RUN, command.trajectory_id, command.group_id, command.sample, command.attempt, 0,
        command.policy_version, command.ordinal, command.purpose, 0, b"", b"", True, worker,
        SAMPLING, int(now * 1000),
    )  # fmt: skip


def records_of(decision: Decision, group_size: int, now: float) -> list[Record]:
    """A decision's records in the order in which they hold: those of `producers.record_maker`."""
    return list(_records(decision, group_size, int(now * 1000)))


def _records(decision: Decision, group_size: int, now_ms: int) -> Iterator[Record]:
    for zombie in decision.zombies:
        yield _command(zombie, "stop", now_ms)
    for admit in decision.evaluations:
        yield _admission(admit.group_id, admit.ordinal, admit.version, 1, "eval", now_ms)
    for each in decision.yields:
        yield _command(each.worker, "yield", now_ms, each.trajectory_id, each.attempt)
    for each in decision.moves:
        yield _command(each.worker, "move", now_ms, each.trajectory_id, each.attempt)
    for worker in decision.pauses:
        yield _command(worker, "pause", now_ms)
    for worker in decision.stops:
        yield _command(worker, "stop", now_ms)
    plan, workers = decision.plan, decision.addressees
    for admit in plan.admissions:
        yield _admission(admit.group_id, admit.ordinal, admit.version, group_size, "train", now_ms)
    for switch in plan.switches:
        yield _command(workers[switch.worker], "switch", now_ms, version=switch.version)
    for start in plan.starts:
        yield _start(workers[start.worker], start.work, now_ms)
    for work in decision.given_up:
        yield _given_up(work, now_ms)


def _admission(
    group_id: str, ordinal: int, version: int, size: int, purpose: Purpose, now_ms: int
) -> Admission:
    return Admission(RUN, group_id, ordinal, version, size, purpose, now_ms)


def _command(
    addressee: Status,
    kind: Literal["yield", "move", "switch", "pause", "stop"],
    now_ms: int,
    identity: str = "",
    attempt: int = 0,
    version: int = -1,
) -> Command:
    return TokenlessCommand(
        RUN,
        addressee.process,
        addressee.incarnation,
        kind,
        now_ms,
        trajectory_id=identity,
        attempt=attempt,
        policy_version=version,
    )


def _start(addressee: Status, work: PendingAttempt, now_ms: int) -> Command:
    return TokenlessCommand(
        RUN, addressee.process, addressee.incarnation, "start", now_ms,
        trajectory_id(work.group_id, work.sample), work.group_id, work.sample, work.attempt,
        work.version, work.ordinal, work.purpose,
    )  # fmt: skip


def _given_up(work: PendingAttempt, now_ms: int) -> Trajectory:
    return TokenlessTrajectory(
        RUN, trajectory_id(work.group_id, work.sample), work.group_id, work.sample, work.attempt,
        0, work.version, work.ordinal, work.purpose, b"", b"", b"", (), "error", None, {},
        "gave up", None, "coordinator", "none", SAMPLING, now_ms, now_ms, now_ms,
    )  # fmt: skip
