"""Exhaustive search of a window whose older versions are filled, with stale views on both sides.

Like `test_window_state_space`, but the journal's versions may decrease, so what the trainer has not
seen of it is kept in order; and the coordinator's view of each version counts.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest

from dora.core.filling import fillable
from dora.core.window import Blocked, Candidate, Window, pick_batch

NEWEST = 100
Counts = tuple[int, ...]  # by age, 0 .. K


@dataclass(frozen=True, slots=True)
class State:
    running: Counts
    finished: Counts
    hidden: tuple[int, ...]  # ages of what the trainer has not seen, in the journal's order
    batch: Counts | None
    unseen: tuple[Counts, ...]  # batches that the coordinator has not seen, by age now, 0 .. 2K


def change(counts: Counts, age: int, by: int) -> Counts:
    return (*counts[:age], counts[age] + by, *counts[age + 1 :])


@cache
def plan(window: Window, finished: Counts, outstanding: Counts) -> Counts | None:
    candidates = [
        Candidate(NEWEST - age, 1000 * (NEWEST - age) + index, f"{age}-{index}")
        for age, count in enumerate(finished)
        for index in range(count)
    ]
    counts = {NEWEST - age: count for age, count in enumerate(outstanding)}
    batch = pick_batch(window, NEWEST, candidates, counts)
    if isinstance(batch, Blocked):
        assert "left the window" not in batch.reason
        return None
    ages = [NEWEST - candidate.version for candidate in batch]
    return tuple(ages.count(age) for age in range(len(finished)))


@dataclass(frozen=True)
class Model:
    window: Window
    careless: bool = False  # the coordinator believes that it sees everything

    @property
    def ages(self) -> int:
        return self.window.max_staleness + 1

    def view(self, state: State) -> tuple[int, dict[int, int]]:
        """Newest version and outstanding groups by version as the coordinator sees them."""
        counts: dict[int, int] = {}
        rows = [*enumerate(state.running), *enumerate(state.finished)]
        rows += [(age, 1) for age in state.hidden]
        rows += [(age, count) for batch in state.unseen for age, count in enumerate(batch)]
        for age, count in rows:
            counts[NEWEST - age] = counts.get(NEWEST - age, 0) + count
        return NEWEST - len(state.unseen), counts

    def admissions(self, state: State) -> Iterator[State]:
        newest, counts = self.view(state)
        ages = []
        if self.window.admits(sum(counts.values())):
            ages.append(NEWEST - newest)
        for version in range(max(0, newest - self.window.max_staleness), newest):
            if self.careless:
                left = sum(count for each, count in counts.items() if each <= version)
                allowed = left < self.window.limit(version, newest) + self.window.groups_per_step
                allowed = allowed and self.window.admits(sum(counts.values()))
            else:
                allowed = fillable(self.window, newest, counts, version, 1) > 0
            if allowed:
                ages.append(NEWEST - version)
        for age in ages:
            assert age < self.ages, "admitted under a version that has expired"
            yield replace(state, hidden=(*state.hidden, age))

    def commit(self, state: State) -> State:
        assert state.batch is not None
        finished = tuple(a - b for a, b in zip(state.finished, state.batch, strict=True))
        assert not finished[-1] and not state.running[-1], "a group expires"
        assert self.ages - 1 not in state.hidden, "a group expires unseen"
        older = (0, *state.batch, *(0,) * self.ages)[: 2 * self.ages]
        return State(
            (0, *state.running[:-1]),
            (0, *finished[:-1]),
            tuple(age + 1 for age in state.hidden),
            None,
            (*(((0, *batch))[: 2 * self.ages] for batch in state.unseen), older),
        )

    def successors(self, state: State) -> Iterator[State]:
        yield from self.admissions(state)
        if state.unseen:
            yield replace(state, unseen=state.unseen[1:])
        if state.hidden:
            age, *rest = state.hidden
            yield replace(state, hidden=tuple(rest), running=change(state.running, age, 1))
        for age in range(self.ages):
            if state.running[age]:
                yield replace(
                    state,
                    running=change(state.running, age, -1),
                    finished=change(state.finished, age, 1),
                )
        if state.batch is not None:
            yield self.commit(state)
            return
        batch = self.plan(state)
        if batch is not None:
            yield replace(state, batch=batch)

    def plan(self, state: State) -> Counts | None:
        seen = tuple(a + b for a, b in zip(state.running, state.finished, strict=True))
        return plan(self.window, state.finished, seen)

    def jammed(self, state: State) -> bool:
        quiet = not (state.batch or state.unseen or state.hidden or sum(state.running))
        return quiet and self.plan(state) is None and not list(self.admissions(state))

    def reachable(self) -> Iterator[State]:
        none = (0,) * self.ages
        first = State(none, none, (), None, ())
        known, queue = {first}, deque([first])
        while queue:
            state = queue.popleft()
            yield state
            for following in self.successors(state):
                if following not in known:
                    known.add(following)
                    queue.append(following)


@pytest.mark.parametrize(("staleness", "groups"), [(0, 2), (1, 1), (1, 3), (2, 1), (2, 2), (3, 1)])
def test_filled_versions_neither_jam_nor_expire_whatever_is_seen_late(
    staleness: int, groups: int
) -> None:
    model = Model(Window(staleness, groups))
    count = 0
    for state in model.reachable():
        count += 1
        assert not model.jammed(state), state
    assert count > groups


def test_older_versions_are_filled_at_all() -> None:
    assert fillable(Window(3, 4), 10, {10: 4}, 9, 5) == 5
    assert fillable(Window(3, 4), 10, {10: 4, 9: 4, 8: 4, 7: 4}, 9, 5) == 0
    assert fillable(Window(3, 4, 100), 10, {10: 4}, 9, 5) == 0, "steps may be shorter"


def test_a_coordinator_that_trusts_its_view_lets_groups_expire() -> None:
    with pytest.raises(AssertionError, match=r"expire|left the window"):
        deque(Model(Window(2, 1), careless=True).reachable(), maxlen=0)
