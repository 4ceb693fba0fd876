"""What a simulation yields: measures of the schedule, a timeline, and the three rules checked."""

import json
from dataclasses import dataclass, field

from dora.core.audit.audit import Audit
from dora.core.audit.starts import StartCheck
from dora.core.scheduling.scheduler import Rules
from dora.schemas.records import Admission, Policy, Record, RunStarted, Step, Trajectory
from dora.simulation.records import RUN

_RING = _LANES = 1  # a simulated log has one partition


class RunCheck:
    """Checks a simulated run by its records alone, in the order of their writing, with the audit.

    The audit wants to know which trajectories the ledger names before it sees them, so those of a
    group wait for its step.
    """

    def __init__(self, rules: Rules) -> None:
        window = rules.window
        identity = {"window": {"tokens_per_step": window.tokens_per_step}}
        behind = window.max_staleness if rules.schedule.fills else 0
        self._starts = StartCheck(window.capacity, behind)
        self._faults = 0
        self._audit = Audit(chunks=False)
        self._waiting: dict[str, list[tuple[Trajectory, int]]] = {}
        started = RunStarted(
            RUN, "", "", json.dumps(identity), window.max_staleness, window.groups_per_step,
            rules.group_size, _RING, _LANES, "", {}, 0,
        )  # fmt: skip
        self._audit.feed(started, "steps", 0, 0)
        self._announce(0)

    def handle(self, record: Record, offset: int) -> None:
        """Check the next record of the log; trajectories are at `offset`."""
        self._faults += self._starts.fault(record) is not None
        match record:
            case Trajectory():
                waiting = self._waiting.get(record.group_id)
                if waiting is None:  # an evaluation, or too late to count
                    self._audit.feed(record, "trajectories", 0, offset)
                else:
                    waiting.append((record, offset))
            case Admission():
                self._audit.feed(record, "dispatch", 0, offset)
                if record.purpose == "train":
                    self._waiting.setdefault(record.group_id, [])
            case Step():
                self._announce(record.version_out)
                self._audit.feed(record, "steps", 0, offset)
                for group in record.trained:
                    self._feed(self._waiting.pop(group.group_id, []))
            case _:
                pass

    def end(self, outstanding: int) -> tuple[int, int]:
        """All records were seen, and the coordinator knows of `outstanding` groups: how often a
        rule was broken, and how many trajectories hold tokens of several versions."""
        for trajectories in self._waiting.values():
            self._feed(trajectories)
        report = self._audit.report()
        mixed = report.violations["mixed_version"]
        forgotten = max(0, report.groups_outstanding - outstanding)
        return sum(report.violations.values()) - mixed + forgotten + self._faults, mixed

    def _feed(self, trajectories: list[tuple[Trajectory, int]]) -> None:
        for record, offset in trajectories:
            self._audit.feed(record, "trajectories", 0, offset)

    def _announce(self, version: int) -> None:
        policy = Policy(RUN, version, "full", "", (), "", b"", b"", (), 0)
        self._audit.feed(policy, "policies", 0, version)


@dataclass(slots=True)
class Level:
    """A number over time, and its integral since the last `restart`."""

    value: float = 0.0
    integral: float = 0.0
    since: float = 0.0

    def change(self, by: float, now: float) -> None:
        """Add `by` at `now`."""
        self.integral += self.value * (now - self.since)
        self.value += by
        self.since = now

    def restart(self, now: float) -> None:
        """Integrate from now on."""
        self.integral = 0.0
        self.since = now


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A committed step: when the trainer began to wait, to train, and had committed (seconds);
    generated tokens, and the staleness of each of its groups. In a streamed step waiting and
    training alternate: only the time between the first two, all that was waited, is meant."""

    waited_at: float
    began_at: float
    committed_at: float
    tokens: int
    staleness: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Interval:
    """A worker hosts `version` (-1: loads) from `begin` to `end`, in seconds."""

    worker: int
    begin: float
    end: float
    version: int


@dataclass(slots=True)
class Tally:
    """What is counted while a simulation runs; measures start anew after the warm-up."""

    timelined: bool
    generating: Level = field(default_factory=Level)
    """Workers that generate."""
    running: Level = field(default_factory=Level)
    """Sequences in the hands of workers."""
    alone: Level = field(default_factory=Level)
    """1 while a worker generates and nothing is trained."""
    training: bool = False
    moves: int = 0
    switches: int = 0
    refused: int = 0
    starts: int = 0
    timeline: list[Interval] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    """Sequences in hand, by worker."""
    _hosted: dict[int, tuple[float, int]] = field(default_factory=dict)

    def restart(self, now: float) -> None:
        """The measured steps begin."""
        for level in (self.generating, self.running, self.alone):
            level.restart(now)
        self.moves = self.switches = self.refused = self.starts = 0

    def generates(self, worker: int, workers: int, sequences: int, now: float) -> None:
        """A worker has so many sequences in hand now, and so many more workers generate."""
        self.running.change(sequences - self.held.get(worker, 0), now)
        self.held[worker] = sequences
        if workers:
            self.generating.change(workers, now)
            self._settle(now)

    def trains(self, training: bool, now: float) -> None:
        """The trainer begins or ends a step."""
        self.training = training
        self._settle(now)

    def _settle(self, now: float) -> None:
        alone = float(self.generating.value > 0 and not self.training)
        self.alone.change(alone - self.alone.value, now)

    def hosts(self, worker: int, version: int, now: float) -> None:
        """From now on a worker hosts `version`; -1 while it loads, -2 when it is gone."""
        if not self.timelined:
            return
        before = self._hosted.get(worker)
        if before is not None and now > before[0] and before[1] != -2:
            self.timeline.append(Interval(worker, before[0], now, before[1]))
        self._hosted[worker] = (now, version)

    def end(self, now: float) -> None:
        """The simulation is over."""
        for worker in list(self._hosted):
            self.hosts(worker, -2, now)
        for level in (self.generating, self.running, self.alone):
            level.change(0, now)
