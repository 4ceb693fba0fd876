"""New groups under an older live version, where that keeps the window's promise.

By default groups start under the newest version only. This rule allows an older version `v` as
well. The trainer may be ahead of what the coordinator sees by any number of batches that the
outstanding groups can make up; a group starts under `v` only if, for each such number, the groups
of versions up to each live version would still fit into the steps before they expire.
With a token budget steps may be short, and nothing is filled. docs/protocol.md has the proof;
`tests/unit/test_filling_state_space.py` searches all interleavings.
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
