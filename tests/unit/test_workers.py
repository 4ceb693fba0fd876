"""The workers: who holds which trajectory, and when a holder is gone."""

from dataclasses import replace

import pytest

from dora.core.scheduling.workers import WorkerRegistry, lease_name
from dora.schemas.records import Command, Status

READY = Status(
    run="r", process="w0", role="rollout", incarnation="one", state="ready", created_ms=0,
    version=3, capacity=4,
)  # fmt: skip
START = Command(
    run="r", worker="w0", incarnation="one", kind="start", created_ms=0,
    trajectory_id="g1/0", group_id="g1", policy_version=3,
)  # fmt: skip


def make() -> WorkerRegistry:
    workers = WorkerRegistry(heartbeat_timeout=10.0, load_timeout=100.0)
    workers.on_status(READY, 0.0)
    workers.on_command(START, 0.0)
    return workers


def test_a_silent_worker_loses_what_it_holds_once() -> None:
    workers = make()
    assert workers.lost(10.0) == []
    assert workers.lost(10.1) == ["g1/0"]
    assert workers.lost(20.0) == []
    assert workers.next_attempt("g1/0") == 1
    assert workers.pool.views() == []


def test_a_worker_that_speaks_again_is_used_again() -> None:
    workers = make()
    workers.lost(11.0)
    workers.on_status(READY, 12.0)
    assert [view.name for view in workers.pool.views()] == ["w0"]


def test_a_worker_that_loads_weights_may_be_silent_for_longer() -> None:
    workers = make()
    workers.on_status(replace(READY, state="loading"), 0.0)
    assert workers.lost(99.0) == []
    assert workers.lost(101.0) == ["g1/0"]


def test_a_new_incarnation_loses_what_the_old_one_held() -> None:
    workers = make()
    workers.on_status(replace(READY, incarnation="two"), 1.0)
    assert workers.lost(1.0) == ["g1/0"]


def test_a_zombie_incarnation_is_recognised_and_changes_nothing() -> None:
    workers = make()
    assert workers.on_status(replace(READY, incarnation="two"), 1.0)
    assert not workers.on_status(READY, 2.0)
    worker = workers.worker("w0")
    assert worker is not None and worker.status.incarnation == "two"


def test_a_failed_or_stopped_worker_loses_what_it_holds_at_once() -> None:
    for state in ("failed", "stopped"):
        workers = make()
        workers.on_status(replace(READY, state=state), 1.0)  # type: ignore[arg-type]
        assert workers.lost(1.0) == ["g1/0"]
        assert workers.pool.views() == []


def test_a_living_worker_that_does_not_know_of_a_trajectory_loses_it_after_the_timeout() -> None:
    workers = make()
    workers.on_status(READY, 9.0)
    assert workers.lost(9.0) == []
    workers.on_status(READY, 11.0)
    assert workers.lost(11.0) == ["g1/0"]


def test_a_trajectory_that_the_worker_names_stays_with_it() -> None:
    workers = make()
    for now in range(1, 40):
        workers.on_status(replace(READY, running=(lease_name("g1/0", 0),)), float(now))
        assert workers.lost(float(now)) == []


def test_a_finished_trajectory_frees_its_place() -> None:
    workers = make()
    assert [view.load for view in workers.pool.views()] == [1]
    workers.finished("g1/0")
    assert [view.load for view in workers.pool.views()] == [0]
    assert workers.lost(99.0) == []


def test_a_command_to_a_dead_incarnation_leaves_the_trajectory_without_holder() -> None:
    workers = make()
    workers.on_command(replace(START, trajectory_id="g2/0", incarnation="old"), 0.0)
    assert workers.held("g2/0") is None
    assert workers.next_attempt("g2/0") == 1


def test_a_switch_is_over_when_the_worker_hosts_the_version() -> None:
    workers = make()
    workers.on_command(Command("r", "w0", "one", "switch", 0, policy_version=4), 0.0)
    assert [view.switching_to for view in workers.pool.views()] == [4]
    workers.on_status(READY, 1.0)
    assert [view.switching_to for view in workers.pool.views()] == [4]
    workers.on_status(replace(READY, version=4), 2.0)
    assert [view.switching_to for view in workers.pool.views()] == [None]


def test_a_worker_known_only_from_the_past_gets_no_work_before_it_speaks() -> None:
    workers = WorkerRegistry(heartbeat_timeout=10.0, load_timeout=100.0)
    workers.on_status(READY, 0.0, live=False)
    assert workers.pool.views() == []
    workers.on_status(READY, 1.0)
    assert len(workers.pool.views()) == 1


def test_the_clock_of_a_record_does_not_matter() -> None:
    workers = make()
    workers.on_status(replace(READY, created_ms=-10_000_000), 9.0)
    assert workers.lost(9.5) == []


def test_while_catching_up_a_command_that_was_carried_out_leaves_only_what_the_status_shows() -> (
    None
):
    workers = WorkerRegistry(heartbeat_timeout=10.0, load_timeout=100.0)
    status = replace(READY, command_offset=7, running=(lease_name("g1/0", 0),))
    workers.on_status(status, 0.0)
    workers.on_command(Command("r", "w0", "one", "switch", 0, policy_version=1), 0.0, offset=5)
    workers.on_command(START, 0.0, offset=6)
    workers.on_command(replace(START, trajectory_id="g2/0"), 0.0, offset=7)
    workers.on_command(replace(START, trajectory_id="g3/0"), 0.0, offset=8)
    assert [view.switching_to for view in workers.pool.views()] == [None]
    assert workers.held("g1/0") is not None
    assert workers.held("g2/0") is None
    assert workers.held("g3/0") is not None


def test_a_worker_whose_requests_are_all_to_move_leaves_its_version_and_is_there_for_the_next() -> (
    None
):
    workers = make()
    workers.on_command(replace(START, kind="move"), 1.0)
    assert [(view.leaving, view.load) for view in workers.pool.views()] == [(True, 1)]
    assert not workers.on_handover("g1/0", 1), "another attempt"
    assert workers.on_handover("g1/0", 0)
    assert not workers.on_handover("g1/0", 0), "it is taken once"
    assert [(view.leaving, view.load) for view in workers.pool.views()] == [(True, 0)]
    workers.on_command(Command("r", "w0", "one", "switch", 0, policy_version=4), 2.0)
    workers.on_status(replace(READY, version=4), 3.0)
    assert [(view.leaving, view.version) for view in workers.pool.views()] == [(False, 4)]


def test_while_catching_up_a_move_that_was_carried_out_leaves_no_holder() -> None:
    workers = WorkerRegistry(heartbeat_timeout=10.0, load_timeout=100.0)
    workers.on_status(replace(READY, command_offset=7), 0.0)
    workers.on_command(START, 0.0, offset=5)
    workers.on_command(replace(START, kind="move"), 0.0, offset=6)
    assert workers.held("g1/0") is None
    assert (workers.next_attempt("g1/0"), workers.moved("g1/0", 0)) == (1, 1)


@pytest.mark.parametrize("said", [None, float("nan"), float("inf"), -1.0, 0.0, 3.0])
def test_only_a_sensible_number_of_places_for_adapters_counts(said: float | None) -> None:
    workers = make()
    metrics = {} if said is None else {"adapters": said}
    workers.on_status(replace(READY, metrics=metrics), 1.0)
    assert [view.adapters for view in workers.pool.views()] == [3 if said == 3.0 else None]
