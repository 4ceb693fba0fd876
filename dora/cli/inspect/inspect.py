"""`dora inspect`: a run's trajectories as a table; one trajectory or one group in full."""

import json
from pathlib import Path
from typing import Any

import click

from dora.cli.console import wide_console
from dora.cli.inspect.listing import Listing, Selection, choose
from dora.cli.inspect.reading import Inspection
from dora.cli.inspect.render import show_group as render_group
from dora.cli.inspect.render import show_rows, show_view
from dora.cli.options import (
    Command,
    config_file_option,
    json_option,
    kafka_options,
    print_line,
    sets_option,
    timeout_option,
)
from dora.config import KafkaSection
from dora.consumers.inspect.conditions import parse_condition
from dora.consumers.inspect.rows import SORT_KEYS
from dora.errors import UsageError


@click.command(name="inspect", cls=Command)
@click.argument("run")
@click.option("--trajectory", "trajectory", metavar="ID", help="Show this one: <group>/<sample>.")
@click.option("--group", "group", metavar="ID", help="Show this group, such as g<ordinal>.")
@click.option("--groups", is_flag=True, help="List groups instead of trajectories.")
@click.option(
    "--version", type=click.IntRange(min=0), metavar="V", help="Only those of this version."
)
@click.option(
    "--step",
    type=click.IntRange(min=1),
    metavar="N",
    help="Only those that the step that made version N trained or set aside.",
)
@click.option(
    "--sort", type=click.Choice(SORT_KEYS), help="Smallest first; mismatch needs --recompute."
)
@click.option("--reverse", is_flag=True, help="Largest first.")
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="CONDITION",
    help="reward<0.5, length>100, finish=length, text~REGEX, ...; may be repeated: all must hold.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    metavar="N",
    help="Show at most N; 0 shows all.",
)
@click.option(
    "--recompute",
    is_flag=True,
    help="Compute the trainer's log-probabilities and entropies with the weights that generated.",
)
@click.option("--logprobs", is_flag=True, help="Print the numbers of each token.")
@config_file_option
@sets_option("Where things are on this machine (policy.model, run.directory, weights.store).")
@timeout_option(300.0)
@kafka_options
@json_option
@click.pass_context
def inspect(
    context: click.Context,
    run: str,
    trajectory: str | None,
    group: str | None,
    groups: bool,
    version: int | None,
    step: int | None,
    sort: str | None,
    reverse: bool,
    filters: tuple[str, ...],
    limit: int,
    recompute: bool,
    logprobs: bool,
    config_file: Path | None,
    sets: tuple[str, ...],
    timeout: float,
    kafka: KafkaSection,
    as_json: bool,
) -> None:
    """List the finished trajectories of RUN, or show one of them or a group.

    A list: id, version, the step that trained it or why none did, staleness then, reward, length,
    finish reason, attempts, worker and mean log-probability. With --trajectory or --group: prompt
    and text, chunk by chunk with times, attempts, log-probability of each token as its colour,
    reward and advantage. Nothing is written, and the run may go on meanwhile.
    """
    selection = Selection(
        groups, version, step, sort, reverse, tuple(map(parse_condition, filters)), limit
    )
    if trajectory is not None and group is not None:
        raise UsageError("--trajectory and --group cannot be combined")
    if trajectory is not None or group is not None:
        _refuse_list_options(context)
    elif logprobs:
        raise UsageError("--logprobs is for --trajectory and --group")
    if selection.needs_mismatch and not recompute:
        raise UsageError(
            "the mismatch of engine and trainer is not in the log: it has to be computed",
            hint="Add --recompute; with --version, --step or other conditions it has less to do.",
        )
    inspection = Inspection(run, kafka, config_file=config_file, sets=sets, timeout=timeout)
    if trajectory is not None:
        _show_one(inspection, trajectory, recompute, as_json, logprobs)
    elif group is not None:
        _show_group(inspection, group, recompute, as_json, logprobs)
    else:
        _show_list(inspection, selection, recompute, as_json)
    _warn(inspection)


def show_trajectory(
    run: str,
    identity: str,
    kafka: KafkaSection,
    *,
    config_file: Path | None = None,
    as_json: bool = False,
    timeout: float = 300.0,
) -> None:
    """Print one trajectory of `run`, for people or as one JSON object.

    `timeout` (seconds) bounds the reading of the log. Raises RunError, naming the nearest ids, if
    the run has no trajectory `identity`, and what `Inspection` raises.
    """
    inspection = Inspection(run, kafka, config_file=config_file, timeout=timeout)
    _show_one(inspection, identity, recompute=False, as_json=as_json, logprobs=False)
    _warn(inspection)


def _show_one(
    inspection: Inspection, identity: str, recompute: bool, as_json: bool, logprobs: bool
) -> None:
    view = inspection.trajectory(identity, recompute=recompute)
    if as_json:
        print_line(json.dumps(view.to_json() | _said(inspection)))
    else:
        show_view(view, wide_console(), logprobs=logprobs)


def _show_group(
    inspection: Inspection, group: str, recompute: bool, as_json: bool, logprobs: bool
) -> None:
    views = inspection.group(group, recompute=recompute)
    if as_json:
        shown: dict[str, Any] = {"run": inspection.log.run, "group": group}
        shown["trajectories"] = [view.to_json() for view in views]
        print_line(json.dumps(shown | _said(inspection)))
    else:
        render_group(views, wide_console(), logprobs=logprobs)


def _show_list(
    inspection: Inspection, selection: Selection, recompute: bool, as_json: bool
) -> None:
    listing = choose(inspection, selection, recompute=recompute)
    name = "groups" if selection.groups else "trajectories"
    if as_json:
        _print_json(inspection, listing, name)
        return
    console = wide_console()
    show_rows(listing.rows, console, recomputed=recompute)
    shown = len(listing.rows)
    text = f"{shown} of {listing.matching} {name}"
    if shown < listing.matching:
        text += f"; {listing.matching - shown} more: --limit 0 shows all"
    console.print(text)
    if listing.unfinished:
        console.print(
            f"{listing.unfinished} trajectories that were started are not in the log as finished"
        )


def _print_json(inspection: Inspection, listing: Listing, name: str) -> None:
    shown = {
        "run": inspection.log.run,
        "matching": listing.matching,
        "unfinished": listing.unfinished,
        name: [row.to_json() for row in listing.rows],
    }
    print_line(json.dumps(shown | _said(inspection)))


def _said(inspection: Inspection) -> dict[str, Any]:
    log = inspection.log
    return {
        "unreadable": log.unreadable,
        "missing": log.missing,
        "remarks": inspection.notes,
    }


def _warn(inspection: Inspection) -> None:
    for text in inspection.warnings():
        click.echo(f"note: {text}", err=True)


def _refuse_list_options(context: click.Context) -> None:
    given = [
        name
        for name in ("groups", "version", "step", "sort", "reverse", "filters", "limit")
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        option = "filter" if given[0] == "filters" else given[0]
        raise UsageError(
            f"--{option} is for lists",
            hint="Leave it out, or leave --trajectory and --group out.",
        )
