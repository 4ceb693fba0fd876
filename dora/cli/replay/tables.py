"""How a replay is shown in a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dora.cli.console import print_table
from dora.consumers.replay.metrics import SIDE_BY_SIDE
from dora.consumers.replay.replay import ReplayReport

SHOWN = 40
"""Steps that are shown at most; `--json` has all."""
CHANGED = 10
"""Likewise, where a change is shown beside the record."""


def show(report: ReplayReport, console: Console) -> None:
    """Print the report."""
    origin = f"version {report.base_version}, "
    origin += "the starting model" if report.checkpoint is None else report.checkpoint
    before = len(report.results) - len(report.asked)
    on_the_way = f"; {before} step{'s' * (before != 1)} before it redone on the way"
    on_the_way += "" if report.sets else " (in brackets)"
    console.print(f"replayed from {origin}{on_the_way if before else ''}")
    table = _side_by_side(report) if report.sets else _compared(report)
    print_table(table, console)
    count, most = (len(report.asked), CHANGED) if report.sets else (len(report.results), SHOWN)
    left_out = count - most
    if left_out > 0:
        console.print(f"... the first {left_out} steps are left out; --json has all")
    if report.recorded_ranks > 1:
        console.print(
            Text.assemble(
                ("note", "yellow"),
                f": recorded with trainer.ranks = {report.recorded_ranks}; a replay is one "
                "process, which adds up in another order: bits may differ",
            )
        )
    for note in report.notes:
        console.print(Text.assemble(("note", "yellow"), f": {note}"))
    console.print(speed(report))
    console.print(verdict(report))


def speed(report: ReplayReport) -> str:
    """How fast it was."""
    total = report.trajectories / max(report.seconds, 1e-9)
    alone = report.trajectories / max(report.train_seconds, 1e-9)
    return (
        f"{report.trajectories:,} trajectories in {report.seconds:.1f} s: {total:,.0f}/s with "
        f"reading and comparing, {alone:,.0f}/s of training alone (model loaded in "
        f"{report.loading_seconds:.1f} s before)"
    )


def verdict(report: ReplayReport) -> Text:
    """What came of it, in a sentence."""
    difference = report.first_difference
    if difference is not None:
        text = Text.assemble(("first difference", "bold red"), f": {difference}")
        if not report.deterministic:
            text.append("\n  trainer.deterministic was off: some difference is to be expected")
        return text
    if report.sets:
        changed = ", ".join(report.sets)
        return Text(f"what if {changed}: the last column", style="bold")
    count = len(report.results)
    return Text(
        f"bit-identical: weights and metrics of {count} step{'s' * (count != 1)}",
        style="bold green",
    )


def _compared(report: ReplayReport) -> Table:
    table = Table("step", "samples", "reward", "loss", "grad norm", "weights", "differing")
    for column in table.columns[:-2]:
        column.justify = "right"
    for result in report.results[-SHOWN:]:
        replayed = result.replayed
        table.add_row(
            f"{result.step}" if result.asked else f"({result.step})",
            f"{result.trajectories:,}",
            *(_number(replayed.get(name)) for name in ("reward_mean", "loss", "grad_norm")),
            result.checksum[:8],
            Text(", ".join(result.differing) or "none", style="red" if result.differing else ""),
        )
    return table


def _side_by_side(report: ReplayReport) -> Table:
    shown = report.asked[-CHANGED:]
    table = Table("step", "metric", "recorded", "what if")
    for index in (0, 2, 3):
        table.columns[index].justify = "right"
    for result in shown:
        table.add_section()
        names = [n for n in SIDE_BY_SIDE if n in result.recorded or n in result.replayed]
        for name in names:
            old, new = _number(result.recorded.get(name)), _number(result.replayed.get(name))
            first = str(result.step) if name == names[0] else ""
            table.add_row(first, name, old, Text(new, style="dim" if old == new else "bold"))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
