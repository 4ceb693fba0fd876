"""`dora export`: a run's trajectories where a data platform reads them.

A target is a line of `TARGETS`; its module is imported when it is asked for. An option that the
target does not have is refused, not ignored.
"""

import functools
import importlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from dora.bus.settings import cluster_settings
from dora.cli.console import waiting
from dora.cli.options import (
    Command,
    Function,
    config_file_option,
    json_option,
    kafka_options,
    key_values,
    print_line,
    sets_option,
    timeout_option,
)
from dora.config import KafkaSection
from dora.consumers.export.preferences import PreferenceTarget, Texts
from dora.consumers.export.run import Summary, VersionRange, check_complete, export_run, spans
from dora.consumers.export.targets import Report, Target
from dora.core import preferences
from dora.errors import UsageError
from dora.log.recorded_config import recorded_config
from dora.schemas.records import RunStarted

_CONFIGURED = ("config_file", "sets")
"""Options of kinds that need the run's configuration, and with it the way to the cluster."""
_BOUNDS = re.compile(r"(\d*):(\d*)")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of target: its class, called with directory, run and `report`, its line of help, and
    the options that it alone has."""

    target: str
    summary: str
    options: tuple[str, ...] = ()


TARGETS: dict[str, Kind] = {
    "parquet": Kind(
        "dora.consumers.export.directories:ParquetTarget", "Parquet files, a directory per version"
    ),
    "jsonl": Kind(
        "dora.consumers.export.directories:JsonlTarget", "lines of JSON, a directory per version"
    ),
    "iceberg": Kind(
        "dora.consumers.export.iceberg:IcebergTarget",
        "a table of an Iceberg catalog",
        ("catalog", "storage"),
    ),
    "delta": Kind("dora.consumers.export.delta:DeltaTarget", "a Delta table", ("storage",)),
    "sft": Kind(
        "dora.cli.export:open_sft",
        "the best response of each group, to imitate",
        ("form", "min_reward", *_CONFIGURED),
    ),
    "dpo": Kind(
        "dora.cli.export:open_dpo",
        "the best and the worst response of each group, to prefer one",
        ("form", "min_reward", "min_margin", *_CONFIGURED),
    ),
}


_FLAGS = {
    "catalog": "--catalog",
    "storage": "--property",
    "form": "--form",
    "min_reward": "--min-reward",
    "min_margin": "--min-margin",
    "config_file": "--config",
    "sets": "--set",
}
"""By the name of the argument that a target takes."""


def target_options(command: Function) -> Function:
    """The options of all kinds; the command gets `options`, by the names of `_FLAGS`."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        options = {name: kwargs.pop(name) for name in _FLAGS}
        return command(*args, options=options, **kwargs)

    options: tuple[Callable[[Function], Function], ...] = (
        click.option(
            "--catalog",
            metavar="NAME",
            help="iceberg: another catalog than SQLite in DIR; DIR is then namespace.table.",
        ),
        click.option(
            "--property",
            "storage",
            multiple=True,
            callback=key_values,
            metavar="KEY=VALUE",
            help="iceberg, delta: of the catalog or the storage; may be repeated.",
        ),
        click.option(
            "--form",
            type=click.Choice(["text", "chat", "tokens"]),
            help="sft, dpo: prompts and responses as text (the default) or messages; sft: token "
            "ids and labels.",
        ),
        click.option(
            "--min-reward",
            type=float,
            metavar="R",
            help="sft, dpo: least reward of a response to imitate; sft has the run's "
            "task.success_threshold by default.",
        ),
        click.option(
            "--min-margin",
            type=click.FloatRange(min=0),
            metavar="R",
            help="dpo: least difference of the two rewards; by default any.",
        ),
        config_file_option,
        sets_option("sft, dpo: change a key of it, such as policy.tokenizer."),
    )
    decorated: Function = wrapper
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


@click.command(cls=Command)
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

    report = partial(click.echo, err=True)

    def open_target(started: RunStarted) -> Target:
        opened: Target = _load(kind.target)(place, started, report, **arguments)
        return opened

    with waiting(f"reading {run}", quiet=as_json) as progress:
        summary = export_run(
            cluster_settings(kafka),
            run,
            open_target,
            wanted=wanted,
            ended=ended,
            write_dead_letters=not no_dead_letters,
            deadline=timeout,
            report=progress,
        )
    if as_json:
        print_line(json.dumps(summary.to_json() | {"to": to}))
    else:
        show(summary)
    check_complete(summary)


def wanted_versions(version: int | None, versions: str | None) -> VersionRange:
    """What `--version` and `--versions` ask for; UsageError if they contradict each other."""
    if versions is None:
        return VersionRange(version, version)
    if version is not None:
        raise UsageError("give --version or --versions, not both")
    match = _BOUNDS.fullmatch(versions)
    first, last = (int(text) if text else None for text in match.groups()) if match else (0, -1)
    if first is not None and last is not None and first > last:
        raise UsageError(
            f"--versions {versions}: not of the form A:B with A <= B",
            hint="Examples: 3:7, 3: (from 3 on), :7 (up to 7).",
        )
    return VersionRange(first, last)


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


def arguments_of(kind: str, allowed: tuple[str, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for a target of `kind`, which has the `allowed` ones: those that were given.

    UsageError if others were given.
    """
    arguments = {name: value for name, value in given.items() if value not in (None, (), {})}
    wrong = [_FLAGS[name] for name in arguments if name not in allowed]
    if wrong:
        raise UsageError(
            f"{wrong[0]} does not go with --to {kind}",
            hint=f"It has {', '.join(_FLAGS[name] for name in allowed)}." if allowed else None,
        )
    return arguments


def place_of(kind: str, text: str) -> Path | str:
    """The directory `text`, or for Delta an address; UsageError for an address elsewhere."""
    if "://" not in text:
        return Path(text)
    if kind == "delta":
        return text
    raise UsageError(
        f"--to {kind} writes to a directory of this machine, which {text} is not",
        hint="Addresses go with --to delta; for Iceberg give --catalog and the table's name.",
    )


def open_sft(place: Path, started: RunStarted, report: Report, **given: Any) -> Target:
    """`--to sft`."""
    return _open_data_set("sft", place, started, report, **given)


def open_dpo(place: Path, started: RunStarted, report: Report, **given: Any) -> Target:
    """`--to dpo`."""
    return _open_data_set("dpo", place, started, report, **given)


def _open_data_set(
    kind: preferences.Kind,
    place: Path,
    started: RunStarted,
    report: Report,
    *,
    kafka: KafkaSection,
    form: preferences.Form = "text",
    min_reward: float | None = None,
    min_margin: float = 0.0,
    config_file: Path | None = None,
    sets: tuple[str, ...] = (),
) -> Target:
    if kind == "dpo" and form == "tokens":
        raise UsageError(
            "--to dpo has no --form tokens: trainers of preferences read texts only",
            hint="Use --form text or --form chat.",
        )
    config = recorded_config(started, kafka, config_file, sets)
    if min_reward is None and kind == "sft":
        min_reward = config.task.success_threshold
    texts: Texts | None = None
    if form != "tokens":
        if config.task.kind == "synthetic":
            raise UsageError(
                f"prompts and responses of run {started.run} are token ids without a text "
                "(task.kind = synthetic): there is nothing to write down",
                hint="--to sft --form tokens and --to parquet take token ids.",
            )
        from dora.producers.tasks.prompts import RunTexts
        from dora.producers.tasks.tokenization import load_tokenizer

        texts = RunTexts(config, load_tokenizer(config.policy, config.task.template_date))
    choice = preferences.Choice(kind, form, min_reward, min_margin)
    return PreferenceTarget(place, started, report, choice=choice, texts=texts)


def details_line(details: Mapping[str, int]) -> str:
    """What a data set got, and what gave nothing, for people."""
    counts = dict(details)
    text = f"{counts.pop('examples', 0):,} examples"
    otherwise = counts.pop("tokenised_otherwise", 0)
    if counts:
        named = ", ".join(f"{n:,} {why.replace('_', ' ')}" for why, n in sorted(counts.items()))
        text += f"; groups that gave none: {named}"
    if otherwise:
        text += (
            f"; {otherwise:,} texts give other tokens than the policy's when they are tokenised "
            "again"
        )
    return text
