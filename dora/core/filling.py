"""New groups under an older live version, as far as the window is kept with stale views too.

By default groups start under the newest version only, and the window's proof rests on that. Where
older versions are filled, this rule takes its place. Let the coordinator see version `n`, `x(j)`
outstanding groups of versions `<= j` and `x` in all, and let it admit a group under `v < n`. The
trainer may be ahead: since `n` it may have taken `l` batches of `B` groups that the coordinator has
not seen, or that were chosen before the trainer saw this admission. They hold groups of the journal
before it only, so `l <= x / B`, and of versions `<= j` they leave at most `min(x(j), x - l * B)`.

a group is admitted under `v` only if for every such `l` and every version `j >= v` (`j`
up to `n`) one more than that is at most `(j + K + 1 - n - l) * B`: what the window's rule lets
outlive the batches so far. So the trainer's rule, kept on what it saw, is kept with this group too.
(`tests/unit/test_filling_state_space.py` searches all interleavings.) A step of fewer than `B`
groups would break the bound on `l`: with a budget of tokens nothing is filled.
"""

from collections.abc import Mapping

from dora.core.window import Window


def fillable(
    window: Window, newest: int, outstanding: Mapping[int, int], version: int, most: int
) -> int:
    """How many groups, up to `most`, may start under `version`, older than `newest`; `outstanding`
    by version."""
    if window.tokens_per_step is not None or not 0 < newest - version <= window.max_staleness:
        return 0
    size, total = window.groups_per_step, sum(outstanding.values())
    room = min(most, window.capacity - total)
    older = sum(count for each, count in outstanding.items() if each < version)
    for each in range(version, newest + 1):
        older += outstanding.get(each, 0)
        room = _room(each - newest + window.max_staleness + 1, older, total, size, room)
    return max(room, 0)


def _room(steps: int, older: int, total: int, size: int, most: int) -> int:
    """How many of `most` groups fit with `older` ones into `steps` steps, whatever the trainer has
    taken meanwhile. Each of them adds to what it may have taken by the time it sees the next."""
    for count in range(most):
        have, whole = older + count, total + count
        for taken in range(whole // size + 1):
            if min(have, whole - taken * size) + 1 > (steps - taken) * size:
                return count
    return most


def oldest_filled(window: Window, newest: int) -> int:
    """Oldest version that is filled. Its groups have two more steps to finish in: the trainer waits
    for a group whose version is about to leave the window."""
    return max(0, newest - window.max_staleness + 2)
