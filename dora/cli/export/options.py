"""Options of `dora export` for some kinds of targets, and how those targets are opened.

An option that the chosen kind does not have is refused, not ignored.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from dora.cli.options import Command, config_file_option, key_values, sets_option
from dora.config import KafkaSection
from dora.consumers.export.preferences import PreferenceTarget, Texts
from dora.consumers.export.targets import Say, Target
from dora.core.preferences import Choice, Form, Kind
from dora.errors import UsageError
from dora.log.recorded_config import recorded_config
from dora.schemas.records import RunStarted

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


def target_options(command: Command) -> Command:
    """The options of all kinds; the command gets `options`, by the names of `_FLAGS`."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        options = {name: kwargs.pop(name) for name in _FLAGS}
        return command(*args, options=options, **kwargs)

    options: tuple[Callable[[Command], Command], ...] = (
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
    decorated: Command = wrapper
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


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


def open_sft(place: Path, started: RunStarted, say: Say, **given: Any) -> Target:
    """`--to sft`."""
    return _open_data_set("sft", place, started, say, **given)


def open_dpo(place: Path, started: RunStarted, say: Say, **given: Any) -> Target:
    """`--to dpo`."""
    return _open_data_set("dpo", place, started, say, **given)


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


def _open_data_set(
    kind: Kind,
    place: Path,
    started: RunStarted,
    say: Say,
    *,
    kafka: KafkaSection,
    form: Form = "text",
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
    choice = Choice(kind, form, min_reward, min_margin)
    return PreferenceTarget(place, started, say, choice=choice, texts=texts)
