"""When recorded groups may start in a run that is fed with them."""

from dataclasses import replace

import pytest

from dora.core.recorded_order import startable, stuck, unbroken, unservable
from dora.core.state import RunState
from dora.core.window import Window
from dora.schemas.records import Admission
from tests.factories import admission, step

RECORDED = [admission(ordinal, ordinal // 2) for ordinal in range(8)]
"""Two groups of each version."""


def begun(*started: Admission) -> RunState:
    """A run of K = 1 and two groups a step, with these groups started under version 0."""
    state = RunState(Window(1, 2), group_size=2)
    state.start()
    for each in started:
        state.admit(each)
    return state


def trained(state: RunState, version: int, *groups: Admission) -> None:
    ids = [f"{group.group_id}/{sample}" for group in groups for sample in (0, 1)]
    places = {identity: (0, offset) for offset, identity in enumerate(ids)}
    state.commit(step(version, version, list(groups), places))


def test_nothing_starts_before_its_version_is_announced() -> None:
    state = begun()
    assert startable(state, RECORDED) == RECORDED[:2]
    unannounced = RunState(Window(1, 2), group_size=2)
    assert startable(unannounced, RECORDED) == []


def test_no_more_start_than_the_window_takes_and_none_out_of_order() -> None:
    same = [replace(each, policy_version=0) for each in RECORDED]
    assert startable(begun(), same) == same[:4]
    evaluated = replace(RECORDED[7], policy_version=0, purpose="eval")
    assert startable(begun(), [*same[:4], evaluated]) == [*same[:4], evaluated]
    assert startable(begun(), [*same[:5], evaluated]) == same[:4], "what comes first starts first"


def test_what_can_never_start_is_told() -> None:
    state = begun(*RECORDED[:2])
    assert stuck(state, RECORDED[2]) is None, "a step is possible"
    few = begun(RECORDED[0])
    reason = stuck(few, RECORDED[2])
    assert reason is not None
    assert "version 0 has 1 groups left, too few for a step" in reason and "g2" in reason


@pytest.mark.parametrize(("purpose", "possible"), [("train", False), ("eval", True)])
def test_a_group_that_the_trainer_left_behind_is_told(purpose: str, possible: bool) -> None:
    state = begun(*RECORDED[:2])
    trained(state, 0, *RECORDED[:2])
    for each in RECORDED[2:4]:
        state.admit(each)
    trained(state, 1, *RECORDED[2:4])
    late = replace(admission(9, 0), purpose=purpose)
    reason = stuck(state, late)
    if possible:
        assert reason is None and startable(state, [late]) == [late]
    else:
        assert reason == "group g9 of version 0 is next, and version 2 is too far ahead of it"
        assert startable(state, [late]) == []


def test_groups_feed_a_run_up_to_the_first_that_is_missing_or_not_whole() -> None:
    evaluated = replace(admission(0, 1), group_id="e1-0", purpose="eval", group_size=1)
    order = [*RECORDED[:2], evaluated, *RECORDED[2:]]
    found = {
        each: {f"{each.group_id}/{sample}" for sample in range(each.group_size)}
        for each in reversed(order)
    }
    assert unbroken(found) == order
    assert unbroken({each: found[each] for each in found if each != RECORDED[3]}) == order[:4]
    assert unbroken(found | {RECORDED[3]: {"g3/1"}}) == order[:4]
    assert unbroken(found | {RECORDED[3]: {"g3/0", "g3/7"}}) == order[:4]


def test_runs_that_can_feed_no_other_are_told() -> None:
    assert unservable('{"schedule": {"kind": "sync"}}') is None
    assert "partial" in str(unservable('{"schedule": {"kind": "partial"}}'))
    assert "tokens_per_step" in str(unservable('{"window": {"tokens_per_step": 1000}}'))
