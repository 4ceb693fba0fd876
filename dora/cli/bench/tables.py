"""How the figures of a bench are shown: a mean with its smallest and largest value."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dora.cli.console import print_table


def show_schedules(summaries: Mapping[str, dict[str, Any]], console: Console) -> None:
    """Print the table of `dora bench schedules`."""
    heads = (
        "schedule", "R", "step s", "of ideal", "x sync", "trainer idle", "rollout only",
        "staleness mean/max", "moves/step", "overhead", "violations",
    )  # fmt: skip
    table = _table("schedules: mean (smallest-largest over repeats)", heads)
    for name, summary in summaries.items():
        table.add_row(
            name,
            str(summary["rollout_devices"]),
            _spread(summary, "step_seconds", "{:.0f}"),
            _spread(summary, "ideal_share", "{:.3f}"),
            _spread(summary, "ratio_to_sync", "{:.2f}"),
            _spread(summary, "trainer_idle_share", "{:.2f}"),
            _spread(summary, "rollout_only_share", "{:.2f}"),
            _staleness(summary),
            _spread(summary, "migrations", "{:.1f}"),
            f"{summary['overhead_share']:.2%}",
            _violations(summary),
        )
    print_table(table, console)


def show_modes(summaries: Mapping[str, dict[str, Any]], console: Console) -> None:
    """Print the table of `dora bench real`."""
    heads = (
        "mode", "runs", "steps/s", "trajectories/s", "trainer idle", "rollout only",
        "staleness mean/max", "success first", "success last", "violations",
    )  # fmt: skip
    table = _table("real engines: mean (smallest-largest over runs)", heads)
    for name, summary in summaries.items():
        table.add_row(
            name,
            str(summary["runs"]),
            _spread(summary, "steps_per_second", "{:.3f}"),
            _spread(summary, "trajectories_per_second", "{:.1f}"),
            _spread(summary, "trainer_idle_share", "{:.2f}"),
            _spread(summary, "rollout_only_share", "{:.2f}"),
            _staleness(summary),
            _spread(summary, "success_first", "{:.3f}"),
            _spread(summary, "success_last", "{:.3f}"),
            _violations(summary),
        )
    print_table(table, console)


def _table(title: str, heads: Sequence[str]) -> Table:
    """An empty table: names in the first column, figures in the others."""
    table = Table(title=title, title_justify="left")
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left")
    return table


def _spread(summary: dict[str, Any], name: str, form: str) -> str:
    """A mean with its range, if there is one."""
    if summary[name] is None:
        return "-"
    low, high = (form.format(value) for value in summary["spread"][name])
    text = form.format(summary[name])
    return text if low == high else f"{text} ({low}-{high})"


def _staleness(summary: dict[str, Any]) -> str:
    """Mean and largest staleness."""
    return f"{summary['staleness_mean']:.2f} / {summary['staleness_max']}"


def _violations(summary: dict[str, Any]) -> Text:
    """Violations of the rules, and apart from them versions mixed by design."""
    text = Text(str(summary["violations"]))
    text.stylize("bold red" if summary["violations"] else "green")
    if summary.get("mixed_version"):
        text.append(f" + {summary['mixed_version']} mixed by design", style="yellow")
    return text
