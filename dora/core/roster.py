"""The coordinator's view of the workers and of who holds which trajectory.

Invariant: a trajectory has at most one holder, and a holder is one incarnation of a worker. A
trajectory whose holder is gone (silent, replaced, failed, stopped, or alive and not knowing of it)
comes back from `lost` exactly once, to be placed again as a new attempt.

Time is passed in (seconds of a monotonic clock of the caller): the time stamps in records belong to
other machines' clocks, which may jump.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from dora.core.placement import WorkerView
from dora.schemas.records import Command, ProcessState, Status

USABLE: frozenset[ProcessState] = frozenset({"ready"})
GONE: frozenset[ProcessState] = frozenset({"failed", "stopped"})
PATIENT: frozenset[ProcessState] = frozenset({"starting", "loading"})


def holding(trajectory_id: str, attempt: int) -> str:
    """How a worker names an attempt in `Status.running`."""
    return f"{trajectory_id}#{attempt}"


def parse_holding(text: str) -> tuple[str, int]:
    """Trajectory id and attempt of an entry of `Status.running`; ValueError when malformed."""
    trajectory_id, separator, attempt = text.rpartition("#")
    if not separator or not attempt.isdecimal():
        raise ValueError(f"{text!r} names no attempt: it must read <trajectory id>#<attempt>")
    return trajectory_id, int(attempt)


@dataclass(frozen=True, slots=True)
class Hold:
    """An attempt in the hands of a worker."""

    worker: str
    incarnation: str
    attempt: int
    sent_at: float


@dataclass(slots=True)
class Member:
    """One incarnation of a worker as last heard; before `excused_at` silence does not count.

    `superseded` are attempts that it generates although others took them over (it was given up and
    came back), `yielded` those of them that it was told to stop.
    """

    status: Status
    heard_at: float
    confirmed: bool
    excused_at: float = float("-inf")
    switching_to: int | None = None
    holds: set[str] = field(default_factory=set)
    superseded: set[str] = field(default_factory=set)
    yielded: set[str] = field(default_factory=set)


class Roster:
    """Workers and holds.

    `heartbeat_timeout` (seconds) is how long a worker may be silent; one that loads weights may be
    silent for `load_timeout`.
    """

    def __init__(self, *, heartbeat_timeout: float, load_timeout: float) -> None:
        self._heartbeat_timeout = heartbeat_timeout
        self._load_timeout = load_timeout
        self._members: dict[str, Member] = {}
        self._holds: dict[str, Hold] = {}
        self._attempts: dict[str, int] = {}
        self._lost: list[str] = []
        self._replaced: set[str] = set()

    def hear(self, status: Status, now: float, *, live: bool = True) -> bool:
        """Takes a worker's status; False if it comes from a replaced incarnation (a zombie).

        `live` is false for what was read while catching up: such a worker is given no work before
        it speaks again.
        """
        if status.incarnation in self._replaced:
            return status.state in GONE
        member = self._members.get(status.process)
        if member is None or member.status.incarnation != status.incarnation:
            if member is not None:
                self._replaced.add(member.status.incarnation)
                self._release(member)
            member = self._members[status.process] = Member(status, now, live)
        switched = member.status.loading != -1 and status.loading == -1
        member.status = status
        member.heard_at = now
        member.confirmed = member.confirmed or live
        if status.loading != -1:
            member.switching_to = status.loading
        elif status.version == member.switching_to or switched:
            # done, or given up because the version had left the window
            member.switching_to = None
        if live:
            self._compare(member)
        if status.state in GONE:
            self._release(member)
        return True

    def _compare(self, member: Member) -> None:
        """Finds attempts in a worker's hands that are not its own any more."""
        member.yielded.intersection_update(member.status.running)
        member.superseded.clear()
        for held in member.status.running:
            trajectory_id, attempt = parse_holding(held)
            if trajectory_id not in self._attempts or held in member.yielded:
                continue
            hold = self._holds.get(trajectory_id)
            if hold is None or (hold.incarnation, hold.attempt) != (
                member.status.incarnation,
                attempt,
            ):
                member.superseded.add(held)

    def sent(self, command: Command, now: float, offset: int | None = None) -> None:
        """Notes a command that is in the log: just written, or read while catching up.

        `offset` is given for the latter, after the worker's status was heard: a command that the
        worker has carried out leaves only what its status shows.
        """
        member = self._members.get(command.worker)
        current = member is not None and member.status.incarnation == command.incarnation
        if member is not None and offset is not None and offset <= member.status.command_offset:
            current = current and (
                command.kind == "start"
                and holding(command.trajectory_id, command.attempt) in member.status.running
            )
        if command.kind == "start":
            known = self._attempts.get(command.trajectory_id, -1)
            self._attempts[command.trajectory_id] = max(known, command.attempt)
            self._drop(command.trajectory_id)
            if member is not None and current and member.status.state not in GONE:
                self._holds[command.trajectory_id] = Hold(
                    command.worker, command.incarnation, command.attempt, now
                )
                member.holds.add(command.trajectory_id)
        elif command.kind == "yield":
            held = holding(command.trajectory_id, command.attempt)
            hold = self._holds.get(command.trajectory_id)
            if hold is not None and (hold.incarnation, hold.attempt) == (
                command.incarnation,
                command.attempt,
            ):
                self._drop(command.trajectory_id)
            if member is not None and current:
                member.superseded.discard(held)
                member.yielded.add(held)
        elif (
            command.kind == "switch"
            and member is not None
            and current
            and member.status.version != command.policy_version
        ):
            member.switching_to = command.policy_version

    def seen_attempt(self, trajectory_id: str, attempt: int) -> None:
        """Notes an attempt number that the log shows, so that the next one is higher."""
        self._attempts[trajectory_id] = max(self._attempts.get(trajectory_id, -1), attempt)

    def finished(self, trajectory_id: str) -> None:
        """The trajectory needs nobody any more."""
        self._drop(trajectory_id)
        self._attempts.pop(trajectory_id, None)

    def next_attempt(self, trajectory_id: str) -> int:
        """Number of the next attempt: one more than the highest known."""
        return self._attempts.get(trajectory_id, -1) + 1

    def held(self, trajectory_id: str) -> Hold | None:
        """Who holds the trajectory."""
        return self._holds.get(trajectory_id)

    def lost(self, now: float) -> list[str]:
        """Trajectories that lost their holder since the last call."""
        for member in self._members.values():
            limit = (
                self._load_timeout
                if member.status.state in PATIENT or member.switching_to is not None
                else self._heartbeat_timeout
            )
            silence = now - max(member.heard_at, member.excused_at)
            if member.status.state not in GONE and silence > limit:
                self._release(member)
                member.confirmed = False
            running = set(member.status.running)
            for trajectory_id in list(member.holds):
                hold = self._holds[trajectory_id]
                overdue = member.heard_at - hold.sent_at > self._heartbeat_timeout
                if overdue and holding(trajectory_id, hold.attempt) not in running:
                    self._drop(trajectory_id)
                    self._lost.append(trajectory_id)
        lost, self._lost = self._lost, []
        return lost

    def excuse(self, now: float) -> None:
        """Nobody could be heard for a while, for a reason that is not theirs: their silence counts
        from now on."""
        for member in self._members.values():
            member.excused_at = now

    def members(self) -> Iterable[Member]:
        """All workers ever heard, in their newest incarnation."""
        return self._members.values()

    def member(self, name: str) -> Member | None:
        """The newest incarnation of a worker."""
        return self._members.get(name)

    def views(self) -> list[WorkerView]:
        """Workers that answer and can generate, or are on their way to."""
        return [
            WorkerView(
                name=member.status.process,
                version=member.status.version,
                capacity=member.status.capacity,
                load=len(member.holds),
                switching_to=member.switching_to,
            )
            for member in self._members.values()
            if member.confirmed
            and (member.status.state in USABLE or member.switching_to is not None)
            and member.status.state not in GONE
            and member.status.capacity > 0
        ]

    def _drop(self, trajectory_id: str) -> None:
        hold = self._holds.pop(trajectory_id, None)
        if hold is not None:
            member = self._members.get(hold.worker)
            if member is not None:
                member.holds.discard(trajectory_id)

    def _release(self, member: Member) -> None:
        member.switching_to = None
        for trajectory_id in sorted(member.holds):
            self._drop(trajectory_id)
            self._lost.append(trajectory_id)
