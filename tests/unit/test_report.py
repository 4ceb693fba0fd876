"""The report of a made-up run: its numbers, its timeline, its incidents, and its page."""

from dataclasses import replace

import numpy as np
import pytest

from dora.consumers.report.charts import outlines, stretches
from dora.consumers.report.data import Difference, RunReport, differing, flattened, other_task
from dora.consumers.report.page import VERSIONS_SHOWN, key_numbers, render, shown_versions
from dora.consumers.report.statistics import CURVE_POINTS
from dora.consumers.report.svg import compact, duration, short, size
from dora.consumers.report.timeline import TimelineFold, natural
from dora.log.incidents import EVENTS_KEPT, IncidentTally, RecentIncidents
from dora.log.schedule_log import Occupancy
from dora.schemas.records import Command, CommandKind, DeadLetter
from tests.pages import parsed
from tests.report_runs import K, MadeUpRun, clean_audit

HOSTILE = "<script>alert('x')</script>&$x_{1}$\"'"


@pytest.fixture(scope="module")
def run() -> MadeUpRun:
    return MadeUpRun()


@pytest.fixture(scope="module")
def report(run: MadeUpRun) -> RunReport:
    return run.report()


def test_the_numbers_are_those_of_the_records(run: MadeUpRun, report: RunReport) -> None:
    numbers, records = report.numbers, list(run.trajectories())
    trained = [each for each in records if each.purpose == "train"]
    assert (numbers.steps, numbers.trajectories) == (12, len(records))
    assert numbers.tokens == sum(each.generated_tokens for each in records)
    assert numbers.groups_trained == 48
    assert numbers.groups_set_aside == 2
    assert (numbers.max_staleness, numbers.staleness_bound) == (K, K)
    assert numbers.success_source == "evaluation"
    last = [each.reward for each in records if each.purpose == "eval" and each.policy_version == 12]
    assert numbers.success_last == pytest.approx(sum(filter(None, last)) / len(last))
    assert report.lengths.total == sum(tail.lengths.count for tail in report.tails) == len(trained)
    assert sum(report.staleness.values()) == 48
    assert [point.step for point in report.success] == list(range(1, 13))
    assert [point.step for point in report.evaluations] == [0, 4, 8, 12]
    assert all(p.low is not None and p.low <= p.value <= (p.high or 0) for p in report.reward)


def test_generated_tokens_are_spread_over_time_without_loss(report: RunReport) -> None:
    width = 2 * report.generated[0][0]
    spread = sum(rate for _, rate in report.generated[:-1]) * width
    last, rate = report.generated[-1]
    spread += rate * 2 * (last - width * (len(report.generated) - 1))
    assert spread == pytest.approx(report.numbers.tokens)


def test_rewards_have_no_band_where_trajectories_are_gone(run: MadeUpRun) -> None:
    class Forgetful(MadeUpRun):
        def trajectories(self):  # type: ignore[no-untyped-def]
            return (t for t in super().trajectories() if t.ordinal >= 4 or t.purpose == "eval")

    whole = run.ledger()
    gone = Forgetful()
    gone.ledger = lambda: whole  # type: ignore[method-assign]
    found = gone.report()
    assert [point.low is None for point in found.reward[:2]] == [True, False]
    assert found.success[0].low is not None, "the ledger has the number of trajectories"


def test_incidents_are_counted_by_what_was_done_about_them(report: RunReport) -> None:
    counts = report.incidents.counts
    assert counts["takeover"] > 0 and counts["migration"] > 0
    again = sum(event.text.count("#1 goes on at") for event in report.incidents.events)
    assert again == counts["takeover"]
    assert (counts["trainer"], counts["coordinator"], counts["dead letter"]) == (1, 1, 1)
    assert counts["set aside"] == report.numbers.groups_set_aside
    assert report.incidents.reasons["set aside"] == (("no signal", 2),)
    times = [event.at_ms for event in report.incidents.events]
    assert times == sorted(times)


def test_the_orders_at_the_end_of_a_run_are_no_incidents() -> None:
    tally, recent = IncidentTally(), RecentIncidents()
    endings: tuple[CommandKind, ...] = ("yield", "stop")
    orders = [
        Command("r", "w0", "i", kind, 1, trajectory_id="g0/0", reason="the run is complete")
        for kind in endings
    ]
    for order in orders:
        tally.handle(order)
        recent.handle(order)
    assert tally.incidents().total == 0
    assert recent.newest() == ()
    early = replace(orders[0], reason="another worker took over")
    tally.handle(early)
    recent.handle(early)
    assert tally.incidents().counts == {"superseded": 1}
    assert [each.kind for each in recent.newest()] == ["taken back"]


def test_of_many_incidents_all_are_counted_and_the_first_are_kept() -> None:
    tally = IncidentTally()
    for number in range(1_000):
        tally.handle(DeadLetter("r", "code", "why " + "x" * (number % 30), "w0", number))
    found = tally.incidents()
    assert found.total == 1_000
    assert len(found.events) == EVENTS_KEPT
    assert sum(count for _, count in found.reasons["dead letter"]) == 1_000
    assert found.reasons["dead letter"][-1][0] == "other reasons"


def test_many_workers_and_versions_are_added_up_and_none_is_left_out() -> None:
    names = [f"w{number}" for number in range(150)]
    tally = TimelineFold(names, 499, 0, 100_000, rows=64, bins=50, colours=48)
    for number, name in enumerate(names):
        tally.add([Occupancy(name, (7 * number) % 500, 1_000 * (number % 90), 100_000)])
    line = tally.timeline()
    assert (len(line.rows), line.workers, line.versions_per_block) == (50, 150, 11)
    assert line.rows[0].label == "w0 … w2" and line.rows[-1].label == "w147 … w149"
    shown = sum(float(np.sum(cell)) for row in line.rows for cell in row.running.values())
    assert shown * line.bin_seconds == pytest.approx(sum(100 - n % 90 for n in range(150)))
    with pytest.raises(ValueError, match="stranger"):
        tally.add([Occupancy("stranger", 0, 0, 1)])


def test_workers_are_sorted_as_people_count() -> None:
    assert sorted(["w10", "w2", "a", "w1b"], key=natural) == ["a", "w1b", "w2", "w10"]


def test_stretches_of_a_timeline_are_its_true_bins() -> None:
    assert list(stretches(np.array([True, True, False, True]))) == [(0, 2), (3, 4)]
    assert list(stretches(np.zeros(3, dtype=np.bool_))) == []


def test_the_area_that_is_drawn_is_what_was_generated(report: RunReport) -> None:
    line = report.timeline

    def area(corners: np.ndarray) -> float:
        xs, ys = corners.T
        return abs(float(np.dot(xs, np.roll(ys, 1)) - np.dot(ys, np.roll(xs, 1)))) / 2

    drawn = sum(area(corners) for shapes in outlines(line, 1.0).values() for corners in shapes)
    there = sum(float(np.sum(cell)) for row in line.rows for cell in row.running.values())
    assert drawn == pytest.approx(0.84 * there * line.bin_seconds / line.most_running, rel=0.01)


def test_configurations_are_compared_key_by_key() -> None:
    first = flattened('{"run": {"name": "a"}, "window": {"k": 1}, "task": {"name": "x", "p": {}}}')
    second = flattened('{"run": {"name": "b"}, "window": {"k": 2, "b": 4}, "task": {"name": "y"}}')
    assert first["task.p"] == "{}"
    assert differing(first, second) == [
        Difference("task.name", '"x"', '"y"'),
        Difference("task.p", "{}", None),
        Difference("window.b", None, "4"),
        Difference("window.k", "1", "2"),
    ]
    assert other_task(first, second) and not other_task(first, first)
    assert flattened("") == flattened("no json") == flattened("[1]") == {}


def test_a_long_run_has_bounded_curves_and_tables() -> None:
    long = MadeUpRun(steps=700, groups=1, size=1, evaluate_every=1_000).report()
    assert len(long.success) <= CURVE_POINTS and len(long.reward) <= CURVE_POINTS
    assert len(long.times) <= 120
    assert long.success[-1].step == 700
    assert len(long.timeline.rows) == 4 and long.timeline.versions_per_block > 1
    rows = shown_versions(long)
    assert len(rows) == VERSIONS_SHOWN
    assert (rows[0].version, rows[-1].version) == (0, 700)


def test_what_records_say_is_text_in_the_page_and_never_markup() -> None:
    run = MadeUpRun(steps=2, hostile=HOSTILE, workers=70)
    page = render([run.report()])
    assert "<script" not in page
    found = parsed(page)
    assert found.text.count("alert('x')") >= 5
    assert found.row("1")[2] == f"{1:064x}"[:12], "the checksum of version 1"
    assert f"began {2025}" in found.text


def test_two_runs_are_compared_in_one_page(report: RunReport) -> None:
    other = MadeUpRun(name="other", steps=3, config={"task": {"kind": "jsonl", "path": "x"}})
    page = render([replace(report, audit=clean_audit(report)), other.report()])
    found = parsed(page)
    assert found.row("Steps") == ["12", "3", "−9 (−75.0 %)"]
    assert found.row("task.kind") == ['"reasoning-gym"', '"jsonl"']
    assert "different tasks" in found.text
    assert "Audit: every rule was kept" in found.text and "not audited" in found.text
    assert len(page) < 1_000_000


def test_a_run_without_a_step_has_a_page_that_says_so() -> None:
    empty = MadeUpRun(steps=0, groups=0, evaluate_every=1).report()
    assert empty.numbers.step_seconds is None
    text = parsed(render([empty])).text
    assert "No step was committed yet" in text


def test_numbers_without_a_value_read_as_a_dash(report: RunReport) -> None:
    unknown = replace(report.numbers, success_first=None, tokens_per_second=None)
    shown = {each.label: each for each in key_numbers([unknown, report.numbers])}
    assert shown["Success first"].values[0] == "–"
    assert shown["Success first"].difference == ""
    assert shown["Steps"].difference == "±0 (+0.0 %)"


def test_numbers_read_well() -> None:
    assert [compact(v) for v in (0, 0.01234, 999.5, 1234, 15_300, 2.5e6)] == [
        "0", "0.0123", "1e+03", "1,234", "15.3k", "2.5M",
    ]  # fmt: skip
    assert [duration(v) for v in (0.02, 12.3, 245, 11_520, 190_000)] == [
        "20 ms", "12.3 s", "4 min 05 s", "3 h 12 min", "2 d 4 h",
    ]  # fmt: skip
    assert [size(v) for v in (12, 2048, 3 * 2**30)] == ["12 B", "2.0 KiB", "3.0 GiB"]
    assert short("a" * 20 + "-0123456", 20) == "aaaaaaaaaaa…-0123456"
