"""Exhaustive search of everything that coordinator, workers and trainer can do to the window.

A state holds the outstanding groups by age (newest version minus theirs), what the trainer has seen
of the journal, the batch in training and the ledger entries that the coordinator has not seen.
All decisions are those of `core.window`. Ages instead of versions make the space finite: the rules
use differences only. A group is finished only once the trainer has seen its admission: finishing it
earlier and showing it later leads to the same decisions.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest

from dora.core.window import Blocked, Candidate, Window, pick_batch

NEWEST = 100
Counts = tuple[int, ...]  # by age, 0 .. K


@dataclass(frozen=True, slots=True)
class State:
    running: Counts
    finished: Counts
    failed: Counts
    hidden: Counts  # admitted, not yet seen by the trainer
    batch: Counts | None  # in training; still part of `finished`
    aside: Counts  # set aside by the entry in preparation; still part of `failed`
    unseen: tuple[tuple[int, int], ...]  # (versions, groups removed) the coordinator has to see

    @property
    def by_age(self) -> Counts:
        rows = zip(self.running, self.finished, self.failed, self.hidden, strict=True)
        return tuple(map(sum, rows))

    @property
    def outstanding(self) -> int:
        return sum(self.by_age)


class Expired(AssertionError):
    """A group was left outstanding that no step may train any more."""


def change(counts: Counts, age: int, by: int) -> Counts:
    return (*counts[:age], counts[age] + by, *counts[age + 1 :])


def minus(counts: Counts, other: Counts) -> Counts:
    return tuple(a - b for a, b in zip(counts, other, strict=True))


def older(counts: Counts) -> Counts:
    """The same groups after one more version."""
    if counts[-1]:
        raise Expired(f"{counts[-1]} groups are too old to be trained")
    return (0, *counts[:-1])


@cache
def plan(window: Window, finished: Counts, outstanding: Counts) -> Counts | None:
    """The batch by age as the real rule picks it, or None when it is blocked."""
    candidates = [
        Candidate(NEWEST - age, 1000 * (NEWEST - age) + index, f"{age}-{index}")
        for age, count in enumerate(finished)
        for index in range(count)
    ]
    batch = pick_batch(
        window, NEWEST, candidates, {NEWEST - age: count for age, count in enumerate(outstanding)}
    )
    if isinstance(batch, Blocked):
        return None
    ages = [NEWEST - candidate.version for candidate in batch]
    assert len(set(batch)) == window.groups_per_step
    assert max(ages) <= window.max_staleness
    return tuple(ages.count(age) for age in range(len(finished)))


@dataclass(frozen=True)
class Model:
    window: Window
    failing: bool = False  # groups may fail and be set aside
    stale: bool = False  # coordinator and trainer act on old views
    naive: bool = False  # a batch in training stops counting when it is picked

    def start(self) -> State:
        none = (0,) * (self.window.max_staleness + 1)
        return State(none, none, none, none, None, none, ())

    def plan(self, state: State) -> Counts | None:
        seen = tuple(a + b for a, b in zip(state.running, state.finished, strict=True))
        return plan(self.window, state.finished, seen)

    def in_coordinators_view(self, state: State) -> int:
        count = state.outstanding + sum(removed for _, removed in state.unseen)
        if self.naive and state.batch is not None:
            count -= self.window.groups_per_step
        return count

    def commit(self, state: State) -> State:
        trained = state.batch or (0,) * len(state.finished)
        removed = sum(trained) + sum(state.aside)
        state = replace(
            state,
            finished=minus(state.finished, trained),
            failed=minus(state.failed, state.aside),
            batch=None,
            aside=(0,) * len(state.finished),
            unseen=(*state.unseen, (1 if state.batch else 0, removed)) if self.stale else (),
        )
        if not sum(trained):
            return state
        return replace(
            state,
            running=older(state.running),
            finished=older(state.finished),
            failed=older(state.failed),
            hidden=older(state.hidden),
        )

    def successors(self, state: State) -> Iterator[State]:
        ages = range(self.window.max_staleness + 1)
        if self.window.admits(self.in_coordinators_view(state)):
            age = sum(versions for versions, _ in state.unseen)
            assert age <= self.window.max_staleness, "admitted under a version that has expired"
            if self.stale:
                yield replace(state, hidden=change(state.hidden, age, 1))
            else:
                yield replace(state, running=change(state.running, age, 1))
        if state.unseen:
            yield replace(state, unseen=state.unseen[1:])
        hidden = [age for age in ages if state.hidden[age]]
        if hidden:  # the journal is seen in its order: oldest version first
            age = hidden[-1]
            yield replace(
                state,
                hidden=change(state.hidden, age, -1),
                running=change(state.running, age, 1),
            )
        for age in ages:
            if state.running[age]:
                running = change(state.running, age, -1)
                yield replace(state, running=running, finished=change(state.finished, age, 1))
                if self.failing:
                    yield replace(state, running=running, failed=change(state.failed, age, 1))
        if state.batch is not None:
            yield self.commit(state)
            yield replace(state, batch=None, aside=(0,) * len(ages))  # the trainer crashed
            return
        batch = self.plan(state)
        if batch is not None:
            yield replace(state, batch=batch, aside=state.failed)
        elif sum(state.failed):
            yield self.commit(replace(state, aside=state.failed))

    def quiet(self, state: State) -> bool:
        """Whether only the trainer or the coordinator could do something: all else has happened."""
        return not (state.batch or state.unseen or sum(state.hidden) or sum(state.running))

    def jammed(self, state: State) -> bool:
        return (
            self.quiet(state)
            and not sum(state.failed)
            and self.plan(state) is None
            and not self.window.admits(self.in_coordinators_view(state))
        )

    def reachable(self) -> Iterator[State]:
        first = self.start()
        known, queue = {first}, deque([first])
        while queue:
            state = queue.popleft()
            yield state
            for following in self.successors(state):
                if following not in known:
                    known.add(following)
                    queue.append(following)


@cache
def assert_all_are_trained(window: Window, by_age: Counts) -> None:
    """From these groups, all finished and seen, the steps to come train every one within K."""
    ours, new = list(by_age), [0] * len(by_age)
    for _ in range(window.max_staleness + 1):
        while window.admits(sum(ours) + sum(new)):
            new[0] += 1
        total = tuple(a + b for a, b in zip(ours, new, strict=True))
        batch = plan(window, total, total)
        assert batch is not None, f"jammed with {total}"
        for age, count in enumerate(batch):  # ours were admitted first
            from_ours = min(count, ours[age])
            ours[age] -= from_ours
            new[age] -= count - from_ours
        ours, new = list(older(tuple(ours))), list(older(tuple(new)))
    assert sum(ours) == 0, f"{by_age} leaves {ours}"


def check(model: Model) -> int:
    count = 0
    for state in model.reachable():
        count += 1
        assert not model.jammed(state), state
        assert state.outstanding <= model.window.capacity
        committed = state if state.batch is None else model.commit(state)
        assert_all_are_trained(model.window, committed.by_age)
    return count


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_the_rules_neither_jam_nor_let_a_group_expire(staleness: int, groups: int) -> None:
    assert check(Model(Window(staleness, groups))) > groups


@pytest.mark.parametrize(("staleness", "groups"), [(0, 3), (1, 1), (1, 3), (2, 1), (2, 2)])
def test_groups_set_aside_neither_jam_nor_break_the_bound(staleness: int, groups: int) -> None:
    assert check(Model(Window(staleness, groups), failing=True)) > groups


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_stale_views_of_journal_and_ledger_are_safe(staleness: int, groups: int) -> None:
    assert check(Model(Window(staleness, groups), stale=True)) > groups


@pytest.mark.parametrize(("staleness", "groups"), [(0, 3), (1, 1), (1, 3), (2, 1), (2, 2)])
def test_stale_views_with_groups_set_aside_are_safe(staleness: int, groups: int) -> None:
    assert check(Model(Window(staleness, groups), failing=True, stale=True)) > groups


def test_the_window_jams_when_a_batch_stops_counting_before_its_commit() -> None:
    model = Model(Window(1, 2), naive=True)
    assert any(model.jammed(state) for state in model.reachable())


def test_synchronous_training_expires_groups_when_a_batch_stops_counting_early() -> None:
    with pytest.raises(Expired):
        deque(Model(Window(0, 2), naive=True).reachable(), maxlen=0)


def test_without_the_look_ahead_a_batch_would_let_groups_expire() -> None:
    window = Window(1, 2)
    outstanding = {99: 2, 100: 2}
    newer = [Candidate(100, ordinal, f"g{ordinal}") for ordinal in (10, 11)]
    blocked = pick_batch(window, 100, newer, outstanding)
    assert isinstance(blocked, Blocked)
    assert blocked.version == 99
    older_first = [Candidate(99, ordinal, f"g{ordinal}") for ordinal in (1, 2)]
    assert pick_batch(window, 100, newer + older_first, outstanding) == tuple(older_first)
