"""Which groups that one run recorded can feed another run, and when they may start there.

They start in the recorded order under their recorded versions, never under one that the
new run has not announced yet, and never beyond its window.
"""

from collections.abc import Iterable, Mapping, Set

from dora.core.filling import fillable
from dora.core.identity import ends_early, schedule_of
from dora.core.ring import trajectory_id
from dora.core.state import RunState
from dora.schemas.records import Admission


def unservable(identity: str) -> str | None:
    """Why a run with this recorded identity (JSON) can feed no other; None if it can."""
    if schedule_of(identity) == "partial":
        return (
            "its schedule is partial, so its trajectories hold tokens of versions that the new "
            "trainer has not made when they would start"
        )
    if ends_early(identity):
        return (
            "with window.tokens_per_step the groups of a step depend on when they finish, and a "
            "replay could not start the recorded ones in time"
        )
    return None


def unbroken(found: Mapping[Admission, Set[str]]) -> list[Admission]:
    """Those of `found`, groups and the trajectories that are at hand of each, that can feed a run,
    in an order in which they can have started: by version, evaluations first, then by prompt.

    The first one that is not whole, or comes after a missing prompt, ends them: a trainer could not
    tell that from loss.
    """
    servable: list[Admission] = []
    prompts = 0
    for group in sorted(found, key=lambda each: (each.policy_version, each.purpose, each.ordinal)):
        if found[group] != {trajectory_id(group.group_id, n) for n in range(group.group_size)}:
            break
        if group.purpose == "train":
            if group.ordinal != prompts:
                break
            prompts += 1
        servable.append(group)
    return servable


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
