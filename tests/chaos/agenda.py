"""Which of the planned faults is to come next, and which victims have to be left alone.

Invariant: a victim has at most one fault at a time that is not over; a fault at a point counts from
when a process is armed with it. Faults come in the planned order, save that one whose victim is not
well may be overtaken by a few of the next.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from tests.chaos.plan import Fault

_LOOK_AHEAD = 8


@dataclass(slots=True)
class Agenda:
    """The faults that are not made yet. Posts are the victims' places: `trainer`, `w1`, ... Times
    are seconds of the monotonic clock."""

    pending: list[Fault]
    at_once: int
    """Victims that may be struck at the same time."""
    armed: dict[str, tuple[Fault, float]] = field(default_factory=dict)
    """Faults at points that processes are armed with, by post, and since when."""
    _struck: set[str] = field(default_factory=set)
    _due: dict[str, float] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether every fault has been made."""
        return not self.pending and not self.armed

    def begin(self, posts: Iterable[str], now: float) -> None:
        """Everything is well for the first time."""
        for post in posts:
            self._well(post, now)

    def settle(self, busy: Set[str], now: float) -> None:
        """Victims that were struck and are not `busy` any more are well from now on."""
        for post in self._struck - busy:
            self._struck.discard(post)
            self._well(post, now)

    def _well(self, post: str, now: float) -> None:
        following = self._following(post)
        self._due[post] = now + (following.delay if following else 0.0)

    def _following(self, post: str) -> Fault | None:
        return next((fault for fault in self.pending if fault.process == post), None)

    def take(self, busy: Set[str], now: float) -> Fault | None:
        """The fault that is to be made now, if there is one; `busy` are posts to be left alone.

        One at a point counts as armed from now on.
        """
        if len(busy - set(self.armed)) >= self.at_once:
            return None
        passed: set[str] = set()
        for fault in self.pending[:_LOOK_AHEAD]:
            post = fault.process
            if post not in passed and post not in busy and now >= self._due.get(post, now):
                self.pending.remove(fault)
                if fault.point is not None:
                    self.armed[post] = (fault, now)
                return fault
            passed.add(post)
        return None

    def arm(self, post: str, now: float) -> Fault | None:
        """The fault that a process which is about to start at `post` is to make itself: the one
        that its post is armed with, or else the post's next one if it is near and at a point."""
        if post not in self.armed:
            fault = self._following(post)
            if fault is None or fault.point is None or fault not in self.pending[:_LOOK_AHEAD]:
                return None
            self.pending.remove(fault)
            self.armed[post] = (fault, now)
        return self.armed[post][0]

    def made(self, fault: Fault) -> None:
        """The fault has happened."""
        self._struck.add(fault.process)
        if self.armed.get(fault.process, (None, 0.0))[0] is fault:
            del self.armed[fault.process]

    def overdue(self, now: float, seconds: float) -> Fault | None:
        """A fault at a point that has not happened in `seconds` since its process was armed."""
        return next((f for f, since in self.armed.values() if now - since > seconds), None)


def words(fault: Fault) -> str:
    """The fault in a few words."""
    text = f"{fault.effect} of {fault.process}"
    if fault.point is not None:
        text += f" at {fault.point}, passage {fault.passage}"
    return text + (f", successor: {fault.successor}" if fault.effect == "freeze" else "")
