"""`dora list`: the runs of a cluster."""

import dataclasses
import json
import time

import click

from dora.bus.settings import cluster_settings
from dora.cli.console import columns
from dora.cli.options import Command, json_option, kafka_options, print_line
from dora.config import KafkaSection
from dora.log.runs import RunSummary, list_runs

_HEADINGS = ("run", "state", "version", "steps", "processes", "begun", "last record", "")


@click.command("list", cls=Command)
@click.argument("pattern", default="*")
@click.option(
    "--heartbeat-timeout",
    type=click.FloatRange(min=0.1),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="A process silent for longer does not count.",
)
@kafka_options
@json_option
def list_command(
    pattern: str, heartbeat_timeout: float, kafka: KafkaSection, as_json: bool
) -> None:
    """List the runs of the cluster, the newest last: state, version, processes, age.

    With PATTERN (such as 'demo*') only those whose names fit.
    """
    runs = list_runs(
        cluster_settings(kafka),
        pattern,
        heartbeat_timeout=heartbeat_timeout,
        load_timeout=600.0,
    )
    if as_json:
        print_line(json.dumps({"runs": [dataclasses.asdict(run) for run in runs]}))
    elif not runs:
        print_line("the cluster has no run" + (f" {pattern}" if pattern != "*" else ""))
    else:
        now = time.time_ns() // 1_000_000
        print_line(columns([_HEADINGS, *(_row(run, now) for run in runs)]))


def _row(run: RunSummary, now: int) -> tuple[str, ...]:
    return (
        run.run,
        run.state,
        "-" if run.version < 0 else str(run.version),
        "-" if run.steps is None else str(run.steps),
        str(run.processes),
        _ago(run.started_ms, now),
        _ago(run.last_ms, now),
        run.problem,
    )


def _ago(time_ms: int | None, now: int) -> str:
    """The largest unit that fits, such as `3 h ago`."""
    if time_ms is None:
        return "-"
    seconds = max(0, now - time_ms) / 1000
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
