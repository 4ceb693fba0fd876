"""What the status of a process means: its state, how long it may be silent, and which weights it
needs."""

from collections.abc import Iterable
from dataclasses import dataclass

from dora.schemas.records import ProcessState, Status


@dataclass(frozen=True, slots=True)
class WeightUser:
    """A worker as of its last status; times in seconds of one monotonic clock."""

    holds: int
    """Version in its engine, -1 for none."""
    loads: int
    """Version that it awaits or loads, -1 for none."""
    until: float
    """When it counts as gone unless it reports again."""


def weight_user(
    status: Status, heard_at: float, *, heartbeat_timeout: float, load_timeout: float
) -> WeightUser | None:
    """What `status`, read at `heard_at`, says about weights; None if it uses none."""
    if status.role != "rollout" or status.state in GONE:
        return None
    limit = allowed_silence(status, heartbeat_timeout=heartbeat_timeout, load_timeout=load_timeout)
    return WeightUser(status.version, status.loading, heard_at + limit)


def needless(
    stored: Iterable[int],
    newest: int,
    max_staleness: int,
    keep: int,
    users: Iterable[WeightUser],
    now: float,
) -> frozenset[int]:
    """The versions among `stored` that may be deleted while `newest` is the newest one.

    Needed are the newest version's weights, those of the window (they generate, or may be asked for
    by a worker that starts now), those of `keep` versions before the window (for work under way),
    and those that a worker which still reports holds, awaits or loads, however old.
    """
    used: set[int] = set()
    for user in users:
        if user.until >= now:
            used.update((user.holds, user.loads))
    oldest = newest - max_staleness - max(keep, 0)
    return frozenset(v for v in stored if v < min(oldest, newest) and v not in used)


USABLE: frozenset[ProcessState] = frozenset({"ready"})
"""Takes work."""
GONE: frozenset[ProcessState] = frozenset({"failed", "stopped"})
"""Reported that it has ended."""
PATIENT: frozenset[ProcessState] = frozenset({"starting", "loading"})
"""Starts or loads weights, and has no time to report meanwhile."""
WORKING: frozenset[ProcessState] = frozenset({"ready", "training", "waiting"})
"""Does its part of the run, or waits for other processes to do theirs."""


def allowed_silence(
    status: Status, *, heartbeat_timeout: float, load_timeout: float, switching: bool = False
) -> float:
    """Seconds after `status` for which its process may report nothing before it counts as lost.

    The longer of both times for one that starts or loads weights, in the background too, or that
    was told to (`switching`); infinite for one that has ended.
    """
    if status.state in GONE:
        return float("inf")
    if switching or status.loading >= 0 or status.state in PATIENT:
        return max(load_timeout, heartbeat_timeout)
    return heartbeat_timeout
