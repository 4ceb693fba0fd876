"""`dora export`: a run's trajectories where a data platform reads them.

A target is a line of `TARGETS`; its module is imported when it is asked for.
"""

import importlib
import json
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import click

from dora.bus.settings import cluster_settings
from dora.cli.console import waiting
from dora.cli.export.options import arguments_of, details_line, place_of, target_options
from dora.cli.options import json_option, kafka_options, print_line, timeout_option
from dora.config import KafkaSection
from dora.consumers.export.run import Summary, Wanted, check_complete, export_run, spans
from dora.consumers.export.targets import Target
from dora.errors import UsageError
from dora.schemas.records import RunStarted

_CONFIGURED = ("config_file", "sets")
"""Options of kinds that need the run's configuration, and with it the way to the cluster."""
_BOUNDS = re.compile(r"(\d*):(\d*)")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of target: its class, called with directory, run and `say`, its line of help, and the
    options that it alone has."""

    target: str
    summary: str
    options: tuple[str, ...] = ()


TARGETS: dict[str, Kind] = {
    "parquet": Kind(
        "dora.consumers.export.targets:ParquetTarget", "Parquet files, a directory per version"
    ),
    "jsonl": Kind(
        "dora.consumers.export.jsonl:JsonlTarget", "lines of JSON, a directory per version"
    ),
    "iceberg": Kind(
        "dora.consumers.export.iceberg:IcebergTarget",
        "a table of an Iceberg catalog",
        ("catalog", "storage"),
    ),
    "delta": Kind("dora.consumers.export.delta:DeltaTarget", "a Delta table", ("storage",)),
    "sft": Kind(
        "dora.cli.export.options:open_sft",
        "the best response of each group, to imitate",
        ("form", "min_reward", *_CONFIGURED),
    ),
    "dpo": Kind(
        "dora.cli.export.options:open_dpo",
        "the best and the worst response of each group, to prefer one",
        ("form", "min_reward", "min_margin", *_CONFIGURED),
    ),
}


@click.command()
@click.argument("run")
@click.argument("directory", metavar="DIR")
@click.option(
    "--to",
    "to",
    type=click.Choice(list(TARGETS)),
    required=True,
    help="; ".join(f"{name}: {kind.summary}" for name, kind in TARGETS.items()) + ".",
)
@click.option("--version", type=click.IntRange(min=0), metavar="V", help="Only this version.")
@click.option(
    "--versions", metavar="A:B", help="Only versions A to B, both included; A: and :B are open."
)
@click.option(
    "--ended",
    is_flag=True,
    help="The run will not go on: export its last versions too, with groups still outstanding.",
)
@click.option(
    "--no-dead-letters",
    is_flag=True,
    help="Write nothing to Kafka: foreign records are only counted.",
)
@target_options
@timeout_option(3600.0)
@kafka_options
@json_option
def export(
    run: str,
    directory: str,
    to: str,
    version: int | None,
    versions: str | None,
    ended: bool,
    no_dead_letters: bool,
    timeout: float,
    options: dict[str, Any],
    kafka: KafkaSection,
    as_json: bool,
) -> None:
    """Export the finished trajectories of RUN to DIR: every version that can no longer change and
    is not there yet.

    May be interrupted and repeated at any time: DIR holds each version whole or not at all, and
    never twice. The run may go on meanwhile.
    """
    wanted = wanted_versions(version, versions)
    place = place_of(to, directory)
    kind = TARGETS[to]
    arguments = arguments_of(to, kind.options, options)
    if set(_CONFIGURED) <= set(kind.options):
        arguments["kafka"] = kafka

    say = partial(click.echo, err=True)

    def open_target(started: RunStarted) -> Target:
        opened: Target = _load(kind.target)(place, started, say, **arguments)
        return opened

    with waiting(f"reading {run}", quiet=as_json) as progress:
        summary = export_run(
            cluster_settings(kafka),
            run,
            open_target,
            wanted=wanted,
            ended=ended,
            write_letters=not no_dead_letters,
            deadline=timeout,
            say=progress,
        )
    if as_json:
        print_line(json.dumps(summary.to_json() | {"to": to}))
    else:
        show(summary)
    check_complete(summary)


def wanted_versions(version: int | None, versions: str | None) -> Wanted:
    """What `--version` and `--versions` ask for; UsageError if they contradict each other."""
    if versions is None:
        return Wanted(version, version)
    if version is not None:
        raise UsageError("give --version or --versions, not both")
    match = _BOUNDS.fullmatch(versions)
    first, last = (int(text) if text else None for text in match.groups()) if match else (0, -1)
    if first is not None and last is not None and first > last:
        raise UsageError(
            f"--versions {versions}: not of the form A:B with A <= B",
            hint="Examples: 3:7, 3: (from 3 on), :7 (up to 7).",
        )
    return Wanted(first, last)


def show(summary: Summary) -> None:
    """Print the summary for people."""
    if summary.exported:
        print_line(
            f"{summary.place}: {spans(summary.exported)} added, {summary.rows:,} rows, "
            f"{summary.bytes / 1e6:,.1f} MB in {summary.seconds:.1f} s"
        )
    else:
        print_line(f"{summary.place}: nothing to add")
    if summary.there:
        print_line(f"{summary.there} versions were there already")
    if summary.updated:
        print_line(f"{spans(summary.updated)} replaced: the run went on since")
    for number, reason in summary.open.items():
        print_line(f"version {number} is not closed yet: {reason}")
    if summary.foreign:
        print_line(
            f"{summary.foreign} records do not belong where they lie and were left out; "
            f"{summary.dead_letters} of them are new among the dead letters"
        )
    if summary.details:
        print_line(details_line(summary.details))


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
