"""Which policy versions' weights may be deleted.

Invariant: weights that somebody needs are never among them. Needed are the newest version's, those
of the window (they generate, or may be asked for by a worker that starts now), `keep` versions
before the window (for what is under way), and whatever a worker that still speaks says it holds,
awaits or loads, however old.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from dora.core.processes import GONE, PATIENT
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
    status: Status, heard_at: float, *, patience: float, load_patience: float
) -> WeightUser | None:
    """What `status`, heard at `heard_at`, says about weights; None if it uses none.

    A worker that starts or loads may be silent for `load_patience` seconds, another for `patience`.
    """
    if status.role != "rollout" or status.state in GONE:
        return None
    slow = status.state in PATIENT or status.loading >= 0
    wait = max(patience, load_patience) if slow else patience
    return WeightUser(status.version, status.loading, heard_at + wait)


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
