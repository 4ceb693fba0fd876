"""The timeline of workers and the trainer's time.

Invariant: one run per chart; the size of a drawing depends on rows and bins, not on the number of
trajectories.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from dora.consumers.report.charts import axes, legend, version_paint, whole_numbers
from dora.consumers.report.data import RunReport
from dora.consumers.report.svg import (
    PAINT,
    SERIES,
    Chart,
    compact,
    duration,
    figure,
    markup,
    percent,
    short,
    time_unit,
)
from dora.consumers.report.timeline import Timeline

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
        return Chart(
            identity, title, about, markup(drawn, identity, title, about), note=note, wide=True
        )


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
        return Chart(identity, title, about, markup(drawn, identity, title, about))
