"""The charts of a report: curves over steps, versions and time, who generated what when, and where
the trainer's time went.

The curves of one or two runs share their axes, the first run in the first colour; the timeline and
the trainer's time have a chart for each run. A chart is None if there is nothing to draw. Colours
are the page's (`svg.PAINT`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dora.consumers.report.data import RunReport
from dora.consumers.report.statistics import CURVE_POINTS, Point, thinned
from dora.consumers.report.svg import (
    PAINT,
    SERIES,
    VERSIONS,
    Chart,
    chart_of,
    compact,
    duration,
    figure,
    percent,
    short,
    time_unit,
)
from dora.consumers.report.timeline import Timeline

_BAND = 0.18

Points = Callable[[RunReport], Sequence[Point]]


def curve(
    reports: Sequence[RunReport],
    identity: str,
    title: str,
    points: Points,
    *,
    held_out: Points | None = None,
    over_time: bool = False,
    share: bool = False,
    log: bool = False,
) -> Chart | None:
    """A curve over steps or wall time with its band, and points of `held_out` evaluations."""
    if not any(points(r) or (held_out and held_out(r)) for r in reports):
        return None
    scale, unit = _unit(reports) if over_time else (1.0, "step")
    with figure() as drawn:
        axis = drawn.subplots()
        axes(axis, unit if over_time else "step", share=share)
        if not over_time:
            whole_numbers(axis)
        for number, report in enumerate(reports):
            colour = PAINT[SERIES[number]]
            shown = thinned(points(report), CURVE_POINTS)
            name = short(report.run) if len(reports) > 1 else "training batches"
            if shown:
                places = [p.seconds / scale if over_time else p.step for p in shown]
                _curve(axis, places, shown, colour, name)
            if held_out is not None and (found := thinned(held_out(report), CURVE_POINTS)):
                places = [p.seconds / scale if over_time else p.step for p in found]
                mine = PAINT[SERIES[number if len(reports) > 1 else 2]]
                label = "held-out prompts" if len(reports) == 1 else "_nolegend_"
                _evaluations(axis, places, found, mine, label)
        if log and any(p.value > 0 for r in reports for p in points(r)):
            _logarithmic(axis)
        if share:
            axis.set_ylim(-0.02, 1.02)
            axis.set_yticks([0, 0.25, 0.5, 0.75, 1])
        if len(reports) > 1 or held_out is not None:
            legend(axis)
        about = "; ".join(filter(None, (_ends(r, points, share) for r in reports)))
        marks = len(reports) > 1 and held_out is not None
        note = "Diamonds are held-out prompts." if marks else ""
        return chart_of(drawn, identity, title, about, note=note)


def metric(name: str) -> Points:
    """The points of a metric of the ledger."""
    return lambda report: report.metrics.get(name, ())


def mismatch(reports: Sequence[RunReport]) -> Chart | None:
    """Differences between engine and trainer log-probabilities per step: mean and largest."""
    names = (("logprob_mismatch_mean", "mean", "-"), ("logprob_mismatch_max", "largest", ":"))
    if not any(name in report.metrics for report in reports for name, _, _ in names):
        return None
    identity, title = "mismatch", "Engine against trainer"
    with figure() as drawn:
        axis = drawn.subplots()
        axes(axis, "step")
        whole_numbers(axis)
        positive = False
        for number, report in enumerate(reports):
            for name, label, line in names:
                shown = thinned(report.metrics.get(name, ()), CURVE_POINTS)
                positive = positive or any(p.value > 0 for p in shown)
                if shown:
                    text = label if len(reports) == 1 else f"{short(report.run)}, {label}"
                    axis.plot(
                        [p.step for p in shown],
                        [p.value for p in shown],
                        color=PAINT[SERIES[number]],
                        linestyle=line,
                        marker="o" if len(shown) < 2 else None,
                        label=text,
                    )
        if positive:
            _logarithmic(axis)
        axis.set_ylabel("nats")
        legend(axis)
        means = (
            f"{r.run}: mean {compact(r.numbers.logprob_mismatch_mean)} nats over all tokens"
            for r in reports
            if r.numbers.logprob_mismatch_mean is not None
        )
        about = "Absolute difference of log-probabilities of the same tokens. " + "; ".join(means)
        return chart_of(drawn, identity, title, about)


def staleness(reports: Sequence[RunReport]) -> Chart | None:
    """How many versions later groups were trained."""
    if not any(report.staleness for report in reports):
        return None
    identity, title = "staleness", "Staleness when trained"
    most = max(max(r.numbers.staleness_bound, r.numbers.max_staleness) for r in reports)
    width = 0.72 / len(reports)
    with figure() as drawn:
        axis = drawn.subplots()
        axes(axis, "versions between generation and training", share=True)
        for number, report in enumerate(reports):
            total = sum(report.staleness.values())
            places = [k + (number - (len(reports) - 1) / 2) * width for k in range(most + 1)]
            shares = [report.staleness.get(k, 0) / max(total, 1) for k in range(most + 1)]
            bars = axis.bar(
                places,
                shares,
                width=width * 0.94,
                color=PAINT[SERIES[number]],
                label=short(report.run),
            )
            if most <= 6 and len(reports) == 1:
                axis.bar_label(bars, [percent(s, 0) for s in shares], padding=2)
        axis.set_xticks(range(most + 1) if most <= 12 else range(0, most + 1, most // 8))
        axis.margins(y=0.15)
        axis.set_ylim(bottom=0)
        if len(reports) > 1:
            legend(axis)
        about = "; ".join(
            f"{r.run}: "
            + ", ".join(f"{count:,} groups {k} later" for k, count in r.staleness.items())
            + f" (bound {r.numbers.staleness_bound})"
            for r in reports
        )
        return chart_of(drawn, identity, title, about)


def lengths(reports: Sequence[RunReport]) -> Chart | None:
    """Distribution of the generated tokens of training trajectories, on a logarithmic scale."""
    if not any(report.lengths.total for report in reports):
        return None
    identity, title = "lengths", "Response lengths"
    with figure() as drawn:
        axis = drawn.subplots()
        axes(axis, "generated tokens")
        for number, report in enumerate(reports):
            if not report.lengths.total:
                continue
            colour = PAINT[SERIES[number]]
            axis.stairs(
                report.lengths.counts, report.lengths.edges, color=colour, fill=True, alpha=0.25
            )
            axis.stairs(
                report.lengths.counts, report.lengths.edges, color=colour, label=short(report.run)
            )
        _logarithmic(axis)
        axis.set_ylim(bottom=0.8)
        axis.set_ylabel("trajectories")
        _numbers(axis.xaxis)
        if len(reports) > 1:
            legend(axis)
        about = "; ".join(
            f"{r.run}: {r.lengths.total:,} trajectories"
            + f", the longest has {max(t.lengths.largest for t in r.tails):,.0f} tokens"
            for r in reports
            if r.tails
        )
        return chart_of(drawn, identity, title, about)


def tails(reports: Sequence[RunReport]) -> Chart | None:
    """Percentiles of the lengths by version, above a strip of the versions' colours."""
    if not any(report.tails for report in reports):
        return None
    identity, title = "length-tail", "The tail of lengths over versions"
    lines = [
        ("p50", "p50", "-"),
        ("p90", "p90", "-"),
        ("p99", "p99", "--"),
        ("largest", "max", ":"),
    ]
    if len(reports) > 1:
        lines = [lines[0], lines[2]]
    with figure() as drawn:
        axis = drawn.subplots()
        axes(axis, "version")
        whole_numbers(axis)
        for number, report in enumerate(reports):
            for place, (name, label, line) in enumerate(lines):
                points = thinned(
                    [Point(t.version, 0.0, getattr(t.lengths, name)) for t in report.tails],
                    CURVE_POINTS,
                )
                axis.plot(
                    [p.step for p in points],
                    [p.value for p in points],
                    color=PAINT[SERIES[place if len(reports) == 1 else number]],
                    linestyle=line,
                    marker="o" if len(points) < 2 else None,
                    label=label if len(reports) == 1 else f"{short(report.run)}, {label}",
                )
        axis.set_ylim(bottom=0)
        axis.set_ylabel("tokens")
        _strip(axis, max(t.version for r in reports for t in r.tails))
        legend(axis)
        about = "; ".join(
            f"{r.run}: from version {first.version} to {last.version} the median goes from "
            f"{first.lengths.p50:,.0f} to {last.lengths.p50:,.0f} tokens, the 99th percentile from "
            f"{first.lengths.p99:,.0f} to {last.lengths.p99:,.0f}"
            for r in reports
            for first, last in zip(r.tails[:1], r.tails[-1:], strict=True)
        )
        return chart_of(drawn, identity, title, about)


def throughput(reports: Sequence[RunReport]) -> Chart | None:
    """Generated tokens per second over time, and those trained per step."""
    if not any(report.generated for report in reports):
        return None
    identity, title = "throughput", "Throughput"
    scale, unit = _unit(reports)
    with figure() as drawn:
        axis = drawn.subplots()
        axes(axis, unit)
        for number, report in enumerate(reports):
            alone = len(reports) == 1
            axis.plot(
                [at / scale for at, _ in report.generated],
                [rate for _, rate in report.generated],
                color=PAINT[SERIES[number]],
                linewidth=1.4,
                label="generated" if alone else short(report.run),
            )
            if alone and report.trained:
                axis.step(
                    [at / scale for at, _ in report.trained],
                    [rate for _, rate in report.trained],
                    where="pre",
                    color=PAINT[SERIES[1]],
                    linewidth=1.4,
                    label="trained",
                )
        axis.set_ylim(bottom=0)
        axis.set_ylabel("tokens/s")
        legend(axis)
        about = "; ".join(
            f"{r.run}: {compact(r.numbers.tokens_per_second)} tokens generated per second"
            for r in reports
        )
        return chart_of(drawn, identity, title, about)


def _curve(
    axis: Any, places: Sequence[float], shown: Sequence[Point], colour: str, name: str
) -> None:
    whole = [(at, p.low, p.high) for at, p in zip(places, shown, strict=True) if p.low is not None]
    if whole:
        ats, lows, highs = zip(*whole, strict=True)
        axis.fill_between(ats, lows, highs, color=colour, alpha=_BAND, linewidth=0)
    marker = "o" if len(shown) < 2 else None
    axis.plot(places, [p.value for p in shown], color=colour, label=name, marker=marker)


def _evaluations(
    axis: Any, places: Sequence[float], shown: Sequence[Point], colour: str, name: str
) -> None:
    below = [p.value - p.low if p.low is not None else 0.0 for p in shown]
    above = [p.high - p.value if p.high is not None else 0.0 for p in shown]
    axis.errorbar(
        places,
        [p.value for p in shown],
        yerr=[below, above],
        color=colour,
        linestyle="none",
        marker="D",
        markersize=5,
        elinewidth=1.2,
        label=name,
    )


def _ends(report: RunReport, points: Points, share: bool) -> str:
    found = points(report)
    if not found:
        return ""
    first, last = (percent(v) if share else compact(v) for v in (found[0].value, found[-1].value))
    return f"{report.run}: {first} at step {found[0].step:.0f}, {last} at step {found[-1].step:.0f}"


def _unit(reports: Sequence[RunReport]) -> tuple[float, str]:
    return time_unit(max((report.numbers.wall_seconds for report in reports), default=0.0))


def axes(axis: Any, below: str, *, share: bool = False) -> None:
    """Label the x axis; write the y axis in percent or compactly."""
    axis.set_xlabel(below)
    if share:
        from matplotlib.ticker import FuncFormatter

        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
    else:
        _numbers(axis.yaxis)
    axis.margins(x=0.02)


def _numbers(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    axis.set_minor_formatter(NullFormatter())


def _logarithmic(axis: Any) -> None:
    axis.set_yscale("log")
    _numbers(axis.yaxis)  # a scale brings its own


def whole_numbers(axis: Any) -> None:
    """Ticks of the x axis at steps or versions."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    _numbers(axis.xaxis)


def legend(axis: Any) -> None:
    """The legend above the axes, in as many columns as fit."""
    longest = max((len(text) for text in axis.get_legend_handles_labels()[1]), default=0)
    axis.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=4 if longest <= 10 else 2 if longest <= 20 else 1,
        borderaxespad=0.2,
        handlelength=1.3,
        columnspacing=1.2,
        handletextpad=0.5,
    )


def _strip(axis: Any, newest: int) -> None:
    """The versions' colours along the x axis; as in `version_paint`."""
    if newest > 150:
        return
    for version in range(newest + 1):
        axis.axvspan(
            version - 0.5, version + 0.5, ymax=0.025, color=version_paint(version), linewidth=0
        )
    axis.set_xlim(-0.5, newest + 0.5)


def version_paint(version: int) -> str:
    """The colour of a version in all charts and tables."""
    return PAINT[VERSIONS[version % len(VERSIONS)]]


WIDTH = 1180
_HEIGHT = 0.84


def timeline(report: RunReport, number: int, several: bool) -> Chart | None:
    """Which versions each worker generated when: colours are versions, heights are trajectories."""
    line = report.timeline
    if not line.rows or line.most_running <= 0:
        return None
    identity = f"timeline-{number}"
    title = f"Workers by version: {report.run}" if several else "Workers by version"
    scale, unit = time_unit(line.seconds)
    exact = [t for t in report.times if t.steps == 1 and t.train > 0]
    trainer = len(exact) == len(report.times) and bool(exact)
    row_height = 30 if len(line.rows) <= 16 else 20 if len(line.rows) <= 40 else 15
    rows = len(line.rows) + trainer
    with figure(WIDTH, 56 + row_height * rows) as drawn:
        axis = drawn.subplots()
        axis.grid(visible=False)
        labels = [short(row.label, 28) for row in line.rows]
        _fill(axis, outlines(line, scale))
        if trainer:
            labels.append("trainer")
            spans = [((t.seconds - t.publish - t.train) / scale, t.train / scale) for t in exact]
            axis.broken_barh(spans, (len(line.rows) - _HEIGHT / 2, _HEIGHT), color=PAINT["muted"])
            for each in exact:
                axis.axvline(each.seconds / scale, color=PAINT["grid"], linewidth=0.8, zorder=0)
        axis.set_yticks(range(rows), labels)
        axis.set_ylim(rows - 0.5, -0.5)
        axis.set_xlim(0, line.seconds / scale)
        axis.set_xlabel(unit)
        note = _note(line, trainer)
        about = (
            f"{line.workers} workers over {duration(line.seconds)}; "
            f"up to {compact(line.most_running)} trajectories at once in a row. {note}"
        )
        return chart_of(drawn, identity, title, about, note=note, wide=True)


def _note(line: Timeline, trainer: bool) -> str:
    """What the colours are, and what was put together."""
    parts = ["Colours are policy versions, the height is the number of trajectories in generation."]
    if line.versions_per_block > 1:
        parts.append(f"Each colour stands for {line.versions_per_block} consecutive versions.")
    if line.workers > len(line.rows):
        parts.append(f"{line.workers} workers are added up in {len(line.rows)} rows.")
    if trainer:
        parts.append("Grey is training; a line is a committed step.")
    return " ".join(parts)


def outlines(line: Timeline, scale: float) -> dict[str, list[npt.NDArray[np.float64]]]:
    """By colour, the corners of everything that is drawn in it: one shape per colour keeps a
    drawing of many workers small."""
    found: dict[str, list[npt.NDArray[np.float64]]] = {}
    edges = np.arange(line.bins + 1) * (line.bin_seconds / scale)
    for place, row in enumerate(line.rows):
        base = np.full(line.bins, place + _HEIGHT / 2)
        for block, amounts in row.running.items():
            top = base - amounts / line.most_running * _HEIGHT
            for first, last in stretches(amounts > 1e-3):
                xs = np.repeat(edges[first : last + 1], 2)[1:-1]
                upper = np.column_stack([xs, np.repeat(top[first:last], 2)])
                lower = np.column_stack([xs, np.repeat(base[first:last], 2)])
                corners = np.concatenate([_corners(upper), _corners(lower)[::-1]])
                found.setdefault(version_paint(block), []).append(corners)
            base = top
    return found


def _corners(steps: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Without the points in the middle of level stretches."""
    level = np.diff(steps[:, 1]) == 0
    inner = np.concatenate([[False], level[:-1] & level[1:], [False]])
    kept: npt.NDArray[np.float64] = steps[~inner]
    return kept


def _fill(axis: Any, drawn: dict[str, list[npt.NDArray[np.float64]]]) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    for paint, shapes in drawn.items():
        vertices = np.concatenate([np.concatenate([shape, shape[:1]]) for shape in shapes])
        codes = [
            code
            for shape in shapes
            for code in (Path.MOVETO, *[Path.LINETO] * (len(shape) - 1), Path.CLOSEPOLY)
        ]
        axis.add_patch(PathPatch(Path(vertices, codes), facecolor=paint, linewidth=0))


def stretches(flags: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Begin and end (exclusive) of each stretch of true flags."""
    changes = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    yield from zip(changes[::2].tolist(), changes[1::2].tolist(), strict=True)


def times(report: RunReport, number: int, several: bool) -> Chart | None:
    """Shares of each step's time that the trainer waited, trained and published."""
    if not report.times:
        return None
    identity, title = f"times-{number}", "Where the trainer’s time went"
    if several:
        title = f"Trainer of {short(report.run)}"
    parts = (
        ("train", "training", PAINT[SERIES[0]]),
        ("publish", "publishing", PAINT[SERIES[2]]),
        ("idle", "waiting", PAINT[SERIES[1]]),
        ("other", "other", PAINT["grid"]),
    )
    edges = [report.times[0].step - report.times[0].steps + 0.5]
    edges += [each.step + 0.5 for each in report.times]
    wholes = [max(t.idle + t.train + t.publish + t.other, 1e-9) for t in report.times]
    base: npt.NDArray[np.float64] = np.zeros(len(wholes))
    with figure() as drawn:
        axis = drawn.subplots()
        axes(axis, "step", share=True)
        whole_numbers(axis)
        for name, label, colour in parts:
            shares = np.array(
                [getattr(t, name) / whole for t, whole in zip(report.times, wholes, strict=True)]
            )
            axis.stairs(
                base + shares,
                edges,
                baseline=base,
                fill=True,
                color=colour,
                linewidth=0,
                label=label,
            )
            base = base + shares
        axis.set_ylim(0, 1)
        axis.set_xlim(edges[0], edges[-1])
        legend(axis)
        about = f"{report.run}: the trainer waited {percent(report.numbers.trainer_idle_share)}"
        about += " of its time"
        return chart_of(drawn, identity, title, about)
