"""When groups that one run recorded may start in a run that is fed with them.

Invariant: they start in the recorded order under their recorded versions, never under one that the
new run has not announced yet, and never beyond its window.
"""

from collections.abc import Iterable, Mapping

from dora.core.filling import fillable
from dora.core.state import RunState
from dora.schemas.records import Admission


def startable(state: RunState, recorded: Iterable[Admission]) -> list[Admission]:
    """Those of `recorded`, what has not started yet in its order, that may start now."""
    outstanding = dict(state.outstanding)
    starting: list[Admission] = []
    for admission in recorded:
        version = admission.policy_version
        if version > state.newest:
            break
        if admission.purpose == "train":
            if not _fits(state, version, outstanding):
                break
            outstanding[version] = outstanding.get(version, 0) + 1
        starting.append(admission)
    return starting


def _fits(state: RunState, version: int, outstanding: Mapping[int, int]) -> bool:
    if version == state.newest:
        return state.window.admits(sum(outstanding.values()))
    return fillable(state.window, state.newest, outstanding, version, 1) > 0


def stuck(state: RunState, head: Admission) -> str | None:
    """Why `head`, the next group, can never start: the trainer cannot reach its version, or has
    left it behind. None if it can."""
    version, newest = head.policy_version, state.newest
    if version > newest and state.outstanding_total < state.window.fewest:
        return (
            f"version {newest} has {state.outstanding_total} groups left, too few for a step, and "
            f"the next one, {head.group_id}, is of version {version}"
        )
    if head.purpose == "train" and version < state.window.oldest_live(newest):
        return (
            f"group {head.group_id} of version {version} is next, and version {newest} is too far "
            "ahead of it"
        )
    return None
