"""`dora status`: a run at a glance, from its log."""

import dataclasses
import json
import time
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from dora.bus.settings import cluster_settings
from dora.cli.display import render
from dora.cli.options import json_option, kafka_options, print_line
from dora.config import KafkaSection
from dora.consumers.emulation_check import late_share
from dora.consumers.monitor import RunMonitor
from dora.consumers.snapshot import Snapshot

# Trajectory records read at most for a look; a longer history is read from the window on.
HISTORY_RECORDS = 200_000
# Seconds that a trajectory must hold a followed run up before its chunks are looked for.
WATCH_SECONDS = 3.0


@click.command()
@click.argument("run")
@kafka_options
@click.option("--watch", is_flag=True, help="Follow until interrupted.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, metavar="SECONDS"
)
@click.option(
    "--heartbeat-timeout",
    type=click.FloatRange(min=0.1),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="A process silent for longer is shown as silent.",
)
@json_option
def status(
    run: str,
    kafka: KafkaSection,
    watch: bool,
    interval: float,
    heartbeat_timeout: float,
    as_json: bool,
) -> None:
    """Show window, backlog per version, workers, rates and staleness of RUN.

    Says whether the run goes on, and if not, why. With --watch and --json one object a line.
    """
    monitor = RunMonitor(
        cluster_settings(kafka),
        run,
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
        elif watch:
            with Live(render(monitor.snapshot()), auto_refresh=False) as live:
                while True:
                    _follow(monitor, interval)
                    live.update(render(monitor.snapshot()), refresh=True)
        else:
            Console().print(render(monitor.snapshot()))
    finally:
        monitor.close()


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
