"""A rollout worker of a simulated run: a device, the commands it carries out, and what it says.

It does what `producers.worker` does. An attempt is started only under a version that is
hosted, and a worker that hosts one version at a time changes it only after everything was handed
back; only with `interrupts` attempts go on with the next version.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dora.core.scheduling.workers import lease_name
from dora.schemas.records import Command, ProcessState, Record, Status, VersionRun
from dora.simulation.bus import Events
from dora.simulation.device import Device
from dora.simulation.measures import Tally
from dora.simulation.records import RUN, handover, trajectory
from dora.simulation.scenario import Scenario

CHUNK_TOKENS = 32


@dataclass(slots=True)
class _Attempt:
    command: Command
    version: int
    started: float
    runs: tuple[tuple[int, int], ...] = ()
    """Finished runs of tokens: version, and the position at which it ended."""

    def version_runs(self, total: int) -> tuple[VersionRun, ...]:
        if not self.runs:
            return (VersionRun(self.version, total),)
        parts, before = [], 0
        for version, end in (*self.runs, (self.version, total)):
            if end > before:
                parts.append(VersionRun(version, end - before))
            before = end
        return tuple(parts)


@dataclass(slots=True)
class ChunkLog:
    """How far trajectories have got, by the chunks written, and the last attempt that generated
    anything; of unfinished ones that a worker handed back or lost."""

    positions: dict[str, int]
    fruitful: dict[str, int]


class SimulatedWorker:
    """One worker; `write` puts its records into the log."""

    def __init__(
        self,
        number: int,
        scenario: Scenario,
        events: Events,
        tally: Tally,
        chunks: ChunkLog,
        write: Callable[[Record], None],
    ) -> None:
        self.name = f"worker-{number}"
        self.alive = False
        self._number = number
        self._scenario = scenario
        self._events = events
        self._tally = tally
        self._chunks = chunks
        self._write = write
        self._lives = 0
        self._spec = replace(scenario.device, speed=scenario.speed(number))
        self._device = Device(self._spec, scenario.slots)
        self._attempts: dict[str, _Attempt] = {}
        self._versions: list[int] = []  # hosted, in order of loading
        self._orders: list[int] = []
        self._newest = 0  # version announced
        self._state: ProcessState = "ready"
        self._due = math.inf
        self._wanted: tuple[int, ...] = ()
        self._tokens = 0  # of attempts that have left
        self._base = 0  # tokens that attempts in hand began with
        self._said = (0.0, 0)
        self._generating = False

    @property
    def version(self) -> int:
        """The version hosted, or the one loaded last; -1 is none."""
        return self._versions[-1] if self._versions else -1

    def join(self) -> None:
        """The worker comes, empty."""
        self.alive = True
        self._lives += 1
        self._device = Device(self._spec, self._scenario.slots)
        self._versions.clear()
        self._orders.clear()
        self._attempts.clear()
        self._tokens = self._base = 0
        self._said = (self._events.now, 0)
        self._say("ready")
        gap = self._scenario.heartbeat_seconds
        # spread, so that not all of a large cluster speak at once
        self._events.at(
            self._events.now + gap * (1 + self._number * 0.618 % 1) / 2, self._beat, self._lives
        )

    def leave(self, *, orderly: bool) -> None:
        """The worker goes: it hands back what it has and says goodbye, or crashes."""
        if not self.alive:
            return
        self._progress(self._events.now)
        for identity in list(self._attempts):
            self._hand_back(identity, lost=0 if orderly else CHUNK_TOKENS)
        self.alive = False
        if orderly:
            self._say("stopped")
        self._changed()
        self._due = math.inf
        self._tally.hosts(self._number, -2, self._events.now)

    def announced(self, version: int) -> None:
        """A version can be loaded."""
        self._newest = version

    def receive(self, commands: Sequence[Command]) -> None:
        """Carry out commands of one transaction."""
        if not self.alive:
            return
        now = self._events.now
        self._progress(now)
        for command in commands:
            if command.incarnation != self._incarnation:
                continue
            match command.kind:
                case "start":
                    self._start(command, now)
                case "yield" | "move":
                    attempt = self._attempts.get(command.trajectory_id)
                    if attempt is not None and attempt.command.attempt == command.attempt:
                        self._hand_back(command.trajectory_id)
                        if command.kind == "move" and not attempt.runs:
                            self._tally.moves += 1
                            self._write(handover(attempt.command, self.name, now))
                case "switch":
                    if not self._scenario.adapters:
                        self._orders.clear()
                    self._orders.append(command.policy_version)
                case "pause":
                    self._device.pause(now)
                case "stop":
                    self.leave(orderly=True)
                    return
        if self._orders and self._state != "loading":
            self._load()
        self._changed()

    @property
    def _incarnation(self) -> str:
        return f"{self.name}.{self._lives}"

    def _start(self, command: Command, now: float) -> None:
        identity = command.trajectory_id
        if identity in self._attempts:
            self._hand_back(identity)
        scenario = self._scenario
        hosted = command.policy_version in self._versions
        if scenario.interrupts:
            hosted = 0 <= command.policy_version <= self.version
        if self._state == "loading" and not scenario.adapters:
            hosted = False
        if not hosted:
            self._tally.refused += 1
            return
        self._tally.starts += 1
        version = self.version if scenario.interrupts else command.policy_version
        self._attempts[identity] = _Attempt(command, version, now)
        self._add(identity, command, now)

    def _add(self, identity: str, command: Command, now: float) -> None:
        total = max(1, self._scenario.lengths(identity, command.ordinal))
        position = min(self._chunks.positions.pop(identity, 0), total - 1)
        self._base += position
        self._device.add(identity, self._scenario.prompt_tokens, position, total, now)

    def _hand_back(self, identity: str, *, lost: int = 0) -> None:
        attempt = self._attempts.pop(identity)
        if not self._device.holds(identity):
            return  # interrupted by a load: what it has is kept already
        position = self._device.abort(identity, self._events.now)
        self._keep(identity, attempt.command.attempt, position // lost * lost if lost else position)
        self._tokens += position

    def _keep(self, identity: str, attempt: int, position: int) -> None:
        self._chunks.positions[identity] = position
        if position:
            self._chunks.fruitful[identity] = attempt

    def _load(self) -> None:
        """Begin to load the version ordered first."""
        now, scenario = self._events.now, self._scenario
        if not scenario.adapters and not scenario.interrupts:
            for identity in list(self._attempts):
                self._hand_back(identity)
        self._say("loading")
        if scenario.interrupts:
            for identity, attempt in self._attempts.items():
                position = self._device.abort(identity, now)
                self._keep(identity, attempt.command.attempt, position)
                self._tokens += position
                attempt.runs = (*attempt.runs, (attempt.version, position))
        self._device.resume(now)
        self._device.load(now)
        self._tally.hosts(self._number, -1, now)
        until = max(now, self._device.busy_until) if not scenario.adapters else now
        self._events.at(max(until, now + self._spec.load_seconds), self._loaded, self._lives)

    def _loaded(self, life: int) -> None:
        if not self.alive or life != self._lives or not self._orders:
            return
        now, scenario = self._events.now, self._scenario
        version = self._orders.pop(0)
        self._progress(now)
        self._tally.switches += 1
        if scenario.adapters:
            in_use = {attempt.command.policy_version for attempt in self._attempts.values()}
            oldest = scenario.rules.window.oldest_live(self._newest)
            self._versions = [v for v in self._versions if v >= oldest or v in in_use]
            if version not in self._versions:
                self._versions.append(version)
                self._versions.sort()
        else:
            self._versions = [version]
        if scenario.interrupts:
            for identity, attempt in self._attempts.items():
                attempt.version = version
                self._add(identity, attempt.command, now)
        self._tally.hosts(self._number, self.version, now)
        self._say("ready")
        if self._orders:
            self._load()
        self._changed()

    def _changed(self) -> None:
        """What the worker has in hand changed: see to it that the next event is not missed."""
        now, tally = self._events.now, self._tally
        generating = bool(self._attempts) and self._state == "ready" and not self._device.paused
        generating = generating and self.alive
        workers = int(generating) - int(self._generating)
        self._generating = generating
        count = len(self._attempts)
        if workers or count != tally.held.get(self._number, 0):
            tally.generates(self._number, workers, count, now)
        if not self.alive:
            return
        due = self._device.next_event()
        if due < self._due or self._due <= now:
            self._due = due
            if due < math.inf:
                self._events.at(due, self._wake, due)

    def _wake(self, due: float) -> None:
        if due != self._due:
            return
        self._due = math.inf
        self._progress(self._events.now)
        self._changed()

    def _progress(self, now: float) -> None:
        for progress in self._device.advance(now):
            if not progress.finished:
                continue
            identity = progress.name
            attempt = self._attempts.pop(identity)
            self._tokens += progress.position
            self._chunks.positions.pop(identity, None)
            self._chunks.fruitful.pop(identity, None)
            runs = attempt.version_runs(progress.position)
            self._write(trajectory(attempt.command, self.name, runs, attempt.started, now))

    def _beat(self, life: int) -> None:
        if not self.alive or life != self._lives:
            return
        self._progress(self._events.now)
        self._changed()
        self._say(self._state)
        self._events.at(self._events.now + self._scenario.heartbeat_seconds, self._beat, life)

    def _say(self, state: ProcessState) -> None:
        self._state = state
        now, device = self._events.now, self._device
        many = tuple(self._versions) if self._scenario.adapters else ()
        loading = self._orders[0] if self._orders else -1
        self._write(
            Status(
                RUN, self.name, "rollout", self._incarnation, state, int(now * 1000),
                version=self.version, versions=many, capacity=self._scenario.slots,
                loading=loading,
                running=tuple(
                    lease_name(identity, attempt.command.attempt)
                    for identity, attempt in self._attempts.items()
                ),
                metrics={
                    "tokens_per_second": self._rate(now),
                    "kv_used_share": device.memory_used,
                },
            )
        )  # fmt: skip

    def _rate(self, now: float) -> float:
        """Tokens per second since it was last said."""
        told = self._scenario.reported_rates.get(self._number)
        if told is not None:
            return told
        device = self._device
        held = sum(
            device.position(identity) for identity in self._attempts if device.holds(identity)
        )
        total = self._tokens + held - self._base
        since, before = self._said
        if now <= since:
            return 0.0
        self._said = (now, total)
        return (total - before) / (now - since)
