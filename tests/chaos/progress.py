"""What a chaos run's log shows: how far the run is, and when it has recovered from a fault.

A fault counts as recovered when a record is seen in the log that was made after it and that shows
that what the victim does is being done again:

- trainer: a committed training step;
- coordinator: an admission or a command;
- worker: a finished trajectory that the victim held when it was struck (finished by whoever took it
  over), or one by the worker itself or by its successor; where it held none, its next word;
- broker: any of these.

Seconds are counted from the fault (from the start of a freeze) until the record is seen, so that
they hold the detection, the restart, and the time that reading takes.

Invariant: nothing that was written before a fault ever ends it.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from dora.bus import Message
from dora.schemas.records import Admission, Command, Record, Status, Step, Trajectory
from tests.chaos.plan import Victim


@dataclass(frozen=True, slots=True)
class Awaited:
    """A fault that the run has not recovered from. Times: `at` in seconds of the harness's
    monotonic clock, `at_ms` in Unix milliseconds."""

    number: int
    victim: Victim
    names: Set[str]
    """A worker's id, and that of its successor."""
    at: float
    at_ms: int
    lost: Set[str]
    """Trajectories that a worker held when it was struck."""

    def ended_by(self, record: Record) -> bool:
        """Whether the record shows that the run has recovered."""
        if isinstance(record, Status):
            silent = self.victim == "worker" and not self.lost
            return silent and record.process in self.names and record.created_ms > self.at_ms
        if not isinstance(record, Step | Admission | Command | Trajectory):
            return False
        if record.created_ms <= self.at_ms:
            return False
        match self.victim:
            case "trainer":
                return isinstance(record, Step) and record.kind == "step"
            case "coordinator":
                return isinstance(record, Admission | Command)
            case "worker":
                return isinstance(record, Trajectory) and (
                    record.trajectory_id in self.lost or record.worker in self.names
                )
            case "broker":
                return True


@dataclass(slots=True)
class Progress:
    """Folds the messages of dispatch, trajectories, steps and workers."""

    newest: int = -1
    """Newest committed version, -1 before the first."""
    ordinals: list[int] = field(default_factory=list)
    """Prompt ordinals of the training groups in the journal, in its order."""
    outstanding: set[str] = field(default_factory=set)
    """Training groups that were admitted and are in no ledger entry."""
    trajectories: int = 0
    """Trajectories that finished, each counted once."""
    resumed_tokens: int = 0
    """Tokens that finished trajectories took over from former attempts."""
    takeovers: int = 0
    """Start commands for a trajectory that was started before."""
    surplus: int = 0
    """Finished records that came after the one that counts."""
    last_at: float = 0.0
    """When something else than a heartbeat was last seen."""
    awaited: list[Awaited] = field(default_factory=list)
    recovered: dict[int, float] = field(default_factory=dict)
    """Seconds to recover, by number of the fault."""
    holders: dict[str, str] = field(default_factory=dict)
    """Worker that each unfinished trajectory was last sent to."""
    heard: set[int] = field(default_factory=set)
    """Process ids that have spoken."""
    _started: set[str] = field(default_factory=set)
    _finished: set[str] = field(default_factory=set)
    _settled: set[str] = field(default_factory=set)

    def lost_by(self, worker: str) -> frozenset[str]:
        """Trajectories that are lost if the worker is struck now."""
        return frozenset(name for name, holder in self.holders.items() if holder == worker)

    def struck(
        self, number: int, victim: Victim, names: Sequence[str], now: float, now_ms: int
    ) -> None:
        """A fault was made; `names` are the victim's and its successor's."""
        lost = self.lost_by(names[0]) if victim == "worker" else frozenset()
        self.awaited.append(Awaited(number, victim, frozenset(names), now, now_ms, lost))

    def take(self, message: Message, now: float) -> list[int]:
        """Fold one message; returns the numbers of the faults that it ends."""
        record = message.value
        if not isinstance(record, Status):
            self.last_at = now
        match record:
            case Admission() if record.purpose == "train":
                self.ordinals.append(record.ordinal)
                if record.group_id not in self._settled:
                    self.outstanding.add(record.group_id)
            case Command() if record.kind == "start":
                self._start(record)
            case Command() if record.kind == "yield":
                self.holders.pop(record.trajectory_id, None)
            case Trajectory():
                self._finish(record)
            case Step():
                self.newest = max(self.newest, record.version_out)
                for ref in (*record.trained, *record.set_aside):
                    self._settled.add(ref.group_id)
                    self.outstanding.discard(ref.group_id)
            case Status():
                self.heard.add(record.pid)
            case _:
                return []
        ended = [each for each in self.awaited if each.ended_by(record)]
        for each in ended:
            self.awaited.remove(each)
            self.recovered[each.number] = now - each.at
        return [each.number for each in ended]

    def _start(self, command: Command) -> None:
        name = command.trajectory_id
        if name in self._started:
            self.takeovers += 1
        self._started.add(name)
        if name not in self._finished:
            self.holders[name] = command.worker

    def _finish(self, record: Trajectory) -> None:
        name = record.trajectory_id
        self.holders.pop(name, None)
        if name in self._finished:
            self.surplus += 1
            return
        self._finished.add(name)
        self.trajectories += 1
        self.resumed_tokens += record.resumed_tokens
