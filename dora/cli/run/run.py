"""`dora run`: a whole run on this machine, with live progress."""

import json
from dataclasses import replace

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dora.cli.options import config_argument, config_source, from_option, json_option
from dora.config import Config, RunSection
from dora.errors import RunError, UsageError


@click.command()
@config_argument(broker=False)
@click.option("--dry-run", is_flag=True, help="Check everything and print what would be started.")
@click.option(
    "--plain", is_flag=True, help="Print lines instead of the display, also on a terminal."
)
@click.option(
    "--stop-broker",
    is_flag=True,
    help="Stop the local broker at the end if this command started it.",
)
@from_option
@click.option("--as", "name", metavar="NEWRUN", help="With --from: the name of the new run.")
@json_option
def run(
    config: Config,
    dry_run: bool,
    plain: bool,
    stop_broker: bool,
    origin: str | None,
    name: str | None,
    as_json: bool,
) -> None:
    """Run everything that CONFIG describes on this machine, until trainer.steps are committed.

    Starts a local Kafka broker if no cluster is given, makes the model and the topics if they are
    missing, then starts coordinator, trainer and rollout workers and keeps them alive. After an
    interruption or a crash the same command goes on where the log ends. At the end it writes
    summary.json and audits the run. With --json the summary goes to standard output, everything
    else to standard error.

    With --from the run begins with a step of another one, instead of with policy.model.
    """
    source = config_source()
    if name is not None:
        if origin is None:
            raise UsageError("--as names the run that --from begins: give both, or --set run.name")
        source = replace(source, sets=(*source.sets, f"run.name={name}"))
        try:
            section = RunSection.model_validate(config.run.model_dump() | {"name": name})
        except ValueError:
            raise UsageError(f"--as {name}: lower-case letters, digits, - and _ expected") from None
        config = config.model_copy(update={"run": section})
    # A command that only checks must not import what runs processes and reads the log.
    if dry_run:
        _dry_run(config, as_json)
        return
    from dora.cli.run.local_run import LocalRun
    from dora.consumers.trainer.origin import Origin

    console = Console(stderr=as_json)
    local = LocalRun(
        config,
        source,
        console,
        plain=plain,
        stop_broker=stop_broker,
        origin=None if origin is None else Origin.parse(origin),
    )
    summary, verdict = local.execute()
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    if not verdict:
        raise RunError(
            f"the audit of run {config.run.name} found violations",
            hint=f"See `dora audit {config.run.name}`.",
        )


def _dry_run(config: Config, as_json: bool) -> None:
    from dora.cli.run.preflight import preflight

    checks = preflight(config, config_source().broker_directory)
    problems = [check for check in checks if check.outcome == "problem"]
    if as_json:
        rows = [
            {"subject": check.subject, "outcome": check.outcome, "detail": check.detail}
            for check in checks
        ]
        click.echo(json.dumps({"run": config.run.name, "ok": not problems, "checks": rows}))
    else:
        table = Table(box=None, padding=(0, 2), show_header=False)
        styles = {"ok": "green", "plan": "yellow", "problem": "bold red"}
        words = {"ok": "ok", "plan": "would", "problem": "problem"}
        for check in checks:
            outcome = Text(words[check.outcome], style=styles[check.outcome])
            table.add_row(check.subject, outcome, Text(check.detail))
        Console().print(table)
    if problems:
        raise RunError(f"{len(problems)} problems; nothing was started")
