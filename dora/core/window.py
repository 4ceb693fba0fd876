"""The window: when a group may start, and which groups a step may train.

A group is outstanding from its start until a committed ledger entry names it; one in a batch that
is being trained still counts. `K` is the staleness bound and `B` the most groups of a step. A step
takes exactly `B` groups, or, with a token budget, as few as reach the budget.

- Admission: a group may start while fewer than `(K + 1) * B` are outstanding. With a token budget
  fewer than `K * B + 1`, and only while those outstanding are expected to have fewer tokens than
  `K + 1` steps train; the first under the newest version may always start, if there is room.
- Batch: at version `n` finished groups are taken oldest version first, until the step is full, and
  then on, up to `B`, until the groups left behind of each version fit into the steps before they
  expire (`Window.limit`). Otherwise the step waits. A step may take fewer than `B` only once no
  group under an older version can start any more.

So each group is trained at most `K` versions after its own, none is dropped, and the oldest `B`
finished groups are always allowed. Coordinator and trainer may both see an old part of the log.
docs/protocol.md has the proof; `tests/unit/test_window_state_space.py` walks every state for small
`K` and `B`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class Window:
    """Staleness bound `K` (0 is synchronous training), batch size `B` in groups, and the budget of
    generated tokens that ends a batch earlier, if there is one."""

    max_staleness: int
    groups_per_step: int
    tokens_per_step: int | None = None

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness is {self.max_staleness}, must be 0 or more")
        if self.groups_per_step < 1:
            raise ValueError(f"groups_per_step is {self.groups_per_step}, must be 1 or more")
        if self.tokens_per_step is not None:
            if self.tokens_per_step < 1:
                raise ValueError(f"tokens_per_step is {self.tokens_per_step}, must be 1 or more")
            if self.max_staleness < 1:
                raise ValueError(f"max_staleness is {self.max_staleness}, must be 1 or more")

    @property
    def fewest(self) -> int:
        """Groups that a step takes at least."""
        return self.groups_per_step if self.tokens_per_step is None else 1

    @property
    def capacity(self) -> int:
        """Groups that may be outstanding at once."""
        return self.max_staleness * self.groups_per_step + self.fewest

    def admissible(
        self,
        outstanding: int,
        steps_left: int,
        expected_tokens: float = 0.0,
        tokens_per_group: float = 0.0,
        *,
        opened: bool = True,
    ) -> int:
        """How many new groups may start now: as many as the window admits, and no more than the
        steps that are left will train.

        With a token budget, `expected_tokens` are those of the outstanding groups and
        `tokens_per_group` those of a new one; 0 where nothing is known about lengths yet. `opened`
        says whether a group has started under the newest version.
        """
        groups = min(self.capacity, steps_left * self.groups_per_step) - outstanding
        if self.tokens_per_step is not None:
            if tokens_per_group > 0:
                budget = min(self.max_staleness + 1, steps_left) * self.tokens_per_step
                groups = min(groups, ceil((budget - expected_tokens) / tokens_per_group))
            if not opened and steps_left > 0:
                groups = max(groups, min(1, self.capacity - outstanding))
        return max(0, groups)

    def admits(self, outstanding: int) -> bool:
        """Whether a group may start; `outstanding` includes a batch that is being trained."""
        return outstanding + 1 <= self.capacity

    def limit(self, version: int, newest: int) -> int:
        """Groups of versions `<= version` that a batch taken at `newest` may leave behind.

        They are trained in the steps at `newest + 1 .. version + K`, `B` each; negative when
        `version` has left the window already.
        """
        return (version + self.max_staleness - newest) * self.groups_per_step

    @property
    def admitted_behind(self) -> int:
        """How far the journal's versions may go back: groups may start under an older live version
        (see `core.filling`), but not where steps may be short."""
        return self.max_staleness if self.tokens_per_step is None else 0

    def oldest_live(self, newest: int) -> int:
        """Oldest version that may still be trained at `newest`."""
        return max(0, newest - self.max_staleness)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A finished group that may be trained."""

    version: int
    ordinal: int
    group_id: str
    tokens: int = 0
    """Generated tokens of all its samples."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """No batch now: `reason` for people, and the version waited for where there is one."""

    reason: str
    version: int | None


def position(candidate: Candidate) -> tuple[int, int]:
    """Oldest version first, then ordinal."""
    return candidate.version, candidate.ordinal


def pick_batch(
    window: Window,
    newest: int,
    finished: Iterable[Candidate],
    outstanding: Mapping[int, int],
    known_to: int | None = None,
) -> tuple[Candidate, ...] | Blocked:
    """The batch to train at `newest`, oldest version first, then ordinal.

    `outstanding` counts, by version, all groups started and not committed, the finished ones
    included; groups that the same ledger entry sets aside must be left out of both arguments. No
    admission under a version before `known_to` can still come; None: all admissions are known.
    Oldest first leaves the fewest groups behind at every version at once, so if this batch is not
    allowed, no other of its size is. ValueError if a candidate is newer than `newest` or not
    outstanding: then the caller's view contradicts itself.
    """
    pool = sorted(finished, key=position)
    expired = check_view(window, newest, pool, outstanding)
    if expired is not None:
        return expired
    size = window.groups_per_step
    first = enough(window, pool)
    if first is None:
        return lacking(window, pool)
    if first < size and known_to is not None and known_to < newest:
        if not full(window, outstanding):
            return unsure(newest)
        if len(pool) < size:
            return lacking(window, pool)
        first = size
    most = min(size, len(pool))
    left: Blocked | None = None
    for count in range(first, most + 1):
        left = too_many_left(window, newest, outstanding, pool[:count])
        if left is None:
            return tuple(pool[:count])
    assert left is not None
    return left


def check_view(
    window: Window, newest: int, pool: Sequence[Candidate], outstanding: Mapping[int, int]
) -> Blocked | None:
    """ValueError if the view contradicts itself; Blocked if a group has outlived the window."""
    finished: dict[int, int] = {}
    for candidate in pool:
        finished[candidate.version] = finished.get(candidate.version, 0) + 1
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
    for version, count in finished.items():
        if count > outstanding.get(version, 0):
            raise ValueError(
                f"{count} finished groups of version {version}, "
                f"but only {outstanding.get(version, 0)} are outstanding"
            )
    return None


def enough(window: Window, pool: Sequence[Candidate]) -> int | None:
    """How many of the first in `pool` a step takes at least; None if they are too few."""
    tokens = 0
    for count, candidate in enumerate(pool, 1):
        tokens += candidate.tokens
        reached = window.tokens_per_step is not None and tokens >= window.tokens_per_step
        if reached or count == window.groups_per_step:
            return count
    return None


def lacking(window: Window, pool: Sequence[Candidate]) -> Blocked:
    """Too few groups have finished."""
    count, size, budget = len(pool), window.groups_per_step, window.tokens_per_step
    if budget is None:
        return Blocked(f"{count} of {size} groups finished", None)
    tokens = sum(candidate.tokens for candidate in pool)
    return Blocked(
        f"{count} of at most {size} groups finished, with {tokens} of {budget} tokens", None
    )


def full(window: Window, outstanding: Mapping[int, int]) -> bool:
    """Whether no group can start, so that nothing more can be learned of older ones."""
    return sum(outstanding.values()) >= window.capacity


def unsure(newest: int) -> Blocked:
    """A step that ends early must know of all groups of older versions."""
    return Blocked(
        "the budget of tokens is reached; waiting for the coordinator to start a group under "
        f"version {newest}, so that all older ones are known",
        None,
    )


def too_many_left(
    window: Window, newest: int, outstanding: Mapping[int, int], batch: Iterable[Candidate]
) -> Blocked | None:
    """What forbids this batch at `newest`, of the oldest version where that is so; None if it is
    allowed."""
    taken: dict[int, int] = {}
    for candidate in batch:
        taken[candidate.version] = taken.get(candidate.version, 0) + 1
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
    return None
