"""Which finished group a step that trains group by group may take next.

A group may be taken if the rest of the batch could still bring what is left of each version down
to the window's limit (`Window.limit`). So whichever groups were taken, the step can be completed to
an allowed batch, and nothing that was taken has to be given back. The oldest group that is not
taken may always be taken once it has finished, so a step never sticks. docs/protocol.md has the
proof.

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
