"""The pure parts of chaos runs: which faults are made, what ends them, and what the report says."""

from collections import Counter
from typing import Any

import pytest

from dora.bus import Message
from dora.faults import POINTS
from dora.schemas.records import (
    Admission,
    Command,
    GroupRef,
    Record,
    Sampling,
    Status,
    Step,
    Trajectory,
    VersionRun,
    pack_logprobs,
    pack_tokens,
)
from tests.chaos.agenda import Agenda
from tests.chaos.plan import VICTIMS, Fault, Mix, plan, points_of, shares
from tests.chaos.profiles import PROFILES
from tests.chaos.progress import Progress
from tests.chaos.report import Conservation, Findings, Outcome, conservation, summary

MIX = PROFILES["emulated"].mix


def admission(ordinal: int, created_ms: int) -> Admission:
    return Admission("r", f"g{ordinal}", ordinal, 0, 1, "train", created_ms)


def start(trajectory_id: str, worker: str, created_ms: int, attempt: int = 0) -> Command:
    return Command(
        "r", worker, "i", "start", created_ms, trajectory_id=trajectory_id, attempt=attempt
    )


def trajectory(
    trajectory_id: str, worker: str, created_ms: int, resumed_tokens: int = 0
) -> Trajectory:
    group, _, sample = trajectory_id.rpartition("/")
    return Trajectory(
        run="r", trajectory_id=trajectory_id, group_id=group, sample=int(sample), attempt=0,
        chunks=1, policy_version=0, ordinal=0, purpose="train", token_ids=pack_tokens([3, 4, 5]),
        mask=b"\x00\x01\x01", logprobs=pack_logprobs([0.0, -1.0, -1.0]),
        version_runs=(VersionRun(0, 2),), finish_reason="stop", reward=1.0, reward_parts={},
        error=None, text=None, worker=worker, engine="emulated",
        sampling=Sampling(1.0, 1.0, 0, 8, (1,)), started_ms=0, generated_ms=0,
        created_ms=created_ms, resumed_tokens=resumed_tokens,
    )  # fmt: skip


def step(version_out: int, created_ms: int, *groups: str, kind: Any = "step") -> Step:
    refs = tuple(GroupRef(group, 0, 0, ()) for group in groups)
    return Step(
        "r", kind, 0, version_out - 1, version_out, refs, (), {}, "sum", None, "t", created_ms
    )


def status(process: str, created_ms: int) -> Status:
    return Status("r", process, "rollout", "i", "ready", created_ms, pid=created_ms)


def fold(progress: Progress, record: Record, now: float) -> list[int]:
    return progress.take(Message("t", 0, 0, None, 0, {}, record), now)


def test_equal_seeds_give_equal_plans_and_others_do_not() -> None:
    assert plan(5, 40, MIX) == plan(5, 40, MIX)
    assert plan(5, 40, MIX) != plan(6, 40, MIX)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
def test_twenty_faults_strike_every_victim_in_every_way(profile: Any) -> None:
    faults = plan(0, 20, profile.mix)
    assert len(faults) == 20
    assert {fault.victim for fault in faults} == set(VICTIMS)
    ways = {(fault.victim, fault.kind) for fault in faults}
    for victim in ("trainer", "coordinator", "worker"):
        assert {(victim, kind) for kind in ("kill", "freeze", "point")} <= ways
    assert {("broker", "kill"), ("broker", "freeze")} <= ways


def test_three_hundred_faults_use_every_point_and_every_worker() -> None:
    faults = plan(3, 300, MIX)
    assert Counter(fault.victim for fault in faults) == shares(MIX.victims, 300)
    parts = {point for point in POINTS if not point.startswith("export.")}  # no part of a run
    assert {fault.point for fault in faults if fault.point} == parts
    assert {fault.process for fault in faults if fault.victim == "worker"} == set(MIX.workers)
    assert {fault.effect for fault in faults if fault.kind == "point"} == {"kill", "freeze"}
    successors = {fault.successor for fault in faults if fault.effect == "freeze"}
    assert successors == {"none", "same", "other"}
    assert all(f.successor == "none" for f in faults if f.effect == "kill" or f.victim == "broker")
    assert not any(f.victim != "worker" and f.successor == "other" for f in faults)


def test_a_fault_at_a_point_names_the_variable_that_makes_it() -> None:
    for fault in plan(1, 200, MIX):
        if fault.kind == "point":
            assert fault.point in points_of(fault.victim) and fault.passage >= 1
            assert fault.variable == f"{fault.point}:{fault.effect}:{fault.passage}"
        else:
            assert fault.variable is None and fault.passage == 0


def test_shares_add_up_and_differ_by_less_than_one() -> None:
    for total in range(40):
        counts = shares({"a": 0.5, "b": 0.3, "c": 0.2}, total)
        assert sum(counts.values()) == total
        assert abs(counts["a"] - total * 0.5) < 1 and abs(counts["c"] - total * 0.2) < 1


def test_freezes_outlast_the_timeouts() -> None:
    for profile in PROFILES.values():
        for victim in VICTIMS:
            assert profile.freeze_seconds(victim, 0.0) > profile.heartbeat_timeout
            if victim != "worker":
                assert profile.freeze_seconds(victim, 0.0) > profile.transaction_timeout


def test_a_trainer_has_recovered_with_the_next_step_that_was_made_after_the_fault() -> None:
    progress = Progress()
    progress.struck(7, "trainer", ["trainer"], now=10.0, now_ms=1_000)
    assert fold(progress, step(1, 999), 11.0) == []
    assert fold(progress, step(1, 1_500, kind="set_aside"), 12.0) == []
    assert fold(progress, start("g0/0", "w0", 1_500), 13.0) == []
    assert fold(progress, step(2, 1_501), 14.5) == [7]
    assert progress.recovered == {7: 4.5}
    assert progress.awaited == []


def test_a_worker_has_recovered_with_what_it_lost_or_with_its_next_trajectory() -> None:
    progress = Progress()
    fold(progress, start("g0/0", "w0", 1), 1.0)
    fold(progress, start("g1/0", "w1", 1), 1.0)
    progress.struck(0, "worker", ["w0"], now=10.0, now_ms=1_000)
    progress.struck(1, "worker", ["w1", "w1-1"], now=10.0, now_ms=1_000)
    assert fold(progress, trajectory("g9/0", "w2", 1_100), 11.0) == []
    assert fold(progress, start("g0/0", "w2", 1_100, attempt=1), 11.5) == []
    assert fold(progress, trajectory("g0/0", "w2", 1_200, resumed_tokens=2), 12.0) == [0]
    assert fold(progress, trajectory("g5/0", "w1-1", 1_300), 13.0) == [1]
    assert progress.takeovers == 1
    assert progress.resumed_tokens == 2


def test_a_worker_that_held_nothing_has_recovered_when_it_speaks_again() -> None:
    progress = Progress()
    progress.struck(0, "worker", ["w0", "w0-0"], now=10.0, now_ms=1_000)
    assert fold(progress, status("w0", 1_000), 11.0) == []
    assert fold(progress, status("w1", 1_100), 12.0) == []
    assert fold(progress, status("w0-0", 1_200), 13.0) == [0]
    fold(progress, start("g0/0", "w1", 1_300), 14.0)
    progress.struck(1, "worker", ["w1"], now=20.0, now_ms=2_000)
    assert fold(progress, status("w1", 2_100), 21.0) == []


def test_a_coordinator_has_recovered_with_a_decision_and_a_broker_with_any_record() -> None:
    progress = Progress()
    progress.struck(0, "coordinator", ["coordinator"], now=0.0, now_ms=1_000)
    progress.struck(1, "broker", ["broker"], now=0.0, now_ms=1_000)
    assert fold(progress, trajectory("g0/0", "w0", 1_001), 2.0) == [1]
    assert fold(progress, admission(0, 1_002), 3.0) == [0]
    assert progress.recovered == {0: 3.0, 1: 2.0}


def test_groups_are_outstanding_until_a_step_names_them_in_whatever_order_they_are_read() -> None:
    progress = Progress()
    fold(progress, admission(0, 1), 1.0)
    fold(progress, step(1, 2, "g0", "g1"), 1.0)
    fold(progress, admission(1, 1), 1.0)
    fold(progress, admission(2, 3), 1.0)
    assert progress.outstanding == {"g2"}
    assert progress.ordinals == [0, 1, 2]
    assert progress.newest == 1


def test_only_the_first_finished_record_counts() -> None:
    progress = Progress()
    fold(progress, trajectory("g0/0", "w0", 1), 1.0)
    fold(progress, trajectory("g0/0", "w1", 2, resumed_tokens=1), 1.0)
    assert (progress.trajectories, progress.surplus, progress.resumed_tokens) == (1, 1, 0)


AUDIT = {
    "groups_started": 3,
    "groups_trained": 2,
    "groups_set_aside": 1,
    "groups_outstanding": 0,
    "max_staleness": 1,
    "duplicates_ignored": 4,
    "violations": {"lost": 0, "duplicated": 0},
    "findings": [],
    "notes": [],
}


def findings() -> Findings:
    faults = plan(0, 3, Mix({"worker": 1.0}, {"worker": {"kill": 1.0}}, ("w0",), 0.0))
    outcomes = [Outcome(fault, at=1.0, recovery=float(i + 1)) for i, fault in enumerate(faults)]
    return Findings(
        seed=0, engine="emulated", outcomes=outcomes, audit=AUDIT, max_staleness_allowed=1,
        conservation=conservation(AUDIT, [0, 1, 2]),
        redo={"identical": True, "steps": 1, "differing": []},
    )  # fmt: skip


def test_a_run_in_which_nothing_was_found_passes_and_its_report_says_so() -> None:
    report = findings().to_json()
    assert report["passed"] and report["conserved"] and report["redo_identical"]
    assert report["faults"] == {"kill": 3, "freeze": 0, "point": 0}
    assert report["faults_by_victim"] == {"trainer": 0, "coordinator": 0, "worker": 3, "broker": 0}
    assert (report["recovery_seconds_median"], report["recovery_seconds_max"]) == (2.0, 3.0)
    assert report["violations"] == AUDIT["violations"]
    assert [entry["recovery_seconds"] for entry in report["list"]] == [1.0, 2.0, 3.0]
    assert any("chaos passed" in line for line in summary(report))


def broken(found: Findings, what: str) -> None:
    match what:
        case "violation":
            found.audit = {**AUDIT, "violations": {"lost": 1, "duplicated": 0}}
        case "staleness":
            found.audit = {**AUDIT, "max_staleness": 2}
        case "not conserved":
            found.conservation = Conservation(3, 2, 0, 0, 0, 0)
        case "prompt skipped":
            found.conservation = conservation(AUDIT, [0, 1, 3])
        case "prompt repeated":
            found.conservation = conservation(AUDIT, [0, 1, 1])
        case "groups that the audit does not know":
            found.conservation = conservation(AUDIT, [0, 1, 2, 3])
        case "redo":
            found.redo = {"identical": False, "steps": 1, "differing": [{}]}
        case "no redo":
            found.redo = None
        case "no audit":
            found.audit = None
        case "not recovered":
            found.outcomes[1].recovery = None
        case "failure":
            found.failures.append("the run hung")


@pytest.mark.parametrize(
    "what",
    [
        "violation",
        "staleness",
        "not conserved",
        "prompt skipped",
        "prompt repeated",
        "groups that the audit does not know",
        "redo",
        "no redo",
        "no audit",
        "not recovered",
        "failure",
    ],
)
def test_a_run_fails_for(what: str) -> None:
    found = findings()
    broken(found, what)
    report = found.to_json()
    assert not found.passed and not report["passed"]
    assert any("chaos FAILED" in line for line in summary(report))


def test_a_run_that_failed_early_still_has_a_report() -> None:
    faults: list[Fault] = plan(0, 5, MIX)
    found = Findings(0, "emulated", [Outcome(f) for f in faults], failures=["no broker"])
    report = found.to_json()
    assert report["violations"] is None and not report["conserved"]
    assert not report["redo_identical"] and report["recovery_seconds_max"] is None
    assert "failure: no broker" in summary(report)


def fault(number: int, process: str, point: Any = None, delay: float = 0.0) -> Fault:
    victim: Any = "worker" if process.startswith("w") else process
    kind: Any = "point" if point else "kill"
    return Fault(number, victim, process, kind, "kill", point, 1, delay, "none", 0.0)


def test_a_victim_that_is_not_well_is_left_alone_and_overtaken_by_the_next() -> None:
    first, second, third = fault(0, "trainer"), fault(1, "trainer"), fault(2, "w0")
    agenda = Agenda([first, second, third], at_once=2)
    agenda.begin(("trainer", "w0"), now=0.0)
    assert agenda.take(set(), 0.0) is first
    agenda.made(first)
    assert agenda.take({"trainer"}, 0.0) is third
    agenda.made(third)
    assert agenda.take({"trainer", "w0"}, 0.0) is None
    agenda.settle({"w0"}, 5.0)
    assert agenda.take({"w0"}, 5.0) is second
    assert agenda.done


def test_a_fault_waits_for_its_delay_after_its_victim_has_become_well() -> None:
    first, second = fault(0, "w0", delay=1.0), fault(1, "w0", delay=2.0)
    agenda = Agenda([first, second], at_once=1)
    agenda.begin(("w0",), now=10.0)
    assert agenda.take(set(), 10.9) is None
    assert agenda.take(set(), 11.0) is first
    agenda.made(first)
    agenda.settle(set(), 20.0)
    assert agenda.take(set(), 21.9) is None
    assert agenda.take(set(), 22.0) is second


def test_no_more_victims_are_struck_at_once_than_wanted_armed_ones_aside() -> None:
    armed, kill, late = (
        fault(0, "trainer", "trainer.weights_stored"),
        fault(1, "w0"),
        fault(2, "w1"),
    )
    agenda = Agenda([armed, kill, late], at_once=1)
    agenda.begin(("trainer", "w0", "w1"), now=0.0)
    assert agenda.take(set(), 0.0) is armed
    assert agenda.take({"trainer"}, 0.0) is kill
    agenda.made(kill)
    assert agenda.take({"trainer", "w0"}, 0.0) is None


def test_a_process_that_starts_anyway_is_armed_with_its_next_fault_until_that_has_happened() -> (
    None
):
    kill, point = fault(0, "trainer"), fault(1, "trainer", "trainer.inside_transaction")
    agenda = Agenda([kill, point], at_once=3)
    agenda.begin(("trainer",), now=0.0)
    assert agenda.arm("trainer", 0.0) is None  # the kill comes first
    assert agenda.take(set(), 0.0) is kill
    agenda.made(kill)
    assert agenda.arm("trainer", 1.0) is point
    assert agenda.arm("trainer", 2.0) is point  # it ended for another reason before
    assert not agenda.done
    assert agenda.overdue(10.0, seconds=20.0) is None
    assert agenda.overdue(30.0, seconds=20.0) is point
    agenda.made(point)
    assert agenda.done
    assert agenda.arm("trainer", 3.0) is None
