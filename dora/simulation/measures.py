"""What a simulation yields: measures of the schedule, a timeline, and the three rules checked.

Invariant: the check sees the records alone, as the audit does: who decided wrongly does not judge
himself.
"""

from dataclasses import dataclass, field

from dora.core.window import Window
from dora.schemas.records import Admission, Command, Record, Step, Trajectory

# How many versions had unfinished work at the same time.
#
# Invariant: a version counts from the moment its first group starts until its last trajectory is
# finished. Times are those in the records (Unix milliseconds), so clocks of different machines
# that disagree blur the result by as much.


@dataclass(slots=True)
class Violations:
    """Counts of what must not be; `mixed_version` counts under `partial`, too, where it is meant
    to be."""

    lost: int = 0
    duplicated: int = 0
    mixed_version: int = 0
    stale: int = 0
    incomplete_group: int = 0
    beyond_window: int = 0
    started_twice: int = 0

    @property
    def total(self) -> int:
        """All but mixed versions."""
        return (
            self.lost
            + self.duplicated
            + self.stale
            + self.incomplete_group
            + self.beyond_window
            + self.started_twice
        )


class LogCheck:
    """Checks C1, C2 and C3 over the records of a simulated run, in the order of their writing."""

    def __init__(self, window: Window) -> None:
        self.violations = Violations()
        self._window = window
        self._sizes: dict[str, int] = {}  # of outstanding groups
        self._finished: dict[str, set[int]] = {}
        self._attempts: dict[str, int] = {}

    def take(self, record: Record) -> None:
        """Look at a record of the log."""
        violations = self.violations
        match record:
            case Trajectory():
                if any(run.version != record.policy_version for run in record.version_runs):
                    violations.mixed_version += 1
                self._finished.setdefault(record.group_id, set()).add(record.sample)
                self._attempts.pop(record.trajectory_id, None)
            case Command(kind="start"):
                if self._attempts.get(record.trajectory_id, -1) >= record.attempt:
                    violations.started_twice += 1
                self._attempts[record.trajectory_id] = record.attempt
            case Admission(purpose="train"):
                if record.group_id in self._sizes:
                    violations.duplicated += 1
                self._sizes[record.group_id] = record.group_size
                if len(self._sizes) > self._window.capacity:
                    violations.beyond_window += 1
            case Step():
                for group in record.trained:
                    size = self._sizes.pop(group.group_id, None)
                    if size is None:
                        violations.duplicated += 1
                    elif len(self._finished.pop(group.group_id, ())) != size:
                        violations.incomplete_group += 1
                    if record.version_in - group.version > self._window.max_staleness:
                        violations.stale += 1
            case _:
                pass

    def end(self, outstanding: int) -> Violations:
        """All records were seen; `outstanding` groups are known to whoever decides."""
        self.violations.lost += max(0, len(self._sizes) - outstanding)
        return self.violations


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
    """1 while somebody generates and nothing is trained."""
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
