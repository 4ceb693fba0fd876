"""The window's exhaustive search once more: with a budget of tokens, and with streamed steps.

A budget may be reached after any number of groups, so each step may end after any: every group
has one token, and the budget is any number up to `B`. A step that is told of all older groups is
modelled by what that means: no such admission is on its way, and the coordinator knows the newest
version.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest

from dora.core.streaming import may_take, next_group
from dora.core.window import Blocked, Candidate, Window, pick_batch, too_many_left
from tests.unit.test_window_state_space import (
    NEWEST,
    Counts,
    Expired,
    Model,
    State,
    change,
    minus,
    older,
)


def candidates(counts: Counts) -> list[Candidate]:
    return [
        Candidate(NEWEST - age, 1000 * (NEWEST - age) + index, f"{age}-{index}", 1)
        for age, count in enumerate(counts)
        for index in range(count)
    ]


def by_version(counts: Counts) -> dict[int, int]:
    return {NEWEST - age: count for age, count in enumerate(counts)}


def by_age(batch: tuple[Candidate, ...], length: int) -> Counts:
    ages = [NEWEST - candidate.version for candidate in batch]
    return tuple(ages.count(age) for age in range(length))


@cache
def pick(window: Window, finished: Counts, outstanding: Counts, sure: bool) -> Counts | None:
    known_to = NEWEST if sure else NEWEST - 1
    batch = pick_batch(window, NEWEST, candidates(finished), by_version(outstanding), known_to)
    if isinstance(batch, Blocked):
        return None
    assert sure or len(batch) == window.groups_per_step
    return by_age(batch, len(finished))


def seen_by_trainer(state: State) -> Counts:
    return tuple(a + b for a, b in zip(state.running, state.finished, strict=True))


def opened_or_not(state: State) -> tuple[bool, ...]:
    """Whether a group has started under the newest version: certain if one is outstanding."""
    return (True,) if state.by_age[0] else (False, True)


def more(window: Window, state: State, opened: bool) -> bool:
    """Whether the coordinator starts a group, in the last step or before."""
    count = state.outstanding
    return all(
        window.admissible(count, steps_left, count, 1.0, opened=opened) for steps_left in (1, 9)
    )


def older_are_known(state: State) -> bool:
    return not any(state.hidden[1:]) and not any(versions for versions, _ in state.unseen)


def ages_left(model: Model, state: State) -> Counts:
    """What is outstanding after the batch in training is committed, by age then."""
    return (state if state.batch is None else model.commit(state)).by_age


@dataclass(frozen=True)
class Budgets(Model):
    """Steps that end at any budget from one group to `B`."""

    @property
    def windows(self) -> list[Window]:
        size, staleness = self.window.groups_per_step, self.window.max_staleness
        return [Window(staleness, size, budget) for budget in range(1, size + 1)]

    def batches(self, state: State) -> set[Counts]:
        sure = older_are_known(state)
        found = (
            pick(window, state.finished, seen_by_trainer(state), sure) for window in self.windows
        )
        return {batch for batch in found if batch is not None}

    def successors(self, state: State) -> Iterator[State]:
        if state.batch is None:
            for batch in self.batches(state):
                yield replace(state, batch=batch, aside=state.failed)
            if sum(state.failed):
                yield self.commit(replace(state, aside=state.failed))
        yield from super().successors(state)

    def plan(self, state: State) -> Counts | None:
        return None  # `batches` are many

    def stuck(self, state: State) -> Window | None:
        """A budget under which neither a batch nor an admission comes about, in a quiet state."""
        for window in self.windows:
            for opened in opened_or_not(state):
                batch = pick(window, state.finished, seen_by_trainer(state), opened)
                if batch is None and not more(window, state, opened):
                    return window
        return None


@cache
def all_are_trained(window: Window, counts: Counts) -> None:
    """From these groups, all finished, the steps to come train every one within K, whatever else
    starts, and however early they end."""
    ours, new = list(counts), [0] * len(counts)
    for _ in range(window.max_staleness + 1):
        new[0] += max(0, window.capacity - sum(ours) - sum(new))
        total = tuple(a + b for a, b in zip(ours, new, strict=True))
        batch = pick(window, total, total, True)
        assert batch is not None, f"jammed with {total}"
        for age, count in enumerate(batch):
            from_ours = min(count, ours[age])
            ours[age] -= from_ours
            new[age] -= count - from_ours
        ours, new = list(older(tuple(ours))), list(older(tuple(new)))
    assert sum(ours) == 0, f"{counts} leaves {ours}"


@pytest.mark.parametrize(
    ("staleness", "groups", "failing"), [(1, 1, False), (1, 2, True), (1, 3, False), (2, 2, False)]
)
def test_steps_that_end_early_neither_jam_nor_let_a_group_expire(
    staleness: int, groups: int, failing: bool
) -> None:
    window = Window(staleness, groups, 1)
    model = Budgets(window, failing=failing, stale=True)
    sizes = set()
    for state in model.reachable():
        assert state.outstanding <= window.capacity
        left = ages_left(model, state)
        for each in model.windows:
            all_are_trained(each, left)
        if model.quiet(state) and not sum(state.failed):
            assert model.stuck(state) is None, state
        if state.batch is not None:
            sizes.add(sum(state.batch))
    assert sizes == set(range(1, groups + 1))


def test_a_step_that_ends_early_without_knowing_older_groups_would_let_some_expire() -> None:
    @dataclass(frozen=True)
    class Rash(Budgets):
        def batches(self, state: State) -> set[Counts]:
            found = (pick(w, state.finished, seen_by_trainer(state), True) for w in self.windows)
            return {batch for batch in found if batch is not None}

    model = Rash(Window(1, 2, 1), stale=True)
    with pytest.raises(Expired):
        deque(model.reachable(), maxlen=0)


@dataclass(frozen=True, slots=True)
class Streaming(State):
    taken: Counts = ()  # by the step that is going on; still part of `finished`


@cache
def may_follow(window: Window, taken: Counts, outstanding: Counts, age: int) -> bool:
    counts = by_version(taken)
    return may_take(window, NEWEST, by_version(outstanding), counts, NEWEST - age) is None


@cache
def follow(window: Window, taken: Counts, finished: Counts, outstanding: Counts, sure: bool) -> int:
    """Age of the group to take next, -1 if the step is complete, -2 if it has to wait."""
    known_to = NEWEST if sure else NEWEST - 1
    following = next_group(
        window,
        NEWEST,
        candidates(taken),
        candidates(finished),
        by_version(outstanding),
        known_to,
    )
    if following is None:
        left = too_many_left(window, NEWEST, by_version(outstanding), candidates(taken))
        assert left is None
        return -1
    return -2 if isinstance(following, Blocked) else NEWEST - following.version


@dataclass(frozen=True)
class Streamed(Model):
    """Steps that take group by group, any that may be taken; with `budget` they may end early."""

    budget: bool = False

    def start(self) -> State:
        first = super().start()
        fields = {name: getattr(first, name) for name in State.__dataclass_fields__}
        return Streaming(**fields, taken=first.running)

    @property
    def windows(self) -> list[Window]:
        if not self.budget:
            return [self.window]
        size = self.window.groups_per_step
        return [Window(self.window.max_staleness, size, budget) for budget in range(1, size + 1)]

    def plan(self, state: State) -> Counts | None:
        return None

    def commit(self, state: State) -> State:
        assert isinstance(state, Streaming)
        after = super().commit(state)
        if state.batch is None:
            return after
        return replace(after, taken=(0,) * len(state.finished))

    def successors(self, state: State) -> Iterator[State]:
        assert isinstance(state, Streaming)
        sure = older_are_known(state)
        outstanding = seen_by_trainer(state)
        none = (0,) * len(state.finished)
        if state.batch is None:
            for window in self.windows:
                age = follow(window, state.taken, state.finished, outstanding, sure)
                if age == -1:
                    yield replace(state, batch=state.taken, aside=state.failed, taken=none)
                elif age >= 0:
                    yield replace(state, taken=change(state.taken, age, 1))
            if sum(state.taken) < self.window.groups_per_step:
                for age, count in enumerate(minus(state.finished, state.taken)):
                    if count and may_follow(self.window, state.taken, outstanding, age):
                        yield replace(state, taken=change(state.taken, age, 1))
            if sum(state.failed):
                yield self.commit(replace(state, aside=state.failed))
            if sum(state.taken):
                yield replace(state, taken=none)  # the trainer crashed
        yield from super().successors(state)


STREAMED = [
    (Window(0, 3), False),
    (Window(1, 2), False),
    (Window(2, 2), False),
    (Window(1, 2), True),
    (Window(1, 2, 1), True),
    (Window(2, 2, 1), False),
]


@pytest.mark.parametrize(("window", "failing"), STREAMED)
def test_every_order_of_taking_groups_ends_in_an_allowed_batch(
    window: Window, failing: bool
) -> None:
    budget = window.tokens_per_step is not None
    model = Streamed(window, failing=failing, stale=True, budget=budget)
    for state in model.reachable():
        assert isinstance(state, Streaming)
        assert state.outstanding <= window.capacity
        left = ages_left(model, state)
        for each in model.windows:
            all_are_trained(each, left)
        if not model.quiet(state) or sum(state.failed):
            continue
        for each in model.windows:
            for opened in opened_or_not(state):
                age = follow(each, state.taken, state.finished, seen_by_trainer(state), opened)
                assert age > -2 or more(each, state, opened), state


def test_without_staleness_every_finished_group_may_be_taken_at_once() -> None:
    window = Window(0, 3)
    assert follow(window, (0,), (1,), (3,), True) == 0
    assert follow(window, (1,), (2,), (3,), True) == 0
    assert follow(window, (2,), (2,), (3,), True) == -2
    assert follow(window, (3,), (3,), (3,), True) == -1


def test_a_newer_group_waits_where_an_older_one_would_expire() -> None:
    window = Window(1, 2)
    outstanding = {NEWEST - 1: 2, NEWEST: 2}
    newer = [Candidate(NEWEST, 5, "new")]
    blocked = next_group(window, NEWEST, [], newer, outstanding)
    assert isinstance(blocked, Blocked)
    assert blocked.version == NEWEST - 1
    outstanding[NEWEST - 1] = 1
    assert next_group(window, NEWEST, [], newer, outstanding) == newer[0]
    again = next_group(window, NEWEST, newer, [*newer, Candidate(NEWEST, 6, "x")], outstanding)
    assert isinstance(again, Blocked)


def test_from_the_budget_on_only_groups_are_taken_that_the_rule_asks_for() -> None:
    window = Window(1, 4, 10)
    old, new = Candidate(NEWEST - 1, 1, "old", 3), Candidate(NEWEST, 2, "new", 12)
    third = Candidate(NEWEST, 3, "third", 2)
    outstanding = {NEWEST - 1: 1, NEWEST: 2}
    waiting = next_group(window, NEWEST, [new], [new, third], outstanding, NEWEST)
    assert isinstance(waiting, Blocked)
    assert waiting.version == NEWEST - 1
    assert next_group(window, NEWEST, [new], [new, third, old], outstanding, NEWEST) == old
    assert next_group(window, NEWEST, [new, old], [new, third, old], outstanding, NEWEST) is None
    unsure = next_group(window, NEWEST, [new, old], [new, old], outstanding, NEWEST - 1)
    assert isinstance(unsure, Blocked)
    assert "waiting for the coordinator" in unsure.reason
