"""The window's two rules on single views, and against their definition."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.core.window import Blocked, Candidate, Window, pick_batch


def candidates(*versions: int) -> list[Candidate]:
    return [Candidate(version, at, f"g{at}") for at, version in enumerate(versions)]


def test_admission_fills_the_window_and_no_more() -> None:
    window = Window(2, 4)
    assert window.capacity == 12
    assert window.admits(11)
    assert not window.admits(12)


def test_zero_staleness_is_synchronous() -> None:
    window = Window(0, 3)
    assert not window.admits(3)
    assert window.limit(5, 5) == 0
    assert window.oldest_live(5) == 5


def test_limits_shrink_as_versions_age() -> None:
    window = Window(2, 4)
    assert [window.limit(version, 7) for version in (7, 6, 5, 4)] == [8, 4, 0, -4]
    assert window.oldest_live(7) == 5
    assert window.oldest_live(1) == 0


@pytest.mark.parametrize("shape", [(-1, 1), (0, 0), (1, -1)])
def test_impossible_windows_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Window(*shape)


def test_oldest_version_comes_first_then_the_lower_ordinal() -> None:
    pool = [Candidate(1, 9, "a"), Candidate(0, 7, "b"), Candidate(1, 8, "c"), Candidate(0, 3, "d")]
    batch = pick_batch(Window(2, 3), 1, pool, {0: 2, 1: 4})
    assert isinstance(batch, tuple)
    assert [candidate.group_id for candidate in batch] == ["d", "b", "c"]


def test_too_few_finished_groups_are_told() -> None:
    blocked = pick_batch(Window(1, 4), 0, candidates(0, 0), {0: 5})
    assert blocked == Blocked("2 of 4 groups finished", None)


def test_a_batch_that_would_strand_older_groups_waits_for_them() -> None:
    blocked = pick_batch(Window(1, 2), 1, candidates(1, 1), {0: 1, 1: 3})
    assert isinstance(blocked, Blocked)
    assert blocked.version == 0
    assert "1 groups outstanding, 0 fit" in blocked.reason


def test_groups_beyond_the_window_are_told_even_while_few_are_finished() -> None:
    blocked = pick_batch(Window(1, 2), 5, candidates(), {3: 1, 5: 1})
    assert isinstance(blocked, Blocked)
    assert blocked.version == 3
    assert "left the window" in blocked.reason


def test_a_candidate_from_the_future_is_refused() -> None:
    with pytest.raises(ValueError, match="newer than the newest version 0"):
        pick_batch(Window(1, 1), 0, candidates(1), {1: 1})


def test_a_candidate_that_is_not_outstanding_is_refused() -> None:
    with pytest.raises(ValueError, match="only 1 are outstanding"):
        pick_batch(Window(1, 2), 0, candidates(0, 0), {0: 1})


@st.composite
def views(draw: st.DrawFn) -> tuple[Window, int, list[Candidate], dict[int, int]]:
    """Any view, reachable or not: versions in the window, finished ones among the outstanding."""
    window = Window(draw(st.integers(0, 3)), draw(st.integers(1, 4)))
    newest = draw(st.integers(0, 6))
    pool, outstanding = [], {}
    for version in range(window.oldest_live(newest), newest + 1):
        outstanding[version] = draw(st.integers(0, 8))
        finished = draw(st.integers(0, outstanding[version]))
        pool += [(version, at) for at in range(finished)]
    order = draw(st.permutations(range(len(pool))))
    listed = [Candidate(pool[at][0], at, f"g{at}") for at in order]
    return window, newest, listed, outstanding


@given(views())
def test_a_batch_is_given_exactly_when_the_definition_allows_one(
    view: tuple[Window, int, list[Candidate], dict[int, int]],
) -> None:
    window, newest, pool, outstanding = view
    size, staleness = window.groups_per_step, window.max_staleness
    oldest_first = sorted(pool, key=lambda each: (each.version, each.ordinal))[:size]
    taken = Counter(each.version for each in oldest_first)
    allowed = len(pool) >= size and all(
        sum(count - taken[v] for v, count in outstanding.items() if v <= j)
        <= (j + staleness - newest) * size
        for j in range(window.oldest_live(newest), newest + 1)
    )
    batch = pick_batch(window, newest, pool, outstanding)
    assert isinstance(batch, tuple) == allowed
    if isinstance(batch, tuple):
        assert batch == tuple(oldest_first)
    else:
        assert batch.reason


@given(views())
def test_no_other_batch_is_allowed_where_the_oldest_is_not(
    view: tuple[Window, int, list[Candidate], dict[int, int]],
) -> None:
    window, newest, pool, outstanding = view
    size = window.groups_per_step
    batch = pick_batch(window, newest, pool, outstanding)
    if isinstance(batch, tuple) or len(pool) < size:
        return
    newest_first = sorted(pool, key=lambda each: (-each.version, each.ordinal))[:size]
    taken = Counter(each.version for each in newest_first)
    assert any(
        sum(count - taken[v] for v, count in outstanding.items() if v <= j)
        > window.limit(j, newest)
        for j in range(newest + 1)
    )


def test_groups_start_as_far_as_the_window_admits_and_the_run_will_train() -> None:
    window = Window(1, 4)
    assert [window.admissible(n, 10) for n in (0, 7, 8, 9)] == [8, 1, 0, 0]
    assert [window.admissible(n, 1) for n in (0, 3, 4)] == [4, 1, 0]
    assert window.admissible(0, 0) == 0
    for outstanding in range(12):
        count = window.admissible(outstanding, 10)
        assert all(window.admits(outstanding + more) for more in range(count))
        assert not window.admits(outstanding + count)
