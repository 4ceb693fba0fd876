"""`dora audit`: proof from the log that nothing was lost, duplicated, mixed, stale or torn."""

import json

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dora.bus.settings import cluster_settings
from dora.cli.console import print_table, waiting
from dora.cli.options import Command, json_option, kafka_options, print_line, timeout_option
from dora.config import KafkaSection
from dora.consumers.audit import audit_run
from dora.core.audit.report import MEANINGS, AuditReport


@click.command(cls=Command)
@click.argument("run")
@click.option("--no-chunks", is_flag=True, help="Skip the token chunks: faster, but proves less.")
@timeout_option(3600.0)
@kafka_options
@json_option
@click.pass_context
def audit(
    context: click.Context,
    run: str,
    no_chunks: bool,
    timeout: float,
    kafka: KafkaSection,
    as_json: bool,
) -> None:
    """Prove from the log of RUN alone that every rule was kept.

    One version per trajectory; every started group trained exactly once with all its samples, set
    aside with a reason, or still within the window; staleness within the bound; every step whole.
    If a rule was broken, prints each violation and ends with exit code 1. Works on running and
    ended runs.
    """
    with waiting(f"reading {run}", quiet=as_json) as status:

        def progress(topic: str, records: int) -> None:
            status(f"reading {topic}: {records:,} records")

        report = audit_run(
            cluster_settings(kafka),
            run,
            chunks=not no_chunks,
            deadline=timeout,
            progress=progress,
        )
    if as_json:
        print_line(json.dumps(report.to_json(), indent=2))
    else:
        show(report, Console(highlight=False))
    context.exit(1 if report.violated else 0)


def show(report: AuditReport, console: Console) -> None:
    """Print the report for people."""
    counts = Table("what", "count", title=f"run {report.run}", title_justify="left")
    counts.columns[1].justify = "right"
    for name, count in (
        ("steps", report.steps),
        ("groups started", report.groups_started),
        ("groups trained", report.groups_trained),
        ("groups set aside", report.groups_set_aside),
        ("groups outstanding", report.groups_outstanding),
        ("largest staleness", report.max_staleness),
        ("finished records", report.trajectories),
        ("duplicates ignored", report.duplicates_ignored),
    ):
        counts.add_row(name, f"{count:,}")
    counts.add_row(
        "conserved: started = trained + set aside + outstanding",
        Text("yes", style="green") if report.conserved else Text("no", style="bold red"),
    )
    counts.add_section()
    for kind, meaning in MEANINGS.items():
        number = report.violations[kind]
        style = "bold red" if number else "green"
        counts.add_row(f"{kind}: {meaning}", Text(f"{number:,}", style=style))
    print_table(counts, console)
    for finding in report.findings:
        console.print(Text.assemble((finding.kind, "bold red"), ": ", finding.sentence))
    total = sum(report.violations.values())
    if total > len(report.findings):
        console.print(f"... {total:,} violations in all; the first of each kind are shown")
    for note in report.notes:
        console.print(Text.assemble(("note", "yellow"), ": ", note))
    if report.violated:
        console.print(Text(f"{total:,} violations: the log breaks the rules", style="bold red"))
    else:
        console.print(Text("no violation: every rule was kept", style="bold green"))
