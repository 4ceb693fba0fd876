"""Measures of a schedule, against values worked out by hand."""

import pytest

from dora.bench.comparison import RunResult, compare, limits, timeline
from dora.bench.measures import Emulation, Measures, Overhead, measure, merged, overlap
from dora.log.schedule_log import Occupancy, ScheduleLog
from dora.schemas.records import (
    Admission,
    Command,
    GroupRef,
    Policy,
    RunStarted,
    Status,
    Step,
    Trajectory,
)
from tests import factories

RUN = "measured"
EMULATION = Emulation(time_scale=0.5, train_seconds=4.0, publish_seconds=1.0, load_seconds=0.4)


def started() -> RunStarted:
    shape = {"max_staleness": 1, "groups_per_step": 1, "group_size": 1}
    return factories.run_started(RUN, at=1_000, **shape)


def policy(version: int, at: int) -> Policy:
    return factories.policy(version, RUN, at=at)


def step(version: int, group: GroupRef, at: int, **metrics: float) -> Step:
    return factories.step(version, version, [group], run=RUN, at=at, **metrics)


def group(name: str, version: int) -> GroupRef:
    return factories.group_ref(admission(name, version, 0))


def admission(name: str, version: int, at: int) -> Admission:
    return factories.admission(0, version, RUN, group_id=name, group_size=1, created_ms=at)


def start(name: str, version: int, worker: str, at: int, attempt: int = 0) -> Command:
    fields = {"attempt": attempt, "policy_version": version, "purpose": "train"}
    return factories.command(f"{name}/0", worker, run=RUN, at=at, **fields)


def finished(
    name: str, version: int, worker: str, began: int, ended: int, written: int, attempt: int = 0
) -> Trajectory:
    times = {"started_ms": began, "generated_ms": ended, "created_ms": written}
    of = admission(name, version, 0)
    return factories.trajectory(of, worker=worker, attempt=attempt, **times)


@pytest.fixture
def log() -> ScheduleLog:
    """Two steps of one group each. Version 0 starts at 1 s, steps are committed at 6 s and 11 s.

    Group b, of version 0, moves from w0 to w1, and is trained at version 1. Group c is of version 1
    and not finished.
    """
    fold = ScheduleLog()
    switch = Command(RUN, "w1", "i", "switch", 6_020, policy_version=1)
    move = Command(RUN, "w0", "i", "move", 6_500, "b/0", "b", 0, 0, 0)
    for record in (
        started(),
        policy(0, 1_000),
        admission("a", 0, 1_100),
        start("a", 0, "w0", 1_200),
        admission("b", 0, 1_100),
        start("b", 0, "w0", 1_200),
        finished("a", 0, "w0", 1_300, 3_200, 3_300),
        step(
            0, group("a", 0), 6_000,
            idle_seconds=2.4, train_seconds=2.1, publish_seconds=0.5, tokens=10.0,
        ),
        policy(1, 6_000),
        admission("c", 1, 6_040),
        switch,
        start("c", 1, "w1", 6_050),
        move,
        start("b", 0, "w1", 6_600, attempt=1),
        finished("b", 0, "w1", 6_700, 7_900, 8_000, attempt=1),
        finished("c", 1, "w1", 6_250, 9_000, 9_050),
        step(
            1, group("b", 0), 11_000,
            idle_seconds=2.0, train_seconds=2.2, publish_seconds=0.6, tokens=14.0,
        ),
        Status(RUN, "w0", "rollout", "i", "ready", 1, metrics={"emulation_late_share": 0.1}),
        Status(RUN, "w1", "rollout", "i", "ready", 1, metrics={"emulation_late_share": 0.3}),
    ):  # fmt: skip
        fold.handle(record)
    return fold


def test_step_time_idle_staleness_and_moves_are_those_of_the_measured_steps(
    log: ScheduleLog,
) -> None:
    both = measure(log, 0, 2, EMULATION)
    assert both.step_seconds == pytest.approx((11 - 1) / 2 / 0.5)
    assert both.tokens == 12
    assert both.trainer_idle_share == pytest.approx(4.4 / 10)
    assert (both.staleness_mean, both.staleness_max) == (0.5, 1)
    assert both.migrations == 0.5
    assert both.late_share == pytest.approx(0.2)
    assert both.trajectories == 2
    last = measure(log, 1, 1, EMULATION)
    assert last.step_seconds == pytest.approx(10)
    assert (last.staleness_mean, last.migrations, last.tokens) == (1.0, 1.0, 14)


def test_rollout_only_time_is_generation_outside_of_training(log: ScheduleLog) -> None:
    # Generating: 1.2 (order of b) to 6.6, 6.05 (c) to 9.0. Training: 3.4 to 6.0, 8.2 to 11.0.
    both = measure(log, 0, 2, EMULATION)
    assert both.rollout_only_share == pytest.approx(((3.4 - 1.2) + (8.2 - 6.0)) / 10)


def test_an_attempt_lasts_until_the_next_one_is_ordered(log: ScheduleLog) -> None:
    assert set(log.occupancies(11_000)) == {
        Occupancy("w0", 0, 1_300, 3_200),
        Occupancy("w0", 0, 1_200, 6_600),
        Occupancy("w1", 0, 6_700, 7_900),
        Occupancy("w1", 1, 6_250, 9_000),
    }


def test_overhead_is_what_takes_time_beside_the_emulated_work(log: ScheduleLog) -> None:
    overhead = measure(log, 1, 1, EMULATION).overhead
    assert overhead.commit == pytest.approx(5.0 - 2.0 - 2.2 - 0.6)
    assert overhead.training == pytest.approx(2.2 - 0.5 * 4.0)
    assert overhead.publishing == pytest.approx(0.6 - 0.5 * 1.0)
    assert overhead.decision == pytest.approx(0.02)
    # the load takes 0.2 s here and was ordered at 6.02 s: the worker could have begun at 6.22 s
    assert overhead.switching == pytest.approx(6.25 - 6.22)
    assert overhead.scoring == pytest.approx((0.1 + 0.05) / 2)
    assert overhead.pickup == pytest.approx(8.2 - 8.0)
    assert overhead.delivery == 0  # all were the first of their version on their worker
    measures = measure(log, 1, 1, EMULATION)
    assert measures.overhead_share == pytest.approx(overhead.total / 10)
    assert measures.scaled_overhead_share == pytest.approx(overhead.total / 5)


def test_starts_on_a_worker_that_hosts_the_version_are_deliveries(log: ScheduleLog) -> None:
    log.handle(start("d", 1, "w1", 7_000))
    log.handle(finished("d", 1, "w1", 7_030, 8_000, 8_010))
    assert measure(log, 1, 1, EMULATION).overhead.delivery == pytest.approx(0.03)


def test_steps_that_were_not_committed_cannot_be_measured(log: ScheduleLog) -> None:
    with pytest.raises(ValueError, match="2 steps are committed, 3 are needed"):
        measure(log, 1, 2, EMULATION)


def test_unions_and_overlaps_of_intervals() -> None:
    union = merged([(5, 7), (0, 2), (1, 3), (6, 6.5)])
    assert union == [(0, 3), (5, 7)]
    assert overlap(union, [(2, 6), (6.5, 9)], 0, 10) == pytest.approx(1 + 1 + 0.5)
    assert overlap(union, [(2, 6)], 2.5, 5.5) == pytest.approx(0.5 + 0.5)


def test_the_timeline_is_in_emulated_seconds_of_the_measured_steps(log: ScheduleLog) -> None:
    line = timeline(log, "dora:1", 1, 1, time_scale=0.5)
    assert line.seconds == pytest.approx(10)
    assert line.devices == ("w0", "w1")
    found = {(s.device, s.version, round(s.begin, 3), round(s.end, 3)) for s in line.spans}
    assert found == {("w0", 0, 0.0, 1.2), ("w1", 0, 1.4, 3.8), ("w1", 1, 0.5, 6.0)}
    assert [(v, round(b, 3), round(e, 3)) for v, b, e in line.training] == [(2, 4.4, 10.0)]


def test_partial_trajectories_are_shown_under_the_version_that_generates(log: ScheduleLog) -> None:
    line = timeline(log, "partial:3", 0, 2, time_scale=1.0, interrupts=True)
    on_w0 = {
        (s.version, round(s.begin, 3), round(s.end, 3)) for s in line.spans if s.device == "w0"
    }
    # training from 2.4 s on: nothing is generated then; version 1 from 5 s on
    assert on_w0 == {(0, 0.2, 2.4), (1, 5.0, 5.6)}


def result(schedule: str, repeat: int, seconds: float, ideal: float = 100.0) -> RunResult:
    overhead = Overhead(0.1, 0, 0, 0, 0, 0, 0, 0)
    measures = Measures(seconds, 1e6, 0.1, 0.2, 0.5, repeat + 1, 3.0, overhead, 0.001, 0.02, 0.0, 8)
    return RunResult(schedule, repeat, 4, measures, ideal, 0.5, 0, 0)


def test_schedules_are_compared_with_sync_of_the_same_repeat() -> None:
    results = [
        result("sync", 0, 200), result("dora:1", 0, 100), result("sync", 1, 300),
        result("dora:1", 1, 120, ideal=110),
    ]  # fmt: skip
    summary = compare(results)["dora:1"]
    assert summary["step_seconds"] == 110
    assert summary["spread"]["step_seconds"] == [100, 120]
    assert summary["ratio_to_sync"] == pytest.approx((2 + 2.5) / 2)
    assert summary["ideal_share"] == pytest.approx((1 + 110 / 120) / 2)
    assert summary["staleness_max"] == 2
    assert compare(results)["sync"]["ratio_to_sync"] == 1
    assert compare([result("dora:2", 0, 9)])["dora:2"]["ratio_to_sync"] is None


def test_runs_that_measured_the_machine_are_named() -> None:
    fine = result("sync", 0, 200)
    late = Measures(
        1, 1, 0, 0, 0, 0, 0, Overhead(0, 0, 0, 0, 0, 0, 0, 0), 0, 0.4, late_share=0.06,
        trajectories=1,
    )  # fmt: skip
    assert limits([fine]) == []
    said = limits([fine, RunResult("dora:3", 1, 4, late, 1.0, 0.99, 0, 0)])
    assert len(said) == 3
    assert all(sentence.startswith("dora:3, repeat 2: ") for sentence in said)
    assert "6.0%" in said[0] and "40.0%" in said[1] and "99%" in said[2]
