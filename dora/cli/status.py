"""`dora status`: a run at a glance, from its log; `dora list`: the runs of a cluster."""

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from dora.bus.settings import cluster_settings
from dora.cli.console import columns
from dora.cli.display.dashboard import Dashboard, write_svg
from dora.cli.display.display import PlainDisplay, render
from dora.cli.options import Command, json_option, kafka_options, print_line
from dora.config import KafkaSection
from dora.consumers.monitor.monitor import RunMonitor
from dora.consumers.monitor.snapshot import Snapshot, late_share
from dora.errors import UsageError
from dora.log.runs import RunSummary, list_runs, newest_run

# Trajectory records read at most for a look; a longer history is read from the window on.
HISTORY_RECORDS = 200_000
# Seconds that a trajectory must hold a followed run up before its chunks are looked for.
WATCH_SECONDS = 3.0
_HEADINGS = ("run", "state", "version", "steps", "processes", "begun", "last record", "")


_heartbeat_option = click.option(
    "--heartbeat-timeout",
    type=click.FloatRange(min=0.1),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="A process silent for longer counts as silent.",
)


def _size(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{1,3})x([1-9]\d{0,3})", text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not COLUMNSxLINES, such as 100x30", context)
    return int(match[1]), int(match[2])


@click.command(cls=Command)
@click.argument("run", required=False)
@kafka_options
@click.option(
    "--watch", is_flag=True, help="Follow until interrupted; on a terminal, as a dashboard."
)
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, metavar="SECONDS"
)
@_heartbeat_option
@click.option(
    "--svg",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the dashboard as a picture instead.",
)
@click.option(
    "--size",
    callback=_size,
    default="100x30",
    show_default=True,
    metavar="COLUMNSxLINES",
    help="Size of that picture.",
)
@json_option
def status(
    run: str | None,
    kafka: KafkaSection,
    watch: bool,
    interval: float,
    heartbeat_timeout: float,
    svg: Path | None,
    size: tuple[int, int],
    as_json: bool,
) -> None:
    """Show window, backlog per version, workers, rates and staleness of RUN.

    RUN is a run's name or its configuration file; without it the run that was begun last. Also
    shows whether the run goes on, and if not, why. With --watch: a dashboard on a terminal,
    elsewhere a line for each step and change, and with --json one object a line.
    """
    if svg is not None and (watch or as_json):
        raise UsageError("--svg writes one picture: leave --watch and --json out")
    settings = cluster_settings(kafka)
    monitor = RunMonitor(
        settings,
        newest_run(settings) if run is None else run,
        heartbeat_timeout=heartbeat_timeout,
        history=HISTORY_RECORDS,
        explain_after=WATCH_SECONDS if watch else 0.0,
    )
    try:
        monitor.catch_up()
        if as_json:
            print_line(json.dumps(as_object(monitor.snapshot()), indent=None if watch else 2))
            while watch:
                _follow(monitor, interval)
                print_line(json.dumps(as_object(monitor.snapshot())))
        elif svg is not None:
            try:
                svg.write_text(write_svg(monitor.snapshot(), *size))
            except OSError as error:
                raise UsageError(f"--svg {svg} cannot be written: {error.strerror}") from error
        elif watch:
            _watch(monitor, interval)
        else:
            Console().print(render(monitor.snapshot()))
    finally:
        monitor.close()


def _watch(monitor: RunMonitor, interval: float) -> None:
    """Until interrupted; the last picture stays on the terminal."""
    console = Console()
    if not console.is_terminal:
        with PlainDisplay(console) as plain:
            while True:
                plain.update(monitor.snapshot(), ())
                _follow(monitor, interval)
    try:
        with Live(
            Dashboard(monitor.snapshot()), console=console, screen=True, auto_refresh=False
        ) as live:
            live.refresh()
            while True:
                _follow(monitor, interval)
                live.update(Dashboard(monitor.snapshot()), refresh=True)
    finally:
        console.print(render(monitor.view.snapshot(time.time_ns() // 1_000_000)))


def as_object(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot for programs; the computed figures stand beside the fields."""
    return dataclasses.asdict(snapshot) | {
        "waits": [dataclasses.asdict(wait) | {"text": wait.text} for wait in snapshot.waits],
        "step": snapshot.step,
        "staleness_max": snapshot.staleness_max,
        "live_versions_max": snapshot.live_versions_max,
        "trainer_idle_share": snapshot.trainer_idle_share,
        "logprob_mismatch_mean": snapshot.logprob_mismatch_mean,
        "emulation_late_share": late_share(snapshot.processes),
    }


def _follow(monitor: RunMonitor, interval: float) -> None:
    """Fold what arrives within the interval."""
    end = time.monotonic() + interval
    while (left := end - time.monotonic()) > 0:
        monitor.poll(timeout=left)


@click.command("list", cls=Command)
@click.argument("pattern", default="*")
@_heartbeat_option
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
