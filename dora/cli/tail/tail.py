"""`dora tail`: the records of a run, decoded, as they come."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from dora.bus.reader import BEGINNING, END, LogReader, Message
from dora.bus.settings import ClusterSettings, cluster_settings
from dora.bus.topics import RunTopics, TopicAdmin
from dora.cli.options import Command, config_file_option, json_option, kafka_options, print_line
from dora.cli.tail.lines import as_line, as_object, version_of
from dora.config import KafkaSection
from dora.core.ring import slot_starts
from dora.errors import UsageError
from dora.schemas.records import Policy, RunStarted

TOPICS = ("chunks", "trajectories", "steps", "policies", "workers", "dispatch", "dead-letters")

_READ_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where to begin: at an offset (or BEGINNING, END), or with the last `last` records."""

    offset: int = END
    last: int | None = None


def _origin(context: click.Context, parameter: click.Parameter, text: str) -> Origin:
    """Parse `beginning`, `end`, `-N` for the last N records, or an offset."""
    if text == "beginning":
        return Origin(BEGINNING)
    if text == "end":
        return Origin(END)
    if re.fullmatch(r"-[1-9]\d*", text):
        return Origin(last=-int(text))
    if re.fullmatch(r"\d+", text):
        return Origin(int(text))
    raise click.BadParameter(
        f"{text!r} is not one of beginning, end, -N or OFFSET", context, parameter
    )


@click.command(cls=Command)
@click.argument("run")
@click.option(
    "-t",
    "--topic",
    "kind",
    type=click.Choice(TOPICS),
    default="trajectories",
    show_default=True,
    help="Which of the run's topics.",
)
@click.option(
    "-o",
    "--offset",
    "origin",
    callback=_origin,
    default="end",
    show_default=True,
    metavar="beginning|end|-N|OFFSET",
    help="Where to begin: -N shows the last N records, OFFSET counts in each partition.",
)
@click.option("--version", type=click.IntRange(min=0), help="Only records of this policy version.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="End after N records; with --text after N finished trajectories.",
)
@click.option("--exit", "stop_at_end", is_flag=True, help="End at the end of the log.")
@click.option("--text", is_flag=True, help="Show responses as they are generated.")
@click.option("--trajectory", metavar="ID", help="With --text: only this one, from its beginning.")
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --text: trajectories on the terminal at once; by default as many as fit.",
)
@config_file_option
@kafka_options
@json_option
@click.pass_context
def tail(
    context: click.Context,
    run: str,
    kind: str,
    origin: Origin,
    version: int | None,
    limit: int | None,
    stop_at_end: bool,
    text: bool,
    trajectory: str | None,
    rows: int | None,
    config_file: Path | None,
    kafka: KafkaSection,
    as_json: bool,
) -> None:
    """Follow the records of RUN, one per line.

    Columns: time, partition@offset, record. Only committed records are shown. With --json one
    object a line, with all fields.

    With --text: responses while they are generated, several at once on a terminal,
    a line for each new piece elsewhere.
    """
    given = {
        name
        for name in ("kind", "origin", "trajectory", "rows", "config_file")
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    if text:
        from dora.cli.tail.text import TextOptions, tail_text

        if "kind" in given:
            raise UsageError("--text shows chunks and trajectories: leave --topic out")
        if origin.last is not None or origin.offset >= 0:
            raise UsageError("--text begins at the beginning or at the end: -o beginning, -o end")
        whole = trajectory is not None and "origin" not in given
        options = TextOptions(
            run, whole or origin.offset == BEGINNING, version, trajectory, limit, rows, stop_at_end,
            as_json, config_file,
        )  # fmt: skip
        tail_text(options, kafka)
        return
    if given & {"trajectory", "rows", "config_file"}:
        raise UsageError("--trajectory, --rows and --config are for --text")
    settings = cluster_settings(kafka)
    topics = RunTopics(run)
    topic = f"{run}.{kind}"
    with TopicAdmin(settings) as admin:
        counts = {info.name: info.partitions for info in admin.describe(run)}
        if topic not in counts:
            raise admin.unknown_run(run)
    with LogReader(settings, client_id=f"{run}.tail") as reader:
        wanted = {(topic, partition): origin.offset for partition in range(counts[topic])}
        if version is not None and kind in ("chunks", "trajectories"):
            wanted = _range_of(settings, topics, topic, version, wanted, origin)
        messages = _messages(reader, wanted, origin, version, stop_at_end)
        for message in itertools.islice(messages, limit):
            print_line(json.dumps(as_object(message)) if as_json else as_line(message))


def _messages(
    reader: LogReader,
    wanted: Mapping[tuple[str, int], int],
    origin: Origin,
    version: int | None,
    stop_at_end: bool,
) -> Iterator[Message]:
    """The messages to show, in order of time as far as they are there already."""

    def fits(message: Message) -> bool:
        return version is None or version_of(message.value) == version

    if origin.last is not None:
        # Transaction markers take offsets too: read a little more, and keep the last records.
        starts, ends = reader.start_offsets(list(wanted)), reader.end_offsets(list(wanted))
        reader.assign({key: max(starts[key], ends[key] - 2 * origin.last - 2) for key in wanted})
        seen = [message for message in reader.read_to_end(_READ_SECONDS) if fits(message)]
        seen.sort(key=lambda message: message.timestamp_ms)
        yield from seen[-origin.last :]
    else:
        if origin.offset >= 0:
            # Partitions differ in length: where there is less, begin at the end.
            starts, ends = reader.start_offsets(list(wanted)), reader.end_offsets(list(wanted))
            wanted = {key: min(max(at, starts[key]), ends[key]) for key, at in wanted.items()}
        reader.assign(wanted)
        if stop_at_end:
            yield from filter(fits, reader.read_to_end(_READ_SECONDS))
    while not stop_at_end:
        yield from filter(fits, reader.poll(timeout=1.0))


def _range_of(
    settings: ClusterSettings,
    topics: RunTopics,
    topic: str,
    version: int,
    wanted: Mapping[tuple[str, int], int],
    origin: Origin,
) -> dict[tuple[str, int], int]:
    """Only the partitions of the version's slot, from where the version starts in them."""
    started: RunStarted | None = None
    policy: Policy | None = None
    with LogReader(settings, client_id=f"{topics.run}.tail") as reader:
        reader.assign({(topics.steps, 0): BEGINNING, (topics.policies, 0): BEGINNING})
        for message in reader.read_to_end(_READ_SECONDS):
            match message.value:
                case RunStarted():
                    started = message.value
                case Policy() if message.value.version == version:
                    policy = message.value
    if started is None:
        return dict(wanted)
    policies = {} if policy is None else {version: policy}
    starts = slot_starts(policies, [version], topic, started.ring, started.lanes, unknown=BEGINNING)
    return starts if origin.offset == BEGINNING else dict.fromkeys(starts, origin.offset)
