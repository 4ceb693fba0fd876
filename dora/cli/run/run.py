"""`dora run`: a whole run on this machine, with live progress."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dora.cli.options import (
    Command,
    config_argument,
    config_source,
    from_option,
    json_option,
    local_broker,
)
from dora.config import Config, KafkaSection, RunSection
from dora.config.loading import KafkaOverrides, apply_sets, load_kafka_section, to_toml
from dora.errors import RunError, UsageError


def _recorded_file(
    given: Mapping[str, Any], sets: tuple[str, ...], overrides: KafkaOverrides, broker: Path
) -> Path:
    """Write what the run of `--from` recorded, as of that step, beside the file it came from."""
    from dora.bus.settings import cluster_settings
    from dora.consumers.trainer.origin import Origin
    from dora.log.recorded_config import recorded_config
    from dora.log.run_log import RunLog

    if given["origin"] is None or given["name"] is None:
        raise UsageError(
            "no configuration file is named",
            hint="Only --from RUN@STEP --as NEWRUN does without: it takes what RUN recorded.",
        )
    origin, name = Origin.parse(given["origin"]), given["name"]
    kafka = load_kafka_section(kafka=overrides)
    if kafka.bootstrap_servers is None:
        kafka = kafka.model_copy(update={"bootstrap_servers": local_broker(broker)})
    run = RunLog(cluster_settings(kafka), origin.run)
    run.check_version(origin.step)
    config = recorded_config(run.started, KafkaSection())
    if origin.step:
        config = run.settings.config(run.step(origin.step), config)
    config = apply_sets(config, [*sets, f"run.name={name}"])
    path = config.home / f"{name}.toml"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(to_toml(config))
    except OSError as error:
        raise UsageError(
            f"cannot write the configuration of {origin} to {path}: {error.strerror}",
            hint=f"Name the configuration file: dora run CONFIG --from {origin} --as {name}.",
        ) from error
    click.echo(f"wrote {path}, with what {origin} was trained with", err=True)
    return path


@click.command(cls=Command)
@config_argument(broker=False, missing=_recorded_file)
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

    With --from the run begins with a step of another one, instead of with policy.model. Without
    CONFIG it then takes the configuration that the other one recorded, and writes it to a file.
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
