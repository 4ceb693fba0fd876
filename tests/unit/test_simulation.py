"""Runs in virtual time: exact where they can be computed by hand, and without violations always."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dora.core.scheduling.scheduler import Rules
from dora.core.scheduling.schedules import Schedule
from dora.core.window import Window
from dora.schemas.records import Record, VersionRun
from dora.simulation.device import DeviceSpec
from dora.simulation.measures import RunCheck
from dora.simulation.scenario import Change, Scenario
from dora.simulation.simulator import Simulated, Simulation, Stuck, simulate
from tests.factories import admission, step, trajectory


def scenario(bound: int = 0, **changes: object) -> Scenario:
    """Two workers of four slots; batches of four groups of two; a token takes a second."""
    kind = changes.pop("kind", "dora")
    colocated = bool(changes.pop("colocated", False))
    groups = changes.pop("groups", 4)
    size = changes.pop("size", 2)
    steps = changes.get("steps", 6)
    base = Scenario(
        rules=Rules(
            window=Window(bound, groups),  # type: ignore[arg-type]
            group_size=size,  # type: ignore[arg-type]
            steps=steps + bound,  # type: ignore[operator]
            heartbeat_timeout=100.0,
            schedule=Schedule(kind=kind, colocated=colocated),  # type: ignore[arg-type]
        ),
        workers=2,
        slots=4,
        device=DeviceSpec(1.0),
        lengths=lambda identity, ordinal: 10,
        training_seconds=7.0,
        steps=steps,  # type: ignore[arg-type]
        warmup=1,
        control_seconds=0.0,
        tick_seconds=0.0,
    )
    return replace(base, **changes)


def uneven(identity: str, ordinal: int) -> int:
    """Lengths from 1 to 40, every eleventh of them long."""
    return 40 if ordinal % 11 == 0 else 1 + (ordinal * 7 + len(identity)) % 13


def clean(result: Simulated, *, mixed: bool = False) -> bool:
    """Whether nothing happened that must not happen."""
    return result.violations == 0 and (mixed or result.mixed_version == 0)


def test_a_synchronous_step_takes_one_generation_one_load_and_one_training() -> None:
    result = simulate(scenario(device=DeviceSpec(1.0, load_seconds=3.0), publish_seconds=0.5))
    assert result.step_times == pytest.approx([3 + 10 + 7.5] * 5)
    assert result.tokens == 4 * 2 * 10
    assert result.trainer_idle_share == pytest.approx(13 / 20.5)
    assert result.rollout_only_share == pytest.approx(10 / 20.5)
    assert result.staleness_max == 0
    assert result.switches == 2
    assert clean(result)


def test_a_streamed_step_trains_what_is_finished_while_the_last_group_is_generated() -> None:
    def one_is_long(identity: str, ordinal: int) -> int:
        return 40 if ordinal % 4 == 3 else 10

    whole = simulate(scenario(lengths=one_is_long))
    streamed = simulate(scenario(lengths=one_is_long, streamed=True))
    assert whole.step_times == pytest.approx([40 + 7] * 5)
    assert streamed.step_times == pytest.approx([40 + 7 / 4] * 5)
    assert streamed.trainer_idle_share == pytest.approx((40 - 3 * 7 / 4) / (40 + 7 / 4))
    assert streamed.rollout_only_share == pytest.approx(streamed.trainer_idle_share)
    assert streamed.staleness_max == 0
    assert clean(streamed)


def test_waves_follow_one_another_where_a_batch_is_larger_than_the_slots() -> None:
    result = simulate(scenario(groups=8))
    assert result.step_times == pytest.approx([2 * 10 + 7] * 5)


def test_control_takes_its_time_on_each_way() -> None:
    # new version to the coordinator, switch to the worker, its report back, start, result to the
    # trainer
    result = simulate(scenario(control_seconds=0.25))
    assert result.step_times == pytest.approx([10 + 7 + 5 * 0.25] * 5)


def test_asynchronous_steps_take_as_long_as_the_slower_side() -> None:
    result = simulate(scenario(1, steps=8, warmup=4))
    assert result.step_times == pytest.approx([10.0] * 4)
    assert result.staleness_max == 1
    trained = simulate(scenario(1, steps=8, warmup=4, training_seconds=25.0))
    assert trained.step_times == pytest.approx([25.0] * 4)
    assert trained.trainer_idle_share == 0
    assert clean(result) and clean(trained)


def test_partial_interrupts_at_each_version_and_mixes_versions_in_a_trajectory() -> None:
    result = simulate(
        scenario(1, kind="partial", colocated=True, interrupts=True, lengths=uneven, steps=8)
    )
    assert result.mixed_version > 0
    assert clean(result, mixed=True)


def test_under_partial_nothing_is_generated_while_a_step_is_trained() -> None:
    result = simulate(
        scenario(1, kind="partial", colocated=True, interrupts=True, lengths=uneven, steps=8)
    )
    alone = result.rollout_only_share * sum(result.step_times)
    training = 7.0 * len(result.step_times)
    assert alone + training <= sum(result.step_times) * 1.001


@pytest.mark.parametrize("kind", ["dora", "one-step-off"])
def test_a_long_tail_blocks_less_with_more_versions(kind: str) -> None:
    slow = simulate(scenario(0, lengths=uneven, steps=12, warmup=4))
    fast = simulate(scenario(1, kind=kind, lengths=uneven, steps=12, warmup=4))
    assert fast.step_seconds < slow.step_seconds
    assert clean(slow) and clean(fast)


def test_the_same_scenario_gives_the_same_result() -> None:
    assert simulate(scenario(2, lengths=uneven)) == simulate(scenario(2, lengths=uneven))


def test_fewer_workers_than_live_versions_starve_no_version() -> None:
    result = simulate(scenario(3, workers=1, lengths=uneven, steps=10))
    assert result.staleness_max <= 3
    assert clean(result)


def test_workers_that_come_and_go_change_the_speed_and_lose_nothing() -> None:
    alone = simulate(scenario(1, workers=1, lengths=uneven, steps=10))
    changes = (Change(60.0, 1, "join"), Change(61.0, 2, "join"))
    more = simulate(scenario(1, workers=3, lengths=uneven, steps=10, changes=changes))
    assert more.seconds < alone.seconds
    assert clean(alone) and clean(more)


@pytest.mark.parametrize("kind", ["leave", "crash"])
def test_what_a_lost_worker_had_goes_on_elsewhere(kind: str) -> None:
    changes = (Change(25.0, 0, kind),)  # type: ignore[arg-type]
    result = simulate(scenario(1, lengths=uneven, steps=8, changes=changes))
    assert clean(result)
    assert result.step_seconds > simulate(scenario(1, lengths=uneven, steps=8)).step_seconds


def test_a_worker_that_crashed_comes_back_as_another_incarnation() -> None:
    changes = (Change(25.0, 0, "crash"), Change(40.0, 0, "join"))
    assert clean(simulate(scenario(2, lengths=uneven, steps=10, changes=changes)))


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -5.0, 0.0, 1e30])
def test_nonsense_rates_of_a_worker_stop_nothing(rate: float) -> None:
    result = simulate(
        scenario(2, lengths=uneven, steps=8, heartbeat_seconds=5.0, reported_rates={0: rate})
    )
    assert clean(result)


def test_a_run_without_workers_is_stuck_and_says_what_it_waits_for() -> None:
    changes = (Change(25.0, 0, "leave"), Change(25.0, 1, "leave"))
    with pytest.raises(Stuck, match=r"outstanding by version .* 0 workers"):
        simulate(scenario(1, changes=changes, patience_seconds=1000.0))


def test_workers_that_host_many_versions_need_not_drain() -> None:
    many = scenario(2, lengths=uneven, steps=10, adapters=4)
    many = replace(many, rules=replace(many.rules, schedule=Schedule(adapters=True)))
    result = simulate(many)
    assert clean(result)
    assert result.moves == 0


def test_the_timeline_covers_each_worker_without_gaps_or_overlaps() -> None:
    simulation = Simulation(scenario(1, lengths=uneven))
    result = simulation.run()
    for worker in (0, 1):
        parts = [part for part in result.timeline if part.worker == worker]
        assert parts[-1].end == pytest.approx(result.seconds)
        assert all(a.end == b.begin for a, b in pairwise(parts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "generate nothing"),
        ({"warmup": 6, "steps": 6}, "none to measure"),
        ({"heartbeat_seconds": 100.0}, "given up"),
    ],
)
def test_a_scenario_that_makes_no_sense_is_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scenario(**changes)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    bound=st.integers(0, 3),
    kind=st.sampled_from(["dora", "one-step-off", "partial"]),
    workers=st.integers(1, 4),
    slots=st.integers(1, 6),
    groups=st.integers(1, 5),
    size=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    training=st.floats(0, 50),
    streamed=st.booleans(),
    control=st.sampled_from([0.0, 0.3, 2.0]),
    tick=st.sampled_from([0.0, 0.5]),
    cache=st.sampled_from([None, 150]),
    events=st.lists(
        st.tuples(st.floats(1, 200), st.integers(0, 3), st.sampled_from(["crash", "leave"])),
        max_size=3,
    ),
)
@example(  # the worker leaves while it loads, with interrupted trajectories in hand
    bound=0,
    kind="partial",
    workers=1,
    slots=2,
    groups=5,
    size=1,
    lengths=[1, 16, 1, 20, 2],
    training=0.0,
    streamed=False,
    control=0.3,
    tick=0.5,
    cache=150,
    events=[(38.0, 0, "leave")],
)
def test_no_workload_and_no_loss_of_workers_breaks_a_rule(
    bound: int,
    kind: str,
    workers: int,
    slots: int,
    groups: int,
    size: int,
    lengths: list[int],
    training: float,
    streamed: bool,
    control: float,
    tick: float,
    cache: int | None,
    events: list[tuple[float, int, str]],
) -> None:
    bound = 1 if kind == "one-step-off" else max(bound, 1 if kind == "partial" else 0)
    changes = []
    for time, worker, what in events:
        if worker < workers:
            changes += [
                Change(time, worker, what),  # type: ignore[arg-type]
                Change(time + 30, worker, "join"),
            ]
    result = simulate(
        scenario(
            bound,
            kind=kind,
            colocated=kind == "partial",
            interrupts=kind == "partial",
            groups=groups,
            size=size,
            workers=workers,
            slots=slots,
            device=DeviceSpec(0.5, 0.1, 0.001, 0.01, 1.0, cache, 1.0),
            lengths=lambda identity, ordinal: lengths[(ordinal + len(identity)) % len(lengths)],
            training_seconds=training,
            streamed=streamed and kind != "partial",
            control_seconds=control,
            tick_seconds=tick,
            changes=tuple(changes),
            steps=5,
            warmup=1,
            patience_seconds=50_000.0,
        )
    )
    assert clean(result, mixed=kind == "partial")
    assert result.staleness_max <= bound
    assert len(result.steps) == 5


def test_a_simulated_run_that_breaks_a_rule_is_found_out() -> None:
    def checked(*records: Record) -> tuple[int, int]:
        check = RunCheck(Rules(Window(0, 1), group_size=1, steps=2, heartbeat_timeout=10.0))
        for offset, record in enumerate(records):
            check.handle(record, offset)
        return check.end(outstanding=0)

    first, second = (admission(n, n, group_size=1) for n in range(2))
    one = trajectory(first)
    named = replace(step(0, 0, [first], {one.trajectory_id: (0, 1)}), weights_checksum="")
    assert checked(first, one, named) == (0, 0)
    assert checked(first)[0] == 1, "the coordinator forgot the group"
    assert checked(first, named)[0] == 1, "trained without its trajectory"
    assert checked(first, one, named, replace(named, sequence=1, version_in=1, version_out=2))[0]
    assert checked(first, second)[0] > 2, "beyond the window"
    mixed = replace(one, version_runs=(VersionRun(0, 1), VersionRun(1, 2)))
    assert checked(first, mixed, named) == (0, 1)
