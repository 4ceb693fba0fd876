"""Placement: who generates what, under which version."""

from hypothesis import given
from hypothesis import strategies as st

from dora.core.placement import Plan, Unplaced, WorkerView, due_evaluations, plan


def work(version: int, ordinal: int = 0, sample: int = 0, attempt: int = 1) -> Unplaced:
    return Unplaced(f"g{ordinal}", sample, version, ordinal, "train", attempt)


def make(workers: list[WorkerView], unplaced: list[Unplaced] = [], **changes: int) -> Plan:  # noqa: B006
    arguments = {"newest": 5, "admissible": 0, "next_ordinal": 100, "group_size": 2, **changes}
    return plan(workers, unplaced, **arguments)


def test_new_groups_go_whole_to_the_least_loaded_worker_of_the_newest_version() -> None:
    made = make([WorkerView("a", 5, 8, 4), WorkerView("b", 5, 8, 1)], admissible=2)
    assert [a.ordinal for a in made.admissions] == [100, 101]
    assert [s.worker for s in made.starts] == ["b", "b", "b", "b"]
    assert {s.work.version for s in made.starts} == {5}


def test_no_group_starts_where_it_does_not_fit_whole() -> None:
    made = make([WorkerView("a", 5, 8, 7)], admissible=5)
    assert not made


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
    made = make([WorkerView("a", 5, 8, 0)], [work(4, 9), work(3, 8)])
    assert [(s.worker, s.version) for s in made.switches] == [("a", 3)]


def test_a_busy_worker_is_kept_free_of_new_groups_for_a_version_without_a_worker() -> None:
    workers = [WorkerView("a", 5, 8, 1), WorkerView("b", 5, 8, 2)]
    made = make(workers, [work(3, 8)], admissible=1)
    assert {s.worker for s in made.starts} == {"b"}


def test_a_switch_under_way_counts_as_a_host() -> None:
    made = make([WorkerView("a", 5, 8, 0, switching_to=3), WorkerView("b", 5, 8, 0)], [work(3, 8)])
    assert not made.switches


workers_strategy = st.lists(
    st.builds(
        lambda version, capacity, load, switching: WorkerView(
            "", version, capacity, min(load, capacity), switching
        ),
        st.integers(2, 5),
        st.integers(1, 8),
        st.integers(0, 8),
        st.none() | st.integers(2, 5),
    ),
    max_size=6,
).map(lambda ws: [WorkerView(f"w{i}", *_fields(w)) for i, w in enumerate(ws)])


def _fields(worker: WorkerView) -> tuple[int, int, int, int | None]:
    return worker.version, worker.capacity, worker.load, worker.switching_to


@given(
    workers_strategy,
    st.lists(st.tuples(st.integers(2, 5), st.integers(0, 30)), max_size=20, unique=True),
    st.integers(0, 6),
    st.integers(1, 4),
)
def test_every_plan_keeps_the_invariants(
    workers: list[WorkerView], items: list[tuple[int, int]], admissible: int, group_size: int
) -> None:
    unplaced = [work(version, ordinal) for version, ordinal in items]
    made = make(workers, unplaced, admissible=admissible, group_size=group_size)
    by_name = {w.name: w for w in workers}
    assert len(made.admissions) <= admissible
    for start in made.starts:
        host = by_name[start.worker]
        assert host.version == start.work.version and host.switching_to is None
    for worker in workers:
        sent = sum(s.worker == worker.name for s in made.starts)
        assert worker.load + sent <= max(worker.capacity, worker.load)
    for switch in made.switches:
        worker = by_name[switch.worker]
        assert worker.load == 0 and worker.switching_to is None
        assert not any(s.worker == switch.worker for s in made.starts)
    admitted = [(a.group_id, s) for a in made.admissions for s in range(group_size)]
    new = [(s.work.group_id, s.work.sample) for s in made.starts if s.work.attempt == 0]
    assert sorted(admitted) == sorted(new)


@given(workers_strategy, st.lists(st.integers(2, 5), min_size=1, max_size=5))
def test_some_homeless_work_gets_a_worker_whenever_one_is_idle(
    workers: list[WorkerView], versions: list[int]
) -> None:
    made = make(workers, [work(v, i) for i, v in enumerate(versions)])
    idle = [w for w in workers if w.load == 0 and w.switching_to is None]
    hosted = {w.version for w in workers} | {w.switching_to for w in workers}
    homeless = sorted(set(versions) - hosted)
    if homeless and any(not _started(made, w.name) for w in idle):
        assert homeless[0] in {s.version for s in made.switches}


def _started(made: Plan, worker: str) -> bool:
    return any(s.worker == worker for s in made.starts)


def test_first_last_and_every_nth_version_are_evaluated_once() -> None:
    def due(opened: int, newest: int) -> list[int]:
        return due_evaluations(opened=opened, newest=newest, every=4, last=10)

    assert due(-1, 0) == [0]
    assert due(0, 3) == []
    assert due(2, 8) == [4, 8]
    assert due(9, 10) == [10]
    assert due_evaluations(opened=-1, newest=3, every=0, last=3) == [0, 3]
