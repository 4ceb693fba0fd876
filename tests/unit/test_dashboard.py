"""The dashboard: fits its terminal, says what matters, also without colours and blocks."""

import io
import random
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from dora.cli.display.charts import bar, chart, condensed
from dora.cli.display.dashboard import Dashboard, merge, picture, write_svg
from dora.consumers.monitor.run_view import RunView
from dora.consumers.monitor.snapshot import Snapshot, StepPoint, VersionBacklog
from dora.log.incidents import SHOWN, RecentIncident, RecentIncidents
from dora.log.presence import ProcessView
from dora.schemas.records import Command, DeadLetter, Record, pack_logprobs, pack_tokens
from tests import factories
from tests.factories import admission, places_of, policy, run_started, status, step, trajectory
from tests.unit.test_display import alive, fold, two_steps

unhurried = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def command(kind: str, identity: str, attempt: int, *, at: int, **fields: object) -> Command:
    return factories.command(identity, "w1", kind=kind, at=at, attempt=attempt, **fields)


def incidents() -> list[Record]:
    return [
        command(
            "start", "g4/1", 1, at=21_000,
            prefix_token_ids=pack_tokens([1, 2]), prefix_logprobs=pack_logprobs([-1, -1]),
        ),
        command("start", "g4/0", 1, at=20_000),
        command("move", "g4/0", 0, at=19_000, reason="version 1 is done"),
        DeadLetter("r", "verifier_raised", "KeyError:\n'x'", "w0", 22_000, trajectory_id="g1/0"),
        status("w2", "failed", at=22_500, message="canary differs"),
    ]  # fmt: skip


def grown(processes: int = 12, steps: int = 60) -> Snapshot:
    """A large run."""
    snapshot = fold(*two_steps(), *alive(23_000), *incidents(), target=100).snapshot(23_500)
    rng = random.Random(1)
    points = tuple(
        StepPoint(
            n,
            10_000 * n,
            {"success_rate": n / steps, "reward_mean": n / 9, "loss": rng.gauss(0, 1)},
        )
        for n in range(1, steps + 1)
    )
    (worker,) = (p for p in snapshot.processes if p.process == "w0")
    workers = tuple(
        replace(worker, process=f"worker-{n}", metrics={"tokens_per_second": 1234.0})
        for n in range(processes)
    )
    versions = tuple(VersionBacklog(n, 8, 5, 37, 2 * (n == 3), 2) for n in range(4))
    return replace(
        snapshot, steps=points, newest=steps, processes=snapshot.processes + workers,
        versions=versions, groups_per_step=8, groups_outstanding=32, groups_capacity=32,
    )  # fmt: skip


def drawn(snapshot: Snapshot, width: int, height: int, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(
        file=stream, width=width, height=height, force_terminal=True, color_system=None,
        legacy_windows=False, _environ={},
    )  # fmt: skip
    console.print(Dashboard(snapshot))
    stream.flush()
    return raw.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("size", [(80, 24), (160, 50), (120, 30), (40, 10), (200, 12)])
@pytest.mark.parametrize("processes", [0, 3, 300])
def test_the_picture_fits_its_terminal(size: tuple[int, int], processes: int) -> None:
    width, height = size
    for snapshot in (grown(processes), fold(*two_steps()).snapshot(24_000), fold().snapshot(0)):
        lines = drawn(snapshot, width, height)
        assert len(lines) <= height
        assert all(len(line.rstrip("\n")) <= width for line in lines)


@given(st.integers(2, 240), st.integers(1, 80), st.integers(0, 40), st.integers(0, 80))
@unhurried
def test_it_fits_any_terminal(width: int, height: int, processes: int, steps: int) -> None:
    lines = picture(grown(processes, steps), width, height)
    assert len(lines) <= height
    assert all(line.cell_len <= width and "\n" not in line.plain for line in lines)


def test_a_small_terminal_holds_everything_that_matters() -> None:
    text = "\n".join(drawn(grown(), 80, 24))
    for part in (
        "r  running", "step 60/100", "to go", "success", "reward",
        "loss", "trainer idle", "stale 0.00", "held-out", "window: 32 of 32 groups", "v3",
        "8 groups, 3 done; 37 to go", "waiting", "coordinator", "w0",
        "more", "recent incidents", "w2: canary differs",
    ):  # fmt: skip
        assert part in text, f"{part!r} is not in\n{text}"


def test_a_large_terminal_shows_more_of_it() -> None:
    text = "\n".join(drawn(grown(), 160, 50))
    for part in (
        "worker-0", "worker-11", "1,234", "1/8", "takeover w1 g4/1: attempt 1 goes on from 2",
        "move w1 g4/0: version 1 is done", "dead letter w0 g1/0: verifier_raised: KeyError",
        "log-prob mismatch", "held-out success 0.000 → 1.000 (v2)", "2 held-out",
    ):  # fmt: skip
        assert part in text, f"{part!r} is not in\n{text}"
    assert text.count("█") > 200  # charts of several lines


def test_why_a_run_stands_still_is_said_first() -> None:
    snapshot = fold(*two_steps(), *alive(23_000)[1:]).snapshot(24_000)
    lines = drawn(snapshot, 80, 24)
    assert "stalled" in lines[0] and "no trainer process has reported" in lines[1]


def test_a_terminal_without_unicode_gets_ascii() -> None:
    lines = drawn(grown(), 80, 24, encoding="ascii")
    assert any("#" in line for line in lines) and all(line.isascii() for line in lines)


def test_what_was_moved_is_not_called_taken_over_in_any_order() -> None:
    records = incidents()
    kinds = [(each.kind, each.subject) for each in fold(*records).snapshot(0).incidents]
    assert kinds == [
        ("move", "g4/0"), ("takeover", "g4/1"), ("dead letter", "g1/0"), ("failed", ""),
    ]  # fmt: skip
    for seed in range(5):
        mixed = random.Random(seed).sample(records, len(records))
        assert [(e.kind, e.subject) for e in fold(*mixed).snapshot(0).incidents] == kinds


def test_groups_that_failed_are_incidents_and_those_without_signal_are_not() -> None:
    groups = [admission(0, 0), admission(1, 0)]
    records: list[Record] = [run_started(), policy(0), *groups]
    records += [trajectory(group, sample) for group in groups for sample in (0, 1)]
    entry = step(0, 0, groups, places_of(records))
    reasons = ("no_signal", "verifier timed out")
    aside = tuple(replace(r, reason=why) for r, why in zip(entry.trained, reasons, strict=True))
    view = RunView("r")
    tracker = RecentIncidents()
    tracker.handle(replace(entry, kind="set_aside", trained=(), set_aside=aside))
    assert [(e.kind, e.subject, e.text) for e in tracker.newest()] == [
        ("set aside", "g1", "verifier timed out")
    ]
    assert view.snapshot(0).incidents == ()


def test_only_the_newest_incidents_are_kept() -> None:
    tracker = RecentIncidents()
    for at in range(3_000):
        tracker.handle(command("move", f"g{at}/0", 0, at=at, reason="balance"))
    newest = tracker.newest()
    assert [each.time_ms for each in newest] == list(range(3_000 - SHOWN, 3_000))


def test_moves_for_one_reason_are_told_as_one() -> None:
    moves = [RecentIncident(n, "move", "w0", f"g{n}/0", "balance") for n in range(5)]
    other = RecentIncident(9, "failed", "w1", "", "out of memory")
    assert [(first.subject, count) for first, count in merge([*moves, other])] == [
        ("g0/0", 5), ("", 1),
    ]  # fmt: skip


@given(st.lists(st.floats(), max_size=50), st.integers(1, 60), st.integers(1, 8))
@example([sys.float_info.max / 2, sys.float_info.max / 1.5], 1, 1)
@example([-sys.float_info.max, sys.float_info.max], 40, 3)
@unhurried
def test_charts_survive_any_numbers(values: list[float], width: int, height: int) -> None:
    lines = chart("loss", values, width, height, "red")
    assert len(lines) == height
    assert len(condensed(values, width)) <= width


def test_a_chart_rises_with_its_values() -> None:
    (line,) = chart("success", [0.0, 0.25, 0.5, 0.75, 1.0], 60, 1, "green", low=0.0, high=1.0)
    assert line.plain == "success ▁▃▅▆█ 0.000 → 1"
    rows = chart("reward", [0.0, 1.0], 14, 4, "blue")
    assert [row.plain[9:] for row in rows[1:]] == ["  ██", "  ██", "▁▁██"]


@given(st.lists(st.floats(0, 1.5), min_size=1, max_size=3), st.integers(1, 40))
@unhurried
def test_a_bar_has_its_width(shares: list[float], width: int) -> None:
    assert bar([(share, "") for share in shares], width).cell_len == width


def test_the_picture_as_svg_needs_nothing_else() -> None:
    svg = write_svg(grown(), 100, 30)
    assert svg.startswith("<svg") and "window:" in svg.replace("&#160;", " ")
    assert "url(http" not in svg and "@font-face" not in svg


def test_views_of_processes_need_no_metrics() -> None:
    view = ProcessView.of(status("w9"), 0, heartbeat_timeout=30, load_timeout=60)
    snapshot = replace(grown(0), processes=(view,))
    assert any("w9" in line for line in drawn(snapshot, 80, 24))
