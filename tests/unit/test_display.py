"""A run as seen from its records: figures, health, picture, lines, summary."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from dora.bus.reader import Message, Unreadable
from dora.cli.display.display import PlainDisplay, learning_curve, render
from dora.cli.display.parts import duration
from dora.cli.run.supervisor import ChildView
from dora.cli.tail.lines import as_line, as_object, version_of
from dora.consumers.monitor.run_view import RunView
from dora.consumers.monitor.snapshot import Snapshot
from dora.consumers.monitor.summary import summarize, write_summary
from dora.core.groups import CommonReason
from dora.schemas.records import Command, DeadLetter, GroupRef, Record, RunStarted, Step
from tests.factories import admission, places_of, policy, run_started, status, step, trajectory


def message(value: Record | Unreadable, offset: int = 0, topic: str = "r.x") -> Message:
    return Message(topic, 0, offset, None, 0, {}, value)


def fold(*records: Record | Unreadable, target: int | None = None) -> RunView:
    view = RunView("r", steps_target=target)
    for offset, record in enumerate(records):
        view.handle(message(record, offset))
    return view


def two_steps(*, evaluated: bool = True) -> list[Record]:
    """Versions 0 to 2; the third pair of groups is half done."""
    groups = [admission(0, 0), admission(1, 0), admission(2, 1), admission(3, 1), admission(4, 2)]
    records: list[Record] = [run_started(at=1_000), policy(0), *groups[:2]]
    if evaluated:
        records += [admission(0, 0, purpose="eval"), admission(1, 0, purpose="eval")]
        records += [
            trajectory(admission(0, 0, purpose="eval"), reward=0.0, at=2_000),
            trajectory(admission(1, 0, purpose="eval"), reward=None, at=2_000),
        ]
    records += [trajectory(group, sample, at=9_000) for group in groups[:2] for sample in (0, 1)]
    records.append(
        step(
            0,
            0,
            groups[:2],
            places_of(records),
            at=11_000,
            success_rate=0.25,
            reward_mean=0.3,
            staleness_max=0,
            live_versions=1,
            idle_seconds=6.0,
            train_seconds=3.0,
            publish_seconds=1.0,
            step_seconds=10.0,
            tokens=12,
            logprob_mismatch_mean=0.001,
        )
    )
    records += [policy(1), *groups[2:4]]
    records += [trajectory(group, sample, at=19_000) for group in groups[2:4] for sample in (0, 1)]
    records.append(
        step(
            1,
            1,
            groups[2:4],
            places_of(records),
            at=21_000,
            success_rate=0.75,
            reward_mean=0.8,
            staleness_max=1,
            live_versions=2,
            idle_seconds=0.0,
            train_seconds=9.0,
            publish_seconds=1.0,
            step_seconds=10.0,
            tokens=36,
            logprob_mismatch_mean=0.003,
        )
    )
    records += [policy(2), groups[4], trajectory(groups[4], 0, at=21_500)]
    if evaluated:
        records += [
            admission(0, 2, purpose="eval"),
            trajectory(admission(0, 2, purpose="eval"), reward=1.0, at=22_000),
        ]
    return records


def alive(at: int) -> list[Record]:
    return [
        status("trainer", "waiting", at=at, message="5 of 32 groups finished"),
        status("coordinator", at=at),
        status("w0", at=at, version=2, capacity=8, running=("g4/1#0",)),
    ]


def drawn(snapshot: Snapshot, children: tuple[ChildView, ...] = ()) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(render(snapshot, children))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_snapshot_counts_what_the_log_holds() -> None:
    snapshot = fold(*two_steps(), *alive(23_000), target=4).snapshot(23_500)
    assert snapshot.health == "running"
    assert (snapshot.step, snapshot.newest, snapshot.steps_target) == (2, 2, 4)
    assert (snapshot.groups_outstanding, snapshot.groups_capacity) == (1, 4)
    assert (snapshot.trajectories, snapshot.tokens) == (12, 36)
    assert snapshot.trainer_idle_share == pytest.approx(0.3)
    assert snapshot.logprob_mismatch_mean == pytest.approx((0.001 * 12 + 0.003 * 36) / 48)
    assert (snapshot.staleness_max, snapshot.live_versions_max) == (1, 2)
    assert snapshot.tokens_trained_per_second == pytest.approx(48 / 20)
    assert snapshot.tokens_generated_per_second == pytest.approx(36 / 21.5)
    (backlog,) = snapshot.versions
    assert (backlog.version, backlog.groups_unfinished, backlog.trajectories_unfinished) == (
        2,
        1,
        1,
    )
    assert backlog.workers == 1
    assert [point.success_rate for point in snapshot.evaluations] == [0.0, 1.0]
    json.dumps(dataclasses.asdict(snapshot))


def test_topics_may_be_read_in_any_order() -> None:
    records = two_steps()
    view = RunView("r")
    ledger = [i for i, r in enumerate(records) if isinstance(r, RunStarted | Step)]
    for offset in ledger + [i for i in range(len(records)) if i not in ledger]:
        view.handle(message(records[offset], offset))
    assert view.snapshot(30_000) == fold(*records).snapshot(30_000)


@pytest.mark.parametrize("identity", ["[]", "no json", '{"task": 1}'])
def test_a_foreign_identity_does_not_end_the_view(identity: str) -> None:
    first, *rest = two_steps()
    assert isinstance(first, RunStarted)
    snapshot = fold(dataclasses.replace(first, identity=identity), *rest).snapshot(23_500)
    assert (snapshot.step, snapshot.problems) == (2, ())
    assert [point.successes for point in snapshot.evaluations] == [0, 1], "the threshold is 1"


def test_an_empty_log_is_not_started() -> None:
    snapshot = fold().snapshot(0)
    assert snapshot.health == "not started"
    assert "not started" in drawn(snapshot)


@pytest.mark.parametrize(
    ("statuses", "now", "reason"),
    [
        ([], 23_000, "no process has reported"),
        ([status("coordinator", at=22_000), status("w0", at=22_000)], 23_000, "no trainer process"),
        (alive(22_000), 60_000, "trainer silent for 38 s"),
        ([*alive(22_000), status("trainer", "failed", message="out of memory")], 23_000, "memory"),
        (
            [*alive(22_000), status("w0", "stopped", at=22_000)],
            23_000,
            "no rollout worker is alive",
        ),
        (alive(120_000), 121_000, "no step for 100 s (a step takes 10 s otherwise); the trainer"),
    ],
)
def test_a_stalled_run_is_called_stalled_and_why(
    statuses: list[Record], now: int, reason: str
) -> None:
    snapshot = fold(*two_steps(), *statuses).snapshot(now)
    assert snapshot.health == "stalled"
    assert reason in "; ".join(snapshot.reasons)
    assert reason.split(";")[0] in drawn(snapshot)


def test_processes_that_were_just_launched_are_given_time_to_load() -> None:
    gone = [status(name, "stopped", at=22_000) for name in ("trainer", "coordinator", "w0")]
    view = RunView("r", launched_ms=50_000)
    for record in [*two_steps(), *gone, status("coordinator", at=60_000)]:
        view.handle(message(record))
    snapshot = view.snapshot(61_000)
    assert snapshot.health == "starting"
    assert snapshot.reasons == (
        "waiting for the trainer process",
        "waiting for the rollout process",
    )
    for record in alive(70_000):
        view.handle(message(record))
    assert view.snapshot(71_000).health == "running"
    assert view.snapshot(900_000).health == "stalled"


def test_loading_weights_is_not_silence() -> None:
    loading = [*alive(22_000)[:2], status("w0", "loading", at=22_000)]
    view = RunView("r", heartbeat_timeout=30, load_timeout=600)
    for record in [*two_steps(), *loading]:
        view.handle(message(record))
    assert [p.silent for p in view.snapshot(60_000).processes] == [True, True, False]


def test_an_ended_process_keeps_its_totals_and_no_figure_of_the_present() -> None:
    figures = {"outstanding": 4.0, "tokens_per_second": 9.0, "takeovers_total": 1.0}
    view = RunView("r", heartbeat_timeout=30, load_timeout=600)
    for state, kept in (("ready", figures), ("stopped", {"takeovers_total": 1.0})):
        view.handle(message(status("w0", state, at=22_000, metrics=figures)))
        assert view.snapshot(23_000).processes[0].metrics == kept


def test_after_the_last_step_the_trainer_may_be_gone_while_the_rest_evaluates() -> None:
    statuses = [*alive(22_000), status("trainer", "stopped", at=22_000)]
    assert fold(*two_steps(), *statuses, target=2).snapshot(23_000).health == "running"


def test_a_finished_run_is_complete_and_a_stopped_one_is_not() -> None:
    over = [status(name, "stopped", at=22_000) for name in ("trainer", "coordinator", "w0")]
    assert fold(*two_steps(), *over, target=2).snapshot(90_000).health == "complete"
    assert fold(*two_steps(), *over, target=9).snapshot(90_000).health == "stopped"


def test_contradictions_and_unreadable_records_are_shown_and_survived() -> None:
    view = fold(
        run_started(),
        admission(5, 0),
        admission(5, 0),
        Unreadable("truncated", "8 bytes are missing", b"x"),
        status("trainer", at=10),
        admission(6, 0),
    )
    snapshot = view.snapshot(100)
    assert snapshot.groups_outstanding == 2
    assert snapshot.unreadable == 1
    assert "r.x[0]@2: group g5 is admitted a second time" in snapshot.problems[0]
    assert "8 bytes are missing" in drawn(snapshot)


def test_the_picture_holds_every_process_and_its_child() -> None:
    snapshot = fold(*two_steps(), *alive(22_000), target=4).snapshot(23_000)
    children = (
        ChildView("w0", "restarting", None, 2, "signal SIGKILL"),
        ChildView("w1", "running", 17, 0, ""),
    )
    picture = drawn(snapshot, children)
    for part in ("step 2/4", "restarting", "[restarts: 2] signal SIGKILL", "w1", "1 of 4 groups"):
        assert part in picture
    assert "held-out success 0.000 → 1.000 (v2)" in picture


def test_plain_lines_tell_each_step_evaluation_and_change_once() -> None:
    stream = io.StringIO()
    display = PlainDisplay(Console(file=stream, width=40))
    display.update(fold().snapshot(0), ())
    view = fold(*two_steps(), *alive(22_000), target=4)
    for _ in range(3):
        display.update(view.snapshot(23_000), ())
    view.handle(message(status("w0", "failed", at=22_500, message="canary differs")))
    display.update(view.snapshot(23_000), ())
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith(
        "step 1/4  success 0.250  reward 0.300  truncated 0%  unscored 0%  stale 0.00  live 1"
    )
    assert sum(line.startswith("step ") for line in lines) == 2
    assert "evaluation of version 2: success 1.000 of 1 held-out prompts" in lines
    assert lines[-2:] == [
        "w0 failed: canary differs",
        "stalled: no rollout worker is alive; w0 failed: canary differs (pid 0); "
        "version 2 waits for group g4, sample 1, which no worker holds: no worker hosts version 2; "
        "13 s without a chunk (no attempt yet)",
    ]


def test_plain_lines_of_a_run_that_goes_on_pass_over_what_was_done_before() -> None:
    stream = io.StringIO()
    display = PlainDisplay(Console(file=stream, width=40))
    gone = [status(name, "stopped", at=22_000) for name in ("trainer", "coordinator", "w0")]
    view = RunView("r", steps_target=4, launched_ms=30_000)
    for offset, record in enumerate([*two_steps(), *gone]):
        view.handle(message(record, offset))
    display.update(view.snapshot(31_000), ())
    view.handle(message(status("w0", "starting", at=32_000)))
    display.update(view.snapshot(33_000), ())
    assert stream.getvalue().splitlines() == [
        "the run goes on after step 2/4  success 0.750  reward 0.800  "
        "truncated 0%  unscored 0%  stale 0.00  live 2  "
        "tok/s 4  mismatch 3.0e-03",
        "w0 starting",
    ]


def test_the_learning_curve_rises_with_success() -> None:
    lines = learning_curve(fold(*two_steps()).snapshot(0), height=4)
    bars = [line.partition("│")[2] for line in lines[1:5]]
    assert bars == [" █", " █", " █", "██"] or bars == [" █", " █", "██", "██"]
    assert learning_curve(fold(run_started()).snapshot(0)) == []


def test_the_summary_measures_learning_on_held_out_prompts(tmp_path: Path) -> None:
    summary = summarize(fold(*two_steps()).snapshot(99_000))
    assert summary["success_source"] == "evaluation"
    assert (summary["success_first"], summary["success_last"]) == (0.0, 1.0)
    assert summary["wall_seconds"] == pytest.approx(21.0)
    assert (summary["steps"], summary["trajectories"], summary["tokens"]) == (2, 12, 36)
    assert (summary["max_staleness"], summary["live_versions_max"]) == (1, 2)
    assert [point["success"] for point in summary["curve"]] == [0.25, 0.75]
    path = write_summary(summary, tmp_path / "runs" / "r")
    assert json.loads(path.read_text()) == summary
    assert [entry.name for entry in path.parent.iterdir()] == ["summary.json"]


def test_without_evaluation_the_summary_measures_training() -> None:
    summary = summarize(fold(*two_steps(evaluated=False)).snapshot(99_000))
    assert summary["success_source"] == "training"
    assert (summary["success_first"], summary["success_last"]) == (0.25, 0.75)


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (trajectory(admission(3, 1), 1), "trajectory g3/1#0  v1  stop  3 tokens  reward 1  w0"),
        (trajectory(admission(3, 1), reward=None), "error: verifier timed out"),
        (run_started(), "K=1 B=2 G=2"),
        (policy(4), "policy v4"),
        (admission(3, 1), "admit g3  v1"),
        (status("w0", message="hosting"), "w0 ready  hosting"),
        (Command("r", "w0", "i", "switch", 0, policy_version=3), "switch → w0  v3"),
        (DeadLetter("r", "truncated", "short", "trainer", 0, "r.t", 1, 7), "r.t[1]@7"),
        (Unreadable("bad_magic", "no record", b"x"), "unreadable (bad_magic): no record"),
    ],
)
def test_every_record_has_a_line_and_an_object(record: Record | Unreadable, line: str) -> None:
    assert line in as_line(message(record, 5))
    assert "\n" not in as_line(message(record, 5))
    decoded = json.loads(json.dumps(as_object(message(record, 5))))
    assert decoded["type"] == type(record).__name__
    assert decoded["offset"] == 5


def test_objects_hold_tokens_as_numbers() -> None:
    record = as_object(message(trajectory(admission(3, 1))))["record"]
    assert record["token_ids"] == [7, 8, 1, 2, 3]
    assert record["mask"] == [0, 0, 1, 1, 1]
    assert record["logprobs"] == [0, 0, -1, -1, -1]
    assert version_of(trajectory(admission(3, 1))) == 1


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def set_aside(ordinal: int, reason: str) -> Step:
    refs = (GroupRef(f"g{ordinal}", ordinal, 0, (), reason),)
    made = step(ordinal, 0, (), {}, at=2_000)
    return dataclasses.replace(made, kind="set_aside", version_out=0, set_aside=refs)


def test_the_commonest_reasons_of_what_fails_are_shown_with_their_counts() -> None:
    reasons = [
        "verifier_raised: KeyError: 'x' in row 1",
        "no_signal",
        "verifier_raised: KeyError: 'x' in row 2",
    ]
    records: list[Record] = [run_started(at=1_000), policy(0)]
    records += [admission(ordinal, 0) for ordinal in range(3)]
    records += [set_aside(ordinal, reason) for ordinal, reason in enumerate(reasons)]
    records += [DeadLetter("r", "stalled", f"no token for {n} s", "w0", n) for n in range(2)]
    snapshot = fold(*records).snapshot(3_000)
    assert snapshot.set_aside_reason == CommonReason(reasons[0], 2, 3)
    text = " ".join(drawn(snapshot).split())
    assert "groups set aside, 2 of 3 because of: verifier_raised: KeyError: 'x' in row 1" in text
    assert "dead letters, 2 of 2 because of: stalled: no token for 0 s" in text
    out = io.StringIO()
    plain = PlainDisplay(Console(file=out, width=200))
    for _ in range(2):
        plain.update(snapshot, ())
    assert out.getvalue().count("groups set aside, 2 of 3 because of") == 1


def test_the_curve_of_a_run_without_success_shows_the_reward() -> None:
    records = [run_started(at=1_000), policy(0), admission(0, 0)]
    records.append(step(0, 0, [], {}, at=2_000, success_rate=0.0, reward_mean=-0.5))
    lines = learning_curve(fold(*records).snapshot(3_000))
    assert lines[0] == "reward in training, by step"
    assert lines[-3].startswith(" -0.4")


def test_a_worker_that_stopped_reporting_is_called_quiet_before_it_counts_as_lost() -> None:
    records = [*two_steps(), *alive(22_000)]
    snapshot = fold(*records).snapshot(24_000)
    assert not any(process.quiet for process in snapshot.processes)
    late = fold(*records).snapshot(34_000)
    assert {p.process for p in late.processes if p.quiet and p.alive} == {
        "trainer", "coordinator", "w0",
    }  # fmt: skip
    assert "quiet" in drawn(late) and "not heard for 12 s" in drawn(late)
    lost = fold(*records).snapshot(60_000)
    assert not any(process.quiet for process in lost.processes)
    loading = fold(*two_steps(), status("w0", "loading", at=22_000)).snapshot(34_000)
    assert not loading.processes[0].quiet, "it has no time to report"


def test_a_slow_verifier_is_named_as_what_the_trainer_waits_for() -> None:
    trainer, coordinator, _ = alive(22_000)
    busy = status(
        "w0", at=22_000, version=2, capacity=8, running=("g4/1#0", "g4/0#0", "g5/0#0"),
        metrics={"scoring": 2.0},
    )  # fmt: skip
    text = " ".join(drawn(fold(*two_steps(), trainer, coordinator, busy).snapshot(23_000)).split())
    assert "the trainer waits for the verifier: 2 of 3 responses at work" in text
    assert "(w0: 2); more task.verifier_processes" in text
    assert "verifier" not in drawn(fold(*two_steps(), *alive(22_000)).snapshot(23_000))
    training = status("trainer", "training", at=22_000)
    assert "verifier" not in drawn(fold(*two_steps(), training, busy).snapshot(23_000))
