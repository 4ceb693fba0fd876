"""How the figures of a bench are shown.

Invariant: a figure stands with its smallest and largest value, unless these are the same.
"""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text


def figures_table(title: str, heads: Sequence[str]) -> Table:
    """An empty table: names in the first column, figures in the others."""
    table = Table(title=title, title_justify="left")
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left")
    return table


def spread(summary: dict[str, Any], name: str, form: str) -> str:
    """A mean with its range, if there is one."""
    if summary[name] is None:
        return "-"
    low, high = (form.format(value) for value in summary["spread"][name])
    text = form.format(summary[name])
    return text if low == high else f"{text} ({low}-{high})"


def staleness(summary: dict[str, Any]) -> str:
    """Mean and largest staleness."""
    return f"{summary['staleness_mean']:.2f} / {summary['staleness_max']}"


def violations(summary: dict[str, Any]) -> Text:
    """Violations of the rules, and apart from them versions mixed by design."""
    text = Text(str(summary["violations"]))
    text.stylize("bold red" if summary["violations"] else "green")
    if summary.get("mixed_version"):
        text.append(f" + {summary['mixed_version']} mixed by design", style="yellow")
    return text
