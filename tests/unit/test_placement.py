"""Placement: who generates what, under which version."""

from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from dora.core.scheduling.pending import PendingAttempt, PendingQueue
from dora.core.scheduling.placement import (
    Assignment,
    PlacementPlan,
    Situation,
    assign,
    due_evaluations,
)
from dora.core.scheduling.pool import Pool, WorkerView

FEW = settings(max_examples=60, deadline=None)


def work(version: int, ordinal: int = 0, sample: int = 0, attempt: int = 1) -> PendingAttempt:
    return PendingAttempt(f"g{ordinal}", sample, version, ordinal, "train", attempt)


def pool_of(workers: list[WorkerView], *, follows: bool = False) -> Pool:
    pool = Pool()
    pool.follows = follows
    pool.turn_to(5)
    for worker in workers:
        pool.put(worker)
    return pool


def waiting_of(pending: list[PendingAttempt]) -> PendingQueue:
    waiting = PendingQueue()
    for each in pending:
        waiting[f"{each.group_id}/{each.sample}"] = each
    return waiting


def assigned(
    workers: list[WorkerView],
    pending: list[PendingAttempt] = [],  # noqa: B006
    *,
    admissible: int = 0,
    group_size: int = 2,
    older: Mapping[int, int] | None = None,
    **flags: bool,
) -> Assignment:
    situation = Situation(5, admissible, 100, group_size, older or {}, **flags)
    pool = pool_of(workers, follows=situation.roams or situation.many)
    return assign(pool, waiting_of(pending), situation)


def make(
    workers: list[WorkerView],
    pending: Sequence[PendingAttempt] = (),
    **given: int,
) -> PlacementPlan:
    return assigned(workers, list(pending), **given).plan  # type: ignore[arg-type]


def test_new_groups_go_whole_to_the_least_loaded_worker_of_the_newest_version() -> None:
    made = make([WorkerView("a", 5, 8, 4), WorkerView("b", 5, 8, 1)], admissible=2)
    assert [a.ordinal for a in made.admissions] == [100, 101]
    assert [s.worker for s in made.starts] == ["b", "b", "b", "b"]
    assert {s.work.version for s in made.starts} == {5}


def test_a_group_that_fits_nowhere_whole_uses_the_slots_there_are() -> None:
    made = make([WorkerView("a", 5, 8, 7), WorkerView("b", 5, 8, 7)], admissible=5, group_size=4)
    assert [a.ordinal for a in made.admissions] == [100]
    assert [(s.worker, s.work.sample) for s in made.starts] == [("a", 0), ("b", 1)]


def test_no_group_starts_under_an_old_version() -> None:
    made = make([WorkerView("a", 4, 8, 1)], admissible=5)
    assert not made.admissions


def test_an_idle_worker_of_an_old_version_moves_to_the_newest() -> None:
    made = make([WorkerView("a", 3, 8, 0), WorkerView("b", 4, 8, 1)])
    assert [(s.worker, s.version) for s in made.switches] == [("a", 5)]


def test_a_worker_that_holds_work_never_switches() -> None:
    made = make([WorkerView("a", 3, 8, 1)], [work(4)])
    assert not made.switches


def test_unplaced_work_goes_to_a_worker_of_its_version_before_new_groups() -> None:
    made = make([WorkerView("a", 5, 3, 0)], [work(5, 7)], admissible=1)
    assert [s.work.ordinal for s in made.starts] == [7, 100, 100]


def test_new_groups_wait_while_older_work_of_the_newest_version_finds_no_room() -> None:
    made = make([WorkerView("a", 5, 2, 2)], [work(5, 7)], admissible=1)
    assert not made.admissions


def test_a_version_without_a_worker_gets_an_idle_one_the_oldest_version_first() -> None:
    made = assigned([WorkerView("a", 5, 8, 0)], [work(4, 9), work(3, 8)])
    assert [(s.worker, s.version) for s in made.plan.switches] == [("a", 3)]
    assert made.homeless == [4]


def test_a_busy_worker_is_kept_free_of_new_groups_for_a_version_without_a_worker() -> None:
    workers = [WorkerView("a", 5, 8, 1), WorkerView("b", 5, 8, 2)]
    made = make(workers, [work(3, 8)], admissible=1)
    assert {s.worker for s in made.starts} == {"b"}


def test_a_switch_under_way_counts_as_a_host() -> None:
    made = make([WorkerView("a", 5, 8, 0, switching_to=3), WorkerView("b", 5, 8, 0)], [work(3, 8)])
    assert not made.switches


def test_an_idle_worker_helps_a_version_of_which_much_waits() -> None:
    workers = [WorkerView("a", 4, 4, 4), WorkerView("b", 3, 4, 0)]
    waiting = [work(4, 9, sample) for sample in range(3)]
    assert [(s.worker, s.version) for s in make(workers, waiting).switches] == [("b", 4)]
    assert [(s.worker, s.version) for s in make(workers, waiting[:1]).switches] == [("b", 5)], (
        "one waits for a slot: not worth a load"
    )


def test_a_leaving_worker_gets_nothing_and_goes_to_the_newest_version_once_it_is_empty() -> None:
    other = WorkerView("b", 4, 8, 7)
    busy = make([WorkerView("a", 4, 8, 2, leaving=True), other], [work(4, 1), work(4, 2)])
    assert [s.worker for s in busy.starts] == ["b"]
    assert not busy.switches
    empty = make([WorkerView("a", 4, 8, 0, leaving=True), other])
    assert [(s.worker, s.version) for s in empty.switches] == [("a", 5)]


def test_a_leaving_worker_stays_if_it_is_the_last_of_its_version() -> None:
    made = make([WorkerView("a", 4, 8, 0, leaving=True)], [work(4, 1)])
    assert [s.worker for s in made.starts] == ["a"]
    assert not made.switches


def test_a_worker_emptied_for_an_older_version_loads_it_although_its_own_work_waits() -> None:
    made = make([WorkerView("a", 5, 8, 0, leaving=True)], [work(3, 1), work(5, 2)])
    assert [(s.worker, s.version) for s in made.switches] == [("a", 3)]
    assert not made.starts


def test_a_worker_whose_memory_runs_high_gets_nothing_new() -> None:
    workers = [WorkerView("a", 5, 8, 1, pressed=True), WorkerView("b", 5, 8, 4)]
    assert {s.worker for s in make(workers, admissible=1).starts} == {"b"}


def test_a_faster_worker_gets_more() -> None:
    workers = [WorkerView("a", 5, 12, 0, speed=2.0), WorkerView("b", 5, 12, 0)]
    made = make(workers, admissible=9, group_size=1)
    assert sorted(s.worker for s in made.starts) == ["a"] * 6 + ["b"] * 3


def test_workers_that_host_many_versions_load_the_newest_while_they_work() -> None:
    workers = [WorkerView("a", 4, 8, 3, versions=(3, 4)), WorkerView("b", 5, 8, 3, versions=(5,))]
    made = assigned(workers, [work(3, 1), work(5, 2)], many=True).plan
    assert [(s.worker, s.version) for s in made.switches] == [("a", 5)]
    assert [(s.worker, s.work.version) for s in made.starts] == [("a", 3), ("b", 5)]


def test_a_version_that_no_worker_of_many_hosts_is_loaded_where_there_is_room() -> None:
    full = WorkerView("a", 5, 8, 0, versions=(4, 5), adapters=2)
    roomy = WorkerView("b", 5, 8, 3, versions=(5,), adapters=2)
    made = assigned([full, roomy], [work(3, 1)], many=True)
    assert [(s.worker, s.version) for s in made.plan.switches] == [("b", 3)]
    assert assigned([full], [work(3, 1)], many=True).homeless == [3]


def test_partial_rollouts_start_wherever_the_newest_version_is_and_every_worker_loads_it() -> None:
    workers = [WorkerView("a", 4, 8, 3), WorkerView("b", 5, 8, 3)]
    made = assigned(workers, [work(3, 1)], admissible=1, roams=True).plan
    assert [(s.worker, s.version) for s in made.switches] == [("a", 5)]
    assert {s.worker for s in made.starts} == {"b"}
    assert [s.work.version for s in made.starts] == [3, 5, 5]


def test_a_whole_batch_is_admitted_although_there_is_no_room_for_all() -> None:
    made = assigned([WorkerView("a", 5, 3, 0)], admissible=4, whole=True).plan
    assert [a.ordinal for a in made.admissions] == [100, 101, 102, 103]
    assert len(made.starts) == 3


def test_an_older_version_is_filled_first_and_the_newest_gets_the_rest() -> None:
    workers = [WorkerView("a", 4, 6, 2), WorkerView("b", 5, 4, 0)]
    made = assigned(workers, admissible=9, older={4: 1}).plan
    assert [(a.ordinal, a.version) for a in made.admissions] == [(100, 4), (101, 5), (102, 5)]
    assert not assigned(workers[:1], admissible=0, older={4: 3}).plan.admissions


workers_strategy = st.lists(
    st.builds(
        lambda version, capacity, load, switching, leaving, pressed: (
            version,
            capacity,
            min(load, capacity),
            switching,
            (),
            leaving,
            pressed,
        ),
        st.integers(2, 5),
        st.integers(1, 8),
        st.integers(0, 8),
        st.none() | st.integers(2, 5),
        st.booleans(),
        st.booleans(),
    ),
    max_size=6,
).map(lambda ws: [WorkerView(f"w{i}", *fields) for i, fields in enumerate(ws)])
items_strategy = st.lists(
    st.tuples(st.integers(2, 5), st.integers(0, 30)), max_size=20, unique=True
)


@FEW
@given(workers_strategy, items_strategy, st.integers(0, 6), st.integers(1, 4), st.booleans())
def test_every_plan_keeps_the_invariants(
    workers: list[WorkerView],
    items: list[tuple[int, int]],
    admissible: int,
    group_size: int,
    whole: bool,
) -> None:
    pending = [work(version, ordinal) for version, ordinal in items]
    made = assigned(
        workers, pending, admissible=admissible, group_size=group_size, whole=whole
    ).plan
    by_name = {w.name: w for w in workers}
    assert len(made.admissions) <= admissible
    for start in made.starts:
        host = by_name[start.worker]
        assert host.version == start.work.version and host.switching_to is None
        assert not host.pressed or not host.load
    for worker in workers:
        sent = sum(s.worker == worker.name for s in made.starts)
        assert worker.load + sent <= max(worker.capacity, worker.load)
    for switch in made.switches:
        worker = by_name[switch.worker]
        assert worker.load == 0 and worker.switching_to is None
        assert not any(s.worker == switch.worker for s in made.starts)
    admitted = {a.group_id for a in made.admissions}
    assert {s.work.group_id for s in made.starts if s.work.attempt == 0} <= admitted
    assert len({(s.work.group_id, s.work.sample, s.work.version) for s in made.starts}) == len(
        made.starts
    )


@FEW
@given(workers_strategy, items_strategy, st.integers(0, 6))
def test_a_plan_leaves_the_pool_as_it_was(
    workers: list[WorkerView], items: list[tuple[int, int]], admissible: int
) -> None:
    pool = pool_of(workers)
    pending = waiting_of([work(version, ordinal) for version, ordinal in items])
    situation = Situation(5, admissible, 100, 2)
    first = assign(pool, pending, situation)
    assert sorted(pool.views(), key=lambda view: view.name) == workers
    assert assign(pool, pending, situation) == first


@FEW
@given(workers_strategy, st.lists(st.integers(2, 5), min_size=1, max_size=5))
def test_some_homeless_work_gets_a_worker_whenever_one_is_idle(
    workers: list[WorkerView], versions: list[int]
) -> None:
    made = make(workers, [work(v, i) for i, v in enumerate(versions)])
    idle = [w for w in workers if w.load == 0 and w.switching_to is None]
    hosted = {w.version for w in workers if w.switching_to is None}
    hosted |= {w.switching_to for w in workers if w.switching_to is not None}
    homeless = sorted(set(versions) - hosted)
    if homeless and any(not _started(made, w.name) for w in idle):
        assert homeless[0] in {s.version for s in made.switches}


def _started(made: PlacementPlan, worker: str) -> bool:
    return any(s.worker == worker for s in made.starts)


@FEW
@given(st.lists(workers_strategy, min_size=1, max_size=8))
def test_the_index_says_what_a_walk_over_all_workers_would_say(
    changes: list[list[WorkerView]],
) -> None:
    pool = Pool()
    pool.turn_to(5)
    now: dict[str, WorkerView] = {}
    for views in changes:
        for view in views:
            pool.put(view)
            now[view.name] = view
        for name in ("w4", "w5"):
            if name in now and len(views) % 2:
                pool.drop(name)
                del now[name]
        for version in range(2, 6):
            settled = [v for v in now.values() if v.version == version and v.switching_to is None]
            free = [v for v in settled if not v.leaving and not v.pressed and v.load < v.capacity]
            shelf = pool.shelf(version)
            assert shelf.workers == len(settled)
            assert shelf.load == sum(v.load for v in settled)
            assert shelf.room == sum(v.capacity - v.load for v in free)
            assert sorted(shelf.idle) == sorted(v.name for v in settled if v.load == 0)
            assert pool.hosted(version) == bool(
                settled or any(v.switching_to == version for v in now.values())
            )
            least = min(free, key=lambda v: ((v.load + 1) / v.capacity, v.name), default=None)
            assert pool.least_loaded(version) == least
        assert pool.capacity == sum(v.capacity for v in now.values())


@FEW
@given(items_strategy, st.sets(st.integers(0, 19)))
def test_what_waits_comes_in_the_order_of_the_journal(
    items: list[tuple[int, int]], removed: set[int]
) -> None:
    pending = [work(version, ordinal) for version, ordinal in items]
    waiting = PendingQueue()
    for each in pending:
        waiting[f"{each.version} {each.ordinal}"] = each
    for index in removed & set(range(len(pending))):
        each = pending[index]
        del waiting[f"{each.version} {each.ordinal}"]
        waiting[f"{each.version} {each.ordinal}"] = each
    for version in waiting.versions():
        expected = sorted(o for v, o in items if v == version)
        assert waiting.count(version) == len(expected)
        for _ in range(2):
            assert [w.ordinal for w in waiting.first(version, 3)] == expected[:3]


def test_first_last_and_every_nth_version_are_evaluated_once() -> None:
    def due(opened: int, newest: int) -> list[int]:
        return due_evaluations(opened=opened, newest=newest, every=4, last=10)

    assert due(-1, 0) == [0]
    assert due(0, 3) == []
    assert due(2, 8) == [4, 8]
    assert due(9, 10) == [10]
    assert due_evaluations(opened=-1, newest=3, every=0, last=3) == [0, 3]
