"""Writes the table of metrics in docs/observability.md from `dora.telemetry.catalogue`.

`--check` writes nothing and ends with 1 if the page is out of date.
"""

import sys
from pathlib import Path

from publication import filled, publish

from dora.telemetry.catalogue import CATALOGUE, VERSION, Metric

PAGE = Path(__file__).with_name("observability.md")
SOURCE = "dora/telemetry/catalogue.py"

TITLES = {
    "process": "Every process",
    "coordinator": "Coordinator",
    "rollout": "Rollout workers (added up over the workers of a process)",
    "trainer": "Trainer (rank 0)",
}


def tables() -> str:
    """One table for each role."""
    parts = []
    for role, title in TITLES.items():
        rows = [_row(metric) for metric in CATALOGUE if metric.role == role]
        parts.append("\n".join([f"**{title}**\n", "| metric | kind | |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _row(metric: Metric) -> str:
    text = metric.help
    if metric.label == VERSION:
        text += " By `version`, for the versions of the window."
    elif metric.label:
        text += f" By `{metric.label}`: {', '.join(metric.values)}."
    return f"| `{metric.name}` | {metric.kind} | {text} |"


if __name__ == "__main__":
    sys.exit(publish(PAGE, filled(PAGE, SOURCE, tables())))
