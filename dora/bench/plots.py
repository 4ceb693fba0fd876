"""Plots of benches as PNG files.

matplotlib is imported only when a plot is drawn.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dora.bench.comparison import Timeline
from dora.errors import UsageError

_TRAINING = "0.35"
_DPI = 110


def check_plot(path: Path | None) -> None:
    """UsageError before hours of measuring if the plot could not be drawn in the end."""
    if path is None:
        return
    if path.suffix != ".png":
        raise UsageError(f"--plot {path}: plots are PNG files; name one that ends with .png")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no directory {path.absolute().parent}")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def plot_schedules(
    path: Path, title: str, summaries: Mapping[str, Mapping[str, Any]], lines: Sequence[Timeline]
) -> None:
    """Bars of each schedule's share of the ideal and of its step time, with the spread over
    repeats, and below them what each device did during the measured steps."""
    pyplot = _pyplot()
    heights = [2.6, *(max(1.0, 0.075 * len(each.devices) + 0.4) for each in lines)]
    figure = pyplot.figure(figsize=(10, sum(heights) + 0.5 * len(heights)), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    left, right = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    _bars(left, summaries, "ideal_share", "share of the ideal")
    left.axhline(1.0, color="0.6", linewidth=0.8, linestyle="--")
    _bars(right, summaries, "step_seconds", "emulated seconds per step")
    panels = [figure.add_subplot(grid[row, :]) for row in range(1, len(heights))]
    longest = max((each.seconds for each in lines), default=1.0)
    for axis, each in zip(panels, lines, strict=True):
        _timeline(axis, each, longest)
    if lines:
        panels[-1].set_xlabel("emulated seconds; colours are versions, grey is training")
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)


def _bars(axis: Any, summaries: Mapping[str, Mapping[str, Any]], name: str, label: str) -> None:
    names = list(summaries)
    values = [summaries[each][name] for each in names]
    spreads = [summaries[each]["spread"][name] for each in names]
    below = [max(0.0, v - low) for v, (low, _) in zip(values, spreads, strict=True)]
    above = [max(0.0, high - v) for v, (_, high) in zip(values, spreads, strict=True)]
    colours = ["tab:blue" if each.startswith("dora") else "0.6" for each in names]
    drawn = axis.bar(range(len(names)), values, yerr=[below, above], color=colours, capsize=3)
    axis.set_xticks(range(len(names)), names)
    axis.bar_label(drawn, fmt="{:.2f}" if max(values) < 10 else "{:.0f}", fontsize=8, padding=2)
    axis.margins(y=0.15)
    axis.set_title(label, fontsize=9)
    axis.tick_params(labelsize=8)


def _timeline(axis: Any, line: Timeline, longest: float) -> None:
    from matplotlib import colormaps

    colours = colormaps["tab10"]
    rows = {device: row for row, device in enumerate(line.devices, start=1)}
    for span in line.spans:
        axis.broken_barh(
            [(span.begin, span.end - span.begin)],
            (rows[span.device] - 0.5, 1.0),
            facecolors=colours(span.version % 10),
        )
    for _, begin, end in line.training:
        axis.broken_barh([(begin, end - begin)], (-0.9, 1.3), facecolors=_TRAINING)
    axis.set_xlim(0, longest)
    axis.set_ylim(-1, len(rows) + 0.6)
    axis.set_yticks([-0.25, (len(rows) + 1) / 2], ["trainer", line.schedule], fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def plot_curves(path: Path, title: str, curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Success rate of training batches against wall time and against steps: a line for each mode,
    the mean over its seeds, with the range between them. Each curve of a mode has `seconds`, `step`
    and `success`, lists of equal length."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    figure.suptitle(title)
    for number, (mode, runs) in enumerate(curves.items()):
        steps = min((len(run["step"]) for run in runs), default=0)
        if not steps:
            continue
        colour = f"C{number}"
        columns = [[run["success"][k] for run in runs] for k in range(steps)]
        means = [sum(each) / len(each) for each in columns]
        low, high = [min(each) for each in columns], [max(each) for each in columns]
        seconds = [sum(run["seconds"][k] for run in runs) / len(runs) for k in range(steps)]
        for axis, places in zip(axes, (seconds, runs[0]["step"][:steps]), strict=True):
            axis.plot(places, means, color=colour, label=mode, linewidth=1.3)
            axis.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    axes[0].set_xlabel("seconds since version 0")
    axes[1].set_xlabel("steps")
    axes[0].set_ylabel("success rate of the training batch")
    axes[1].legend(fontsize=8)
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)
