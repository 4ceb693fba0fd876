"""Which policy versions' weights may be deleted.

Invariant: weights that somebody needs are never among them. Needed are the newest version's, those
of the window (they generate, or may be asked for by a worker that starts now), `keep` versions
before the window (for what is under way), and whatever a worker that still speaks says it holds,
awaits or loads, however old.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from dora.core.processes import GONE, allowed_silence
from dora.schemas.records import Status


@dataclass(frozen=True, slots=True)
class WeightUser:
    """A worker as it spoke last; times in seconds of one monotonic clock."""

    holds: int
    """Version in its engine, -1 for none."""
    loads: int
    """Version that it awaits or loads, -1 for none."""
    until: float
    """When it counts as gone unless it speaks again."""


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
    """The versions among `stored` that may be deleted while `newest` is the newest one."""
    used: set[int] = set()
    for user in users:
        if user.until >= now:
            used.update((user.holds, user.loads))
    oldest = newest - max_staleness - max(keep, 0)
    return frozenset(v for v in stored if v < min(oldest, newest) and v not in used)
