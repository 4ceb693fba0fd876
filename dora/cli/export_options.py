"""Options of `dora export` that go with some kinds of targets only, and how those are opened.

Invariant: an option that the chosen kind does not have is refused, not ignored.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dora.cli.options import Command, config_file_option, sets_option
from dora.config import KafkaSection
from dora.consumers.export_preferences import Choice, Form, Kind, PreferenceTarget, Texts
from dora.consumers.export_targets import Say, Target
from dora.consumers.recorded_config import recorded_config
from dora.errors import UsageError
from dora.schemas.records import RunStarted


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What was given: by the option's name, and only that."""

    given: Mapping[str, Any]

    def of(self, kind: str, allowed: tuple[str, ...], kafka: KafkaSection) -> dict[str, Any]:
        """Arguments for a target of `kind`, which has the `allowed` options; UsageError if others
        were given."""
        wrong = [name for name in self.given if name not in allowed]
        if wrong:
            raise UsageError(
                f"--{wrong[0].replace('_', '-')} does not go with --to {kind}",
                hint="It has " + ", ".join(f"--{n.replace('_', '-')}" for n in allowed) + "."
                if allowed
                else None,
            )
        return {**self.given, "kafka": kafka} if allowed else {}


def target_options(command: Command) -> Command:
    """The options of all kinds; the command gets `options`."""
    own = ("catalog", "property", "form", "min_reward", "min_margin", "config", "set")

    @functools.wraps(command)
    def wrapper(*args: Any, config_file: Path | None, sets: tuple[str, ...], **kwargs: Any) -> Any:
        values = {"config": config_file, "set": sets} | {n: kwargs.pop(n) for n in own[:5]}
        given = {name: value for name, value in values.items() if value not in (None, (), {})}
        return command(*args, options=TargetOptions(given), **kwargs)

    options: tuple[Callable[[Command], Command], ...] = (
        click.option(
            "--catalog",
            metavar="NAME",
            help="iceberg: another catalog than SQLite in DIR; DIR is then namespace.table.",
        ),
        click.option(
            "--property",
            multiple=True,
            callback=_properties,
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


def open_iceberg(
    place: Path, started: RunStarted, say: Say, *, kafka: KafkaSection, **given: Any
) -> Target:
    """`--to iceberg`."""
    from dora.consumers.export_iceberg import IcebergTarget

    properties = given.get("property")
    return IcebergTarget(place, started, say, catalog=given.get("catalog"), properties=properties)


def open_delta(
    place: Path | str, started: RunStarted, say: Say, *, kafka: KafkaSection, **given: Any
) -> Target:
    """`--to delta`."""
    from dora.consumers.export_delta import DeltaTarget

    return DeltaTarget(place, started, say, properties=given.get("property"))


def open_sft(
    place: Path, started: RunStarted, say: Say, *, kafka: KafkaSection, **given: Any
) -> Target:
    """`--to sft`."""
    return _open_data_set("sft", place, started, say, kafka, given)


def open_dpo(
    place: Path, started: RunStarted, say: Say, *, kafka: KafkaSection, **given: Any
) -> Target:
    """`--to dpo`."""
    return _open_data_set("dpo", place, started, say, kafka, given)


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
    kafka: KafkaSection,
    given: Mapping[str, Any],
) -> Target:
    form: Form = given.get("form", "text")
    if kind == "dpo" and form == "tokens":
        raise UsageError(
            "--to dpo has no --form tokens: trainers of preferences read texts only",
            hint="Use --form text or --form chat.",
        )
    config = recorded_config(started, kafka, given.get("config"), given.get("set", ()))
    least = given.get("min_reward")
    if least is None and kind == "sft":
        least = config.task.success_threshold
    texts: Texts | None = None
    if form != "tokens":
        if config.task.kind == "synthetic":
            raise UsageError(
                f"prompts and responses of run {started.run} are token ids without a text "
                "(task.kind = synthetic): there is nothing to write down",
                hint="--to sft --form tokens and --to parquet take token ids.",
            )
        from dora.producers.conversations import RunTexts
        from dora.producers.tokenization import load_tokenizer

        texts = RunTexts(config, load_tokenizer(config.policy))
    choice = Choice(kind, form, least, given.get("min_margin", 0.0))
    return PreferenceTarget(place, started, say, choice=choice, texts=texts)


def _properties(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    properties = {}
    for text in values:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            # the text may be a secret: it is not repeated
            raise click.BadParameter("not of the form KEY=VALUE", context, parameter)
        properties[key.strip()] = value
    return properties
