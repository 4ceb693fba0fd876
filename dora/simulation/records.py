"""What simulated workers write: the records of a real run without tokens.

What the core reads of a record is what it would be in a real run; the payloads are empty.
"""

from dataclasses import dataclass

from dora.schemas.records import (
    Chunk,
    Command,
    Sampling,
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
