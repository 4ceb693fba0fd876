"""`dora report`: a run as one HTML file."""

import json
import os
import webbrowser
from pathlib import Path

import click

from dora.atomic_write import atomic_write
from dora.bus.settings import cluster_settings
from dora.cli.console import waiting
from dora.cli.options import Command, json_option, kafka_options, print_line, timeout_option
from dora.config import KafkaSection
from dora.consumers.report.reading import read_report
from dora.errors import DoraError, UsageError


@click.command(cls=Command)
@click.argument("run")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE.html",
    help="Where to write; by default RUN-report.html in this directory.",
)
@click.option("--compare", metavar="RUN2", help="Another run of the cluster, in the same plots.")
@click.option("--no-audit", is_flag=True, help="Leave the audit out: faster.")
@click.option("--open", "show", is_flag=True, help="Open the file in the browser.")
@timeout_option(3600.0)
@kafka_options
@json_option
def report(
    run: str,
    output: Path | None,
    compare: str | None,
    no_audit: bool,
    show: bool,
    timeout: float,
    kafka: KafkaSection,
    as_json: bool,
) -> None:
    """Write a report of RUN as one self-contained HTML file.

    Learning curves with their uncertainty, staleness, lengths, workers by version, speed, versions,
    incidents, audit and configuration, from the log alone. Works on running and ended runs.
    """
    if compare == run:
        raise UsageError(f"--compare {compare}: a run is not compared with itself")
    path = checked_output(output if output is not None else Path(f"{run}-report.html"))
    with waiting(f"reading {run}", quiet=as_json) as status:

        def progress(topic: str, records: int) -> None:
            status(f"reading {topic}: {records:,} records")

        reports = [
            read_report(
                cluster_settings(kafka),
                name,
                audit=not no_audit,
                deadline=timeout,
                progress=progress,
            )
            for name in (run, compare)
            if name is not None
        ]
        status("drawing")
        from dora.consumers.report.page import render

        page = render(reports)
    _write(path, page)
    size = path.stat().st_size
    if as_json:
        print_line(
            json.dumps(
                {
                    "file": str(path),
                    "bytes": size,
                    "runs": [each.run for each in reports],
                    "steps": [each.numbers.steps for each in reports],
                    "violations": [
                        sum(each.audit.violations.values()) if each.audit is not None else None
                        for each in reports
                    ],
                }
            )
        )
    else:
        print_line(f"{path} ({size / 1000:,.0f} kB)")
        for each in reports:
            if not each.numbers.steps:
                print_line(f"run {each.run} has not committed a step yet: its curves are empty")
    if show and not webbrowser.open(path.absolute().as_uri()):
        click.echo("no browser could be opened", err=True)


def checked_output(path: Path) -> Path:
    """`path`, if a file can be written there; UsageError before a log is read in vain."""
    directory = path.absolute().parent
    if path.is_dir():
        raise UsageError(f"-o {path}: that is a directory; name a file")
    if not directory.is_dir():
        raise UsageError(f"-o {path}: there is no directory {directory}")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"-o {path}: {directory} is not writable")
    return path


def _write(path: Path, page: str) -> None:
    try:
        atomic_write(path, page)
    except OSError as error:
        raise DoraError(
            f"{path} could not be written: {error.strerror or error}",
            hint="Give another place with -o.",
        ) from error
