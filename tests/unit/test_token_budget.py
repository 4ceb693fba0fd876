"""Steps that end at a budget of tokens: single views, and what is expected of unfinished groups."""

import pytest
from pydantic import ValidationError

from dora.config import Config
from dora.core.state import RunState
from dora.core.window import Blocked, Candidate, Window, pick_batch
from tests.unit.test_state import SIZE, admission, entry, finished, refer

WINDOW = Window(1, 4, 100)


def group(ordinal: int, tokens: int, version: int = 0) -> Candidate:
    return Candidate(version, ordinal, f"g{ordinal}", tokens)


def test_a_batch_ends_at_the_budget_and_at_most_at_the_step_size() -> None:
    pool = [group(3, 10), group(1, 60), group(2, 50), group(0, 30)]
    assert pick_batch(WINDOW, 0, pool, {0: 4}, 0) == (group(0, 30), group(1, 60), group(2, 50))
    small = [group(ordinal, 1) for ordinal in range(5)]
    assert pick_batch(WINDOW, 0, small, {0: 5}, 0) == tuple(small[:4])


def test_too_few_tokens_are_told() -> None:
    blocked = pick_batch(WINDOW, 0, [group(0, 99)], {0: 2}, 0)
    assert blocked == Blocked("1 of at most 4 groups finished, with 99 of 100 tokens", None)


def test_a_batch_goes_on_beyond_the_budget_where_older_groups_would_expire() -> None:
    pool = [group(0, 100), group(1, 100), group(2, 100, 1)]
    assert pick_batch(WINDOW, 1, pool, {0: 2, 1: 1}, 1) == (group(0, 100), group(1, 100))
    blocked = pick_batch(WINDOW, 1, pool[1:], {0: 2, 1: 1}, 1)
    assert isinstance(blocked, Blocked)
    assert blocked.version == 0


def test_a_batch_does_not_end_early_before_all_older_groups_are_known() -> None:
    blocked = pick_batch(WINDOW, 1, [group(0, 100)], {0: 1}, 0)
    assert isinstance(blocked, Blocked)
    assert "start a group under version 1" in blocked.reason
    wide = Window(2, 4, 100)
    full = [group(ordinal, 100, ordinal // 4) for ordinal in range(9)]
    taken = pick_batch(wide, 2, full, {0: 4, 1: 4, 2: 1}, 1)
    assert taken == tuple(full[:4]), "no further group can start"


def test_groups_start_as_far_as_their_expected_tokens_fit() -> None:
    assert WINDOW.capacity == 5
    assert WINDOW.admissible(0, 9) == 5, "nothing is known of lengths"
    assert WINDOW.admissible(2, 9, 150.0, 40.0) == 2
    assert WINDOW.admissible(2, 9, 200.0, 40.0) == 0
    assert WINDOW.admissible(2, 1, 99.0, 40.0) == 1, "the last step needs one budget only"


def test_one_group_may_always_start_under_a_new_version() -> None:
    assert WINDOW.admissible(4, 9, 400.0, 40.0, opened=False) == 1
    assert WINDOW.admissible(4, 1, 400.0, 40.0, opened=False) == 1
    assert WINDOW.admissible(5, 9, 400.0, 40.0, opened=False) == 0
    assert WINDOW.admissible(4, 0, 0.0, 40.0, opened=False) == 0


def test_a_budget_without_staleness_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        Window(0, 4, 100)
    with pytest.raises(ValueError, match="must be 1 or more"):
        Window(1, 4, 0)
    sections = {
        "run": {"name": "r"},
        "policy": {"model": "m"},
        "task": {"kind": "reasoning-gym", "name": "x"},
        "trainer": {"steps": 1},
        "window": {"max_staleness": 0, "tokens_per_step": 1000},
    }
    with pytest.raises(ValidationError, match=r"tokens_per_step needs window\.max_staleness"):
        Config.model_validate(sections)


def test_expected_tokens_are_those_known_and_the_mean_of_finished_ones_for_the_rest() -> None:
    state = RunState(Window(1, 2, 1000), SIZE)
    for ordinal in (0, 1, 2):
        state.admit(admission(ordinal))
    assert state.expected_tokens == 0
    state.finish(finished("g0", 0))
    assert state.expected_tokens == 5 + 5 * 5.0
    state.finish(finished("g0", 1, offset=1))
    assert state.expected_tokens == 11 + 4 * 5.5
    state.finish(finished("g1", 1, offset=2))
    mean = (5 + 6 + 6) / 3
    assert state.expected_tokens == pytest.approx(17 + 3 * mean)
    first = refer(state.groups["g0"])
    state.commit(entry(0, 0, (first,)))
    assert state.expected_tokens == pytest.approx(6 + 3 * mean), "the mean is the run's"
    state.commit(entry(1, 1, (), (refer(state.groups["g1"], "failed"),)))
    assert state.expected_tokens == pytest.approx(2 * mean)
    assert state.known_to == 0
    assert state.admissible(9) == 2
    state.admit(admission(3, 1))
    assert state.known_to == 1
