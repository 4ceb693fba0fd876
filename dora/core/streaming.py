"""Which finished group a step that trains group by group may take next.

Whichever groups were taken, and in which order they finished, the step can still be
completed to a batch that the window allows (`core.window`), and it ends with one. Nothing that was
taken ever has to be given back.

With `S` taken at version `n`, group `g` may be taken if for `S' = S + {g}` and every version `j`

    outstanding(<= j) - S'(<= j) - (B - |S'|) <= (j + K - n) * B,

that is, if the rest of the batch, all of it of versions `<= j`, could still bring what is left
down to the limit. With `|S'| = B` that is the window's rule itself: a step of `B` groups ends with
an allowed batch. It holds for `S` empty (the claim in `core.window`: `F(j, n) <= (j + K - n + 1) *
B`). Admissions that are seen later do not break it: for `j >= c` all of `S` is of versions `<= j`,
so the left side is `outstanding(<= j) - B <= F(j, n) - B`; for `j < c` none come. And a step never
sticks: the oldest group that is not taken may always be taken once it has finished. Let `v` be its
version; for `j >= v` taking it changes neither side, and for `j < v` nothing is left outstanding,
while the limit is not negative.

A budget of tokens may end the step earlier, once what was taken is an allowed batch by itself;
from the budget on only groups are taken that the rule still asks for. At `K = 0` every finished
group may be taken at once.
"""

from collections.abc import Iterable, Mapping, Sequence

from dora.core.window import (
    Blocked,
    Candidate,
    Window,
    check_view,
    enough,
    full,
    lacking,
    position,
    too_many_left,
    unsure,
)


def may_take(
    window: Window,
    newest: int,
    outstanding: Mapping[int, int],
    taken: Mapping[int, int],
    version: int,
) -> int | None:
    """Whether a group of `version` may be taken next: None, or the oldest version whose groups
    have to be taken before. `taken` and `outstanding` count groups by version, the latter those
    taken included."""
    rest = window.groups_per_step - sum(taken.values()) - 1
    left = 0
    # For newer versions taking it changes nothing.
    for each in sorted(outstanding):
        if each >= version:
            break
        left += outstanding[each] - taken.get(each, 0)
        if left - rest > window.limit(each, newest):
            return each
    return None


def next_group(
    window: Window,
    newest: int,
    taken: Sequence[Candidate],
    finished: Iterable[Candidate],
    outstanding: Mapping[int, int],
    known_to: int | None = None,
) -> Candidate | Blocked | None:
    """The group to take next, oldest version first, then ordinal; None if `taken` is a whole batch.

    `finished` may hold the groups taken. The other arguments are those of `pick_batch`, and so are
    the errors.
    """
    names = {candidate.group_id for candidate in taken}
    free = [candidate for candidate in finished if candidate.group_id not in names]
    expired = check_view(window, newest, [*free, *taken], outstanding)
    if expired is not None:
        return expired
    wanted = newest  # newest version that may be taken from
    reached = enough(window, taken) is not None
    if reached:
        left = too_many_left(window, newest, outstanding, taken)
        if left is not None and len(taken) >= window.groups_per_step:
            return left
        if left is None:
            if len(taken) >= window.groups_per_step or known_to is None or known_to >= newest:
                return None
            if not full(window, outstanding):
                return unsure(newest)
            reached = False  # only a step of B groups may be taken now
        else:
            assert left.version is not None
            wanted = left.version
    counts: dict[int, int] = {}
    for candidate in taken:
        counts[candidate.version] = counts.get(candidate.version, 0) + 1
    waits: int | None = None
    asked: set[int] = set()
    for candidate in sorted(free, key=position):
        if candidate.version > wanted or candidate.version in asked:
            continue
        older = may_take(window, newest, outstanding, counts, candidate.version)
        if older is None:
            return candidate
        asked.add(candidate.version)  # one group of a version is as good as another
        waits = older if waits is None else min(waits, older)
    if reached:
        return too_many_left(window, newest, outstanding, taken)
    if waits is None:
        return lacking(window, [*taken, *free])
    return Blocked(
        f"{len(taken)} groups taken; version {waits} and older must come first, so that none of "
        "them expires",
        waits,
    )
