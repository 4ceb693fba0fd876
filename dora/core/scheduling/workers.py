"""The coordinator's view of the workers and of which worker leases which trajectory.

A trajectory has at most one holder, and a holder is one incarnation of a worker. A
trajectory whose holder is gone (silent, replaced, failed, stopped, or alive and not knowing of it)
comes back from `lost` exactly once, to be placed again as a new attempt. One that its holder was
told to hand over (`moving`) comes back from `on_handover`, or from `lost` if that takes too long.

Time is passed in (seconds of a monotonic clock of the caller): the time stamps in records belong to
other machines' clocks, which may jump. No question is answered by a walk over all workers.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from dora.core.processes import GONE, USABLE, allowed_silence
from dora.core.scheduling.estimates import Speeds
from dora.core.scheduling.pool import Pool, WorkerView
from dora.schemas.records import Command, Status


def lease_name(trajectory_id: str, attempt: int) -> str:
    """How a worker names an attempt in `Status.running`."""
    return f"{trajectory_id}#{attempt}"


def parse_lease_name(text: str) -> tuple[str, int]:
    """Trajectory id and attempt of an entry of `Status.running`; ValueError when malformed."""
    trajectory_id, separator, attempt = text.rpartition("#")
    if not separator or not attempt.isdecimal():
        raise ValueError(f"{text!r} names no attempt: it must read <trajectory id>#<attempt>")
    return trajectory_id, int(attempt)


@dataclass(frozen=True, slots=True)
class Lease:
    """An attempt in the hands of a worker; `moving`: it was told to hand it over."""

    worker: str
    incarnation: str
    attempt: int
    sent_at: float
    moving: bool = False


RELIEVED = 0.05
"""Memory counts as relieved this share of the cache below the threshold: nothing flickers."""


@dataclass(slots=True)
class WorkerState:
    """One incarnation of a worker, as of its last status.

    `superseded` are attempts that it generates although others took them over (it was given up and
    came back), `yielded` those of them that it was told to stop. `moving` are those of its `leases`
    that it is to hand over; a worker that is to hand over all is `leaving` until it gets new work.
    `named` is how its status should name its leases. `settled_at`: when it last got a version or
    another's trajectory; `check_at`: when its silence is looked at.
    """

    status: Status
    heard_at: float
    confirmed: bool
    switching_to: int | None = None
    leases: set[str] = field(default_factory=set)
    moving: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)
    superseded: set[str] = field(default_factory=set)
    yielded: set[str] = field(default_factory=set)
    leaving: bool = False
    pressed: bool = False
    settled_at: float = float("-inf")
    check_at: float = float("inf")


class WorkerRegistry:
    """Workers and leases; `pool` indexes those that can generate, or are on their way to.

    `heartbeat_timeout` (seconds) is how long a worker may be silent; one that loads weights may be
    silent for `load_timeout`. `memory_threshold` is the share of a worker's key-value cache from
    which on it is `pressed`.
    """

    def __init__(
        self, *, heartbeat_timeout: float, load_timeout: float, memory_threshold: float = 1.0
    ) -> None:
        self.pool = Pool()
        self.pressed: dict[str, None] = {}
        """Workers whose memory runs high."""
        self.disputed: dict[str, None] = {}
        """Workers that generate what others took over."""
        self._heartbeat_timeout = heartbeat_timeout
        self._load_timeout = load_timeout
        self._memory_threshold = memory_threshold
        self._excused_at = float("-inf")
        self._speeds = Speeds()
        self._workers: dict[str, WorkerState] = {}
        self._leases: dict[str, Lease] = {}
        self._attempts: dict[str, int] = {}
        self._moved: dict[str, set[int]] = {}  # attempts that were told to move
        self._lost: list[str] = []
        self._replaced: set[str] = set()
        self._silences: list[tuple[float, str]] = []  # when to look at a worker's silence
        self._handovers: list[tuple[float, str, int]] = []  # when to look at a move

    def on_status(self, status: Status, now: float, *, live: bool = True) -> bool:
        """Takes a worker's status; False if it comes from a replaced incarnation (a zombie).

        `live` is false for what was read while catching up: such a worker is given no work before
        it reports again.
        """
        if status.incarnation in self._replaced:
            return status.state in GONE
        name = status.process
        worker = self._workers.get(name)
        if worker is None or worker.status.incarnation != status.incarnation:
            if worker is not None:
                self._replaced.add(worker.status.incarnation)
                self._release(worker)
                self._speeds.forget(name)
                self.disputed.pop(name, None)
            worker = self._workers[name] = WorkerState(status, now, live)
        switched = worker.status.loading != -1 and status.loading == -1
        if status.version != worker.status.version:
            worker.settled_at = now
            worker.leaving = False  # it has left
        worker.status = status
        worker.heard_at = now
        worker.confirmed = worker.confirmed or live
        if status.loading != -1:
            worker.switching_to = status.loading
        elif switched or worker.switching_to in (status.version, *status.versions):
            # done, or given up because the version had left the window
            worker.switching_to = None
        self._compare(worker, live=live)
        self._measure(worker)
        if status.state in GONE:
            self._release(worker)
        self._watch(worker)
        self._changed(worker)
        return True

    def _compare(self, worker: WorkerState, *, live: bool) -> None:
        """Finds attempts that a worker runs without a lease, and leases of which it does not
        know."""
        running = set(worker.status.running)
        for held in sorted(worker.named - running):
            trajectory_id, _ = parse_lease_name(held)
            lease = self._leases[trajectory_id]
            if worker.heard_at - lease.sent_at > self._heartbeat_timeout and not lease.moving:
                self._drop(trajectory_id)
                self._lost.append(trajectory_id)
        if not live:
            return
        worker.yielded &= running
        worker.superseded.clear()
        for held in running - worker.named - worker.yielded:
            trajectory_id, _ = parse_lease_name(held)
            if trajectory_id in self._attempts:
                worker.superseded.add(held)
        self._dispute(worker)

    def _dispute(self, worker: WorkerState) -> None:
        if worker.superseded:
            self.disputed[worker.status.process] = None
        else:
            self.disputed.pop(worker.status.process, None)

    def _measure(self, worker: WorkerState) -> None:
        """Speed and memory, as far as the worker reports them."""
        status = worker.status
        rate = status.metrics.get("tokens_per_second")
        if rate is not None:
            self._speeds.observe(status.process, rate, len(status.running))
        used = status.metrics.get("kv_used_share", 0.0)
        limit = self._memory_threshold - (RELIEVED if worker.pressed else 0.0)
        # a lone trajectory has no other to make room for
        worker.pressed = used >= limit and len(status.running) > 1
        if worker.pressed:
            self.pressed[status.process] = None
        else:
            self.pressed.pop(status.process, None)

    def on_command(self, command: Command, now: float, offset: int | None = None) -> None:
        """Notes a command that is in the log: just written, or read while catching up.

        `offset` is given for the latter, after the worker's status was heard: a command that the
        worker has carried out leaves only what its status shows.
        """
        worker = self._workers.get(command.worker)
        if worker is not None and worker.status.incarnation != command.incarnation:
            worker = None
        if (
            worker is not None
            and offset is not None
            and offset <= worker.status.command_offset
            and not (
                command.kind == "start"
                and lease_name(command.trajectory_id, command.attempt) in worker.status.running
            )
        ):
            worker = None
        match command.kind:
            case "start":
                self._on_start(command, worker, now)
            case "yield":
                self._on_yield(command, worker)
            case "move":
                self._on_move(command, worker, now)
            case "switch" if worker is not None:
                if command.policy_version not in (worker.status.version, *worker.status.versions):
                    worker.switching_to = command.policy_version
        if worker is not None:
            self._watch(worker)
            self._changed(worker)

    def _on_start(self, command: Command, worker: WorkerState | None, now: float) -> None:
        trajectory_id = command.trajectory_id
        known = self._attempts.get(trajectory_id, -1)
        self._attempts[trajectory_id] = max(known, command.attempt)
        self._drop(trajectory_id)
        if worker is None or worker.status.state in GONE:
            return
        self._leases[trajectory_id] = Lease(
            command.worker, command.incarnation, command.attempt, now
        )
        worker.leases.add(trajectory_id)
        worker.named.add(lease_name(trajectory_id, command.attempt))
        worker.leaving = False
        if command.attempt - 1 in self._moved.get(trajectory_id, ()):
            worker.settled_at = now

    def _on_yield(self, command: Command, worker: WorkerState | None) -> None:
        lease = self._leases.get(command.trajectory_id)
        if lease is not None and (lease.incarnation, lease.attempt) == (
            command.incarnation,
            command.attempt,
        ):
            self._drop(command.trajectory_id)
        if worker is not None:
            held = lease_name(command.trajectory_id, command.attempt)
            worker.superseded.discard(held)
            worker.yielded.add(held)
            self._dispute(worker)

    def _on_move(self, command: Command, worker: WorkerState | None, now: float) -> None:
        trajectory_id = command.trajectory_id
        self._moved.setdefault(trajectory_id, set()).add(command.attempt)
        lease = self._leases.get(trajectory_id)
        if worker is None or lease is None or lease.attempt != command.attempt:
            return  # carried out already: a worker that still names it will finish it
        self._leases[trajectory_id] = Lease(
            lease.worker, lease.incarnation, lease.attempt, now, True
        )
        worker.moving.add(trajectory_id)
        worker.leaving = len(worker.moving) == len(worker.leases)
        heappush(self._handovers, (now + self._heartbeat_timeout, trajectory_id, command.attempt))

    def on_handover(self, trajectory_id: str, attempt: int) -> bool:
        """The tokens of an attempt that was told to move came: its lease ends. False if they are
        not waited for."""
        lease = self._leases.get(trajectory_id)
        if lease is None or not lease.moving or lease.attempt != attempt:
            return False
        self._drop(trajectory_id)
        return True

    def moved(self, trajectory_id: str, since: int) -> int:
        """How many attempts from number `since` on ended because they were told to move."""
        return sum(attempt >= since for attempt in self._moved.get(trajectory_id, ()))

    def seen_attempt(self, trajectory_id: str, attempt: int) -> None:
        """Notes an attempt number that the log shows, so that the next one is higher."""
        self._attempts[trajectory_id] = max(self._attempts.get(trajectory_id, -1), attempt)

    def finished(self, trajectory_id: str) -> None:
        """The trajectory needs no worker any more."""
        self._drop(trajectory_id)
        self._attempts.pop(trajectory_id, None)
        self._moved.pop(trajectory_id, None)

    def next_attempt(self, trajectory_id: str) -> int:
        """Number of the next attempt: one more than the highest known."""
        return self._attempts.get(trajectory_id, -1) + 1

    def held(self, trajectory_id: str) -> Lease | None:
        """The lease of the worker that has the trajectory, or is about to hand it over."""
        return self._leases.get(trajectory_id)

    def lost(self, now: float) -> list[str]:
        """Trajectories that lost their holder since the last call."""
        while self._silences and self._silences[0][0] < now:
            at, name = heappop(self._silences)
            worker = self._workers[name]
            if worker.check_at != at:
                continue  # looked at earlier
            worker.check_at = float("inf")
            if self.silent(worker, now):
                self._release(worker)
                worker.confirmed = False
                self._changed(worker)
            else:
                self._watch(worker)
        while self._handovers and self._handovers[0][0] < now:
            at, trajectory_id, attempt = heappop(self._handovers)
            lease = self._leases.get(trajectory_id)
            if lease is None or not lease.moving or lease.attempt != attempt:
                continue
            due = max(lease.sent_at, self._excused_at) + self._heartbeat_timeout
            if due < now:
                self._drop(trajectory_id)
                self._lost.append(trajectory_id)
            else:
                heappush(self._handovers, (due, trajectory_id, attempt))
        lost, self._lost = self._lost, []
        return lost

    def silent(self, worker: WorkerState, now: float) -> bool:
        """Whether the worker has been silent for longer than what it does allows."""
        return self._silent_from(worker) < now

    def _silent_from(self, worker: WorkerState) -> float:
        """When the worker's silence becomes too long, if it goes on."""
        limit = allowed_silence(
            worker.status,
            heartbeat_timeout=self._heartbeat_timeout,
            load_timeout=self._load_timeout,
            switching=worker.switching_to is not None,
        )
        return max(worker.heard_at, self._excused_at) + limit

    def _watch(self, worker: WorkerState) -> None:
        """Has the worker's silence looked at in time."""
        due = self._silent_from(worker)
        if due < worker.check_at:
            worker.check_at = due
            heappush(self._silences, (due, worker.status.process))

    def excuse(self, now: float) -> None:
        """No status could be read for a while, for a reason that is not the workers': their
        silence counts from now on."""
        self._excused_at = now

    def workers(self) -> Iterable[WorkerState]:
        """All workers ever seen, in their newest incarnation."""
        return self._workers.values()

    def worker(self, name: str) -> WorkerState | None:
        """The newest incarnation of a worker."""
        return self._workers.get(name)

    def settled_at(self, name: str) -> float:
        """When the worker last got a version or another's trajectory; KeyError if never seen."""
        return self._workers[name].settled_at

    def _changed(self, worker: WorkerState) -> None:
        """Brings the pool up to date."""
        status = worker.status
        name = status.process
        if (
            worker.confirmed
            and (status.state in USABLE or worker.switching_to is not None)
            and status.state not in GONE
            and status.capacity > 0
        ):
            self.pool.put(
                WorkerView(
                    name,
                    status.version,
                    status.capacity,
                    len(worker.leases),
                    worker.switching_to,
                    status.versions,
                    worker.leaving,
                    worker.pressed or bool(worker.moving),
                    self._speeds.of(name),
                    _places(status),
                )
            )
        else:
            self.pool.drop(name)

    def _drop(self, trajectory_id: str) -> None:
        lease = self._leases.pop(trajectory_id, None)
        worker = None if lease is None else self._workers.get(lease.worker)
        if lease is not None and worker is not None:
            worker.leases.discard(trajectory_id)
            worker.moving.discard(trajectory_id)
            worker.named.discard(lease_name(trajectory_id, lease.attempt))
            self._changed(worker)

    def _release(self, worker: WorkerState) -> None:
        worker.switching_to = None
        worker.leaving = False
        lost = sorted(worker.leases)
        for trajectory_id in lost:
            del self._leases[trajectory_id]
        for names in (worker.leases, worker.moving, worker.named):
            names.clear()
        self._lost += lost
        self.pool.drop(worker.status.process)
        self.pressed.pop(worker.status.process, None)


def _places(status: Status) -> int | None:
    """How many versions a worker has room for, where it says so; nonsense says nothing."""
    places = status.metrics.get("adapters", 0.0)
    return int(places) if 1 <= places < float("inf") else None
