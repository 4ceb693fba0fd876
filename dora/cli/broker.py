"""`dora broker`: the local Kafka broker of a directory.

What a program may read goes to standard output, everything else to standard error.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path

import click

from dora.broker.jars import cached_jars, pinned_kafka_version
from dora.broker.local import (
    BrokerInfo,
    broker_log,
    broker_process,
    fetch_jars,
    running_broker,
    start_broker,
    stop_broker,
)

directory_option = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".dora/broker"),
    show_default=True,
    envvar="DORA_BROKER_DIR",
    show_envvar=True,
    help="Directory of the broker: its data, logs and address.",
)


@click.group()
def broker() -> None:
    """Start, stop and inspect the local Kafka broker.

    One node of Apache Kafka, on this machine only, for trying out and for runs on one machine. The
    jars are fetched once per user, with Maven; it needs Java 17 or newer.
    """


@broker.command()
@directory_option
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Port to listen on. [default: that of the last start, else a free one]",
)
@click.option(
    "--heap-mb",
    type=click.IntRange(min=128),
    default=512,
    show_default=True,
    help="Java heap, in MB.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    help="Seconds within which it has to answer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def start(directory: Path, port: int | None, heap_mb: int, deadline: float, as_json: bool) -> None:
    """Start the broker and print its address; if it runs already, only print it.

    It keeps running after this command: stop it with `dora broker stop`.
    """
    if running_broker(directory) is None:
        _announce_fetch()
    info = start_broker(directory, port=port, heap_mb=heap_mb, deadline_seconds=deadline)
    if as_json:
        click.echo(json.dumps(_content(directory, info)))
    else:
        click.echo(info.bootstrap_servers)


@broker.command()
def fetch() -> None:
    """Fetch Kafka's jars now, so that a start needs no network; print their directory."""
    _announce_fetch()
    click.echo(fetch_jars())


@broker.command()
@directory_option
@click.option("--force", is_flag=True, help="Kill it if it has not stopped by the deadline.")
@click.option(
    "--deadline",
    type=click.FloatRange(min=1),
    default=30.0,
    show_default=True,
    help="Seconds to wait for it to stop.",
)
def stop(directory: Path, force: bool, deadline: float) -> None:
    """Stop the broker; its data stays."""
    stopped = stop_broker(directory, force=force, deadline_seconds=deadline)
    click.echo("stopped" if stopped else f"no broker runs in {directory}", err=True)


@broker.command()
@directory_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def status(ctx: click.Context, directory: Path, as_json: bool) -> None:
    """Show whether the broker runs, and where; exit code 1 if it does not."""
    info = running_broker(directory)
    if as_json:
        click.echo(json.dumps(_content(directory, info)))
    elif info is not None:
        click.echo(f"running    {info.bootstrap_servers}")
        click.echo(f"kafka      {info.kafka_version}, cluster {info.cluster_id}")
        click.echo(f"process    {info.pid}, up {_duration(time.time() - info.started_at)}")
        click.echo(f"directory  {info.directory}")
    elif (pid := broker_process(directory)) is not None:
        click.echo(f"process {pid} runs but does not answer (yet): see `dora broker logs`")
    else:
        click.echo(f"no broker runs in {directory}: start one with `dora broker start`")
    if info is None:
        ctx.exit(1)


@broker.command()
@directory_option
@click.option(
    "-n", "--lines", type=click.IntRange(min=1), default=50, show_default=True, help="How many."
)
def logs(directory: Path, lines: int) -> None:
    """Print the last lines of the broker's log."""
    for line in broker_log(directory, lines):
        click.echo(line)


def _announce_fetch() -> None:
    if cached_jars() is None:
        click.echo(
            f"fetching Apache Kafka {pinned_kafka_version()} with Maven (44 MB, once)", err=True
        )


def _content(directory: Path, info: BrokerInfo | None) -> dict[str, object]:
    if info is None:
        return {
            "running": False,
            "directory": str(directory.absolute()),
            "pid": broker_process(directory),
        }
    return {"running": True, **asdict(info), "directory": str(info.directory)}


def _duration(seconds: float) -> str:
    whole = max(0, int(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
