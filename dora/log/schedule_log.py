"""What a run's log says about its schedule: when which worker generated which version, and what a
step waited for.

It follows from the records alone, with the time stamps that they hold; no tokens are kept.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dora.bus.settings import ClusterSettings
from dora.log.run_log import RunLog
from dora.schemas.records import Admission, Command, Policy, RunStarted, Status, Step, Trajectory


@dataclass(frozen=True, slots=True)
class Generated:
    """A finished trajectory; `started_ms` is when its last attempt reached its worker."""

    worker: str
    version: int
    attempt: int
    started_ms: int
    generated_ms: int
    created_ms: int
    resumed_tokens: int


@dataclass(frozen=True, slots=True)
class Ordered:
    """A start command."""

    worker: str
    version: int
    created_ms: int


@dataclass(slots=True)
class ScheduleLog:
    """The schedule; `handle` every record of a run, in any interleaving of the topics."""

    steps: list[Step] = field(default_factory=list)
    """Training steps in order, without records that only set groups aside."""
    announced_ms: dict[int, int] = field(default_factory=dict)
    """When each version was announced."""
    admitted_ms: dict[int, int] = field(default_factory=dict)
    """When the first training group of each version was admitted."""
    generated: dict[str, Generated] = field(default_factory=dict)
    """Finished training trajectories by id; the first record of each."""
    orders: dict[str, dict[int, Ordered]] = field(default_factory=dict)
    """Start commands by trajectory and attempt."""
    switched_ms: dict[tuple[str, int], int] = field(default_factory=dict)
    """When workers were first commanded to load versions."""
    moved_ms: list[int] = field(default_factory=list)
    """When trajectories were commanded to move."""
    workers: dict[str, dict[str, float]] = field(default_factory=dict)
    """Last metrics of each rollout worker."""

    def handle(self, record: Any) -> None:
        """Note what one record says about the schedule."""
        match record:
            case Step(kind="step"):
                self.steps.append(record)
            case Policy():
                self.announced_ms.setdefault(record.version, record.created_ms)
            case RunStarted():
                self.announced_ms.setdefault(0, record.created_ms)
            case Admission(purpose="train"):
                self.admitted_ms.setdefault(record.policy_version, record.created_ms)
            case Command(kind="start", purpose="train"):
                attempts = self.orders.setdefault(record.trajectory_id, {})
                attempts.setdefault(
                    record.attempt,
                    Ordered(record.worker, record.policy_version, record.created_ms),
                )
            case Command(kind="switch"):
                place = (record.worker, record.policy_version)
                self.switched_ms.setdefault(place, record.created_ms)
            case Command(kind="move"):
                self.moved_ms.append(record.created_ms)
            case Trajectory(purpose="train"):
                self.generated.setdefault(
                    record.trajectory_id,
                    Generated(
                        worker=record.worker,
                        version=record.policy_version,
                        attempt=record.attempt,
                        started_ms=record.started_ms,
                        generated_ms=record.generated_ms,
                        created_ms=record.created_ms,
                        resumed_tokens=record.resumed_tokens,
                    ),
                )
            case Status(role="rollout"):
                self.workers[record.process] = dict(record.metrics)
            case _:
                pass

    def occupancies(self, end_ms: int) -> Iterator["Occupancy"]:
        """Who generated what when: an attempt lasts from its start until the next attempt at the
        trajectory was ordered, until the trajectory was finished, or until `end_ms`."""
        for identity, attempts in self.orders.items():
            yield from attempt_spans(attempts, self.generated.get(identity), end_ms)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """A worker generates a trajectory of `version` from `start_ms` to `end_ms`."""

    worker: str
    version: int
    start_ms: int
    end_ms: int


def attempt_spans(
    attempts: Mapping[int, Ordered], finished: Generated | Trajectory | None, end_ms: int
) -> Iterator[Occupancy]:
    """The occupancies of one trajectory: its start commands by attempt, and how it ended, if it
    did."""
    numbers = sorted(attempts)
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        order = attempts[number]
        start, end = order.created_ms, end_ms
        if following is not None:
            end = attempts[following].created_ms
        if finished is not None:
            end = min(end, finished.generated_ms)
            if finished.attempt == number:
                start = max(start, finished.started_ms)
        if end > start:
            yield Occupancy(order.worker, order.version, start, min(end, end_ms))


def read_schedule_log(settings: ClusterSettings, run: str, deadline: float) -> ScheduleLog:
    """The log of `run` as of now, without its chunks; raises what `RunLog` raises."""
    source, log = RunLog(settings, run, deadline=deadline), ScheduleLog()
    log.handle(source.started)
    for record in (*source.ledger, *source.policies.values(), *source.admissions.values()):
        log.handle(record)
    for placed in source.trajectories():
        log.handle(placed.record)
    for record in source.control():
        log.handle(record)
    return log
