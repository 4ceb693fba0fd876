"""The window: when a group may start, and which groups a step may train.

Invariant: with at most `(K+1) * B` groups outstanding, and a batch taken only if every group left
still fits in the steps before it expires, each group is trained at most `K` versions after the one
that generated it (bounded staleness), none is dropped, and a batch can be taken as soon as enough
groups have finished (no deadlock). Outstanding is a group that was started and is not yet in a
committed ledger entry: one in a batch that is being trained counts until the commit.

Both rules stay safe on stale views. Let the journal of admissions be totally ordered with
versions that never decrease, each admission valid under a prefix of the ledger, and the batch drawn
from a prefix of the journal whose newest version is `m`. For versions `j < m` the trainer's counts
are exact. For `j >= m`, let `v <= j` be the version of the last admission at or below `j`: at that
moment at most `(K+1) * B` groups were outstanding, and the `n - v + 1` batches since `v` (this one
included) hold none newer than `m`, so at most `(K + v - n) * B <= (j + K - n) * B` are left.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import nsmallest


@dataclass(frozen=True, slots=True)
class Window:
    """Staleness bound `K` (0 is synchronous training) and batch size `B` in groups."""

    max_staleness: int
    groups_per_step: int

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness is {self.max_staleness}, must be 0 or more")
        if self.groups_per_step < 1:
            raise ValueError(f"groups_per_step is {self.groups_per_step}, must be 1 or more")

    @property
    def capacity(self) -> int:
        """Groups that may be outstanding at once."""
        return (self.max_staleness + 1) * self.groups_per_step

    def admissible(self, outstanding: int, steps_left: int) -> int:
        """How many new groups may start now: as many as the window admits, and no more than the
        steps that are left will train."""
        return max(0, min(self.capacity, steps_left * self.groups_per_step) - outstanding)

    def admits(self, outstanding: int) -> bool:
        """Whether a group may start; `outstanding` includes a batch that is being trained."""
        return outstanding + 1 <= self.capacity

    def limit(self, version: int, newest: int) -> int:
        """Groups of versions `<= version` that a batch taken at `newest` may leave behind.

        They are trained in the steps at `newest + 1 .. version + K`, `B` each; negative when
        `version` has left the window already.
        """
        return (version + self.max_staleness - newest) * self.groups_per_step

    def oldest_live(self, newest: int) -> int:
        """Oldest version that may still be trained at `newest`."""
        return max(0, newest - self.max_staleness)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A finished group that may be trained."""

    version: int
    ordinal: int
    group_id: str


@dataclass(frozen=True, slots=True)
class Blocked:
    """No batch now: `reason` for people, and the version waited for where there is one."""

    reason: str
    version: int | None


def _position(candidate: Candidate) -> tuple[int, int]:
    return candidate.version, candidate.ordinal


def pick_batch(
    window: Window,
    newest: int,
    finished: Iterable[Candidate],
    outstanding: Mapping[int, int],
) -> tuple[Candidate, ...] | Blocked:
    """The batch to train at `newest`: `B` finished groups, oldest version first, then ordinal.

    `outstanding` counts, by version, all groups started and not committed, the finished ones
    included; groups that the same ledger entry sets aside must be left out of both arguments.
    Oldest first leaves the fewest groups behind at every version at once, so if this batch is not
    allowed, none is. ValueError if a candidate is newer than `newest` or not outstanding: then the
    caller's view contradicts itself.
    """
    size = window.groups_per_step
    pool = list(finished)
    for candidate in pool:
        if candidate.version > newest:
            raise ValueError(
                f"group {candidate.group_id} is of version {candidate.version}, "
                f"newer than the newest version {newest}"
            )
    # Checked before the count: it names a damaged log even while groups are few.
    for version in sorted(outstanding):
        if outstanding[version] > 0 and window.limit(version, newest) < 0:
            return Blocked(
                f"version {version} still has {outstanding[version]} groups outstanding, but has "
                f"left the window of {window.max_staleness} behind version {newest}: "
                "the log breaks the admission rule",
                version,
            )
    if len(pool) < size:
        return Blocked(f"{len(pool)} of {size} groups finished", None)
    batch = tuple(nsmallest(size, pool, key=_position))
    taken: dict[int, int] = {}
    for candidate in batch:
        taken[candidate.version] = taken.get(candidate.version, 0) + 1
    for version, count in taken.items():
        if count > outstanding.get(version, 0):
            raise ValueError(
                f"{count} finished groups of version {version}, "
                f"but only {outstanding.get(version, 0)} are outstanding"
            )
    left = 0
    # Versions without groups cannot break the rule: the limit grows there, the count does not.
    for version in sorted(outstanding):
        left += outstanding[version] - taken.get(version, 0)
        fits = window.limit(version, newest)
        if left > fits and version <= newest:
            return Blocked(
                f"version {version} and older would keep {left} groups outstanding, {fits} fit: "
                "waiting for its older groups to finish",
                version,
            )
    return batch
