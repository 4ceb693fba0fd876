"""`dora tail`: the records of a run, decoded, as they come."""

import itertools
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import click
from click.core import ParameterSource

from dora.bus.reader import BEGINNING, END, LogReader, Message
from dora.bus.settings import ClusterSettings, cluster_settings
from dora.bus.topics import RunTopics, TopicAdmin
from dora.cli.options import Command, config_file_option, json_option, kafka_options, print_line
from dora.cli.tail.lines import as_line, as_object, formatted, version_of
from dora.config import KafkaSection
from dora.core.ring import slot_starts
from dora.errors import UsageError
from dora.schemas.records import Policy, RunStarted

TOPICS = ("chunks", "trajectories", "steps", "policies", "workers", "dispatch", "dead-letters")

_READ_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where to begin: at an offset (or BEGINNING, END), with the last `last` records, or at the
    time `since` (Unix milliseconds)."""

    offset: int = END
    last: int | None = None
    since: int | None = None


def _origin(context: click.Context, parameter: click.Parameter, text: str) -> Origin:
    """Parse `beginning`, `end`, `-N` for the last N records, `s@WHEN`, or an offset."""
    if text == "beginning":
        return Origin(BEGINNING)
    if text == "end":
        return Origin(END)
    if re.fullmatch(r"-[1-9]\d*", text):
        return Origin(last=-int(text))
    if re.fullmatch(r"\d+", text):
        return Origin(int(text))
    if text.startswith("s@"):
        return Origin(BEGINNING, since=_moment(context, parameter, text[2:]))
    raise click.BadParameter(
        f"{text!r} is not one of beginning, end, -N, OFFSET or s@WHEN", context, parameter
    )


def _moment(context: click.Context, parameter: click.Parameter, text: str) -> int:
    """Unix milliseconds: as given, of a date and time, or so long ago (`90s`, `10m`, `2h`)."""
    ago = re.fullmatch(r"(\d+)([smhd])", text)
    if ago is not None:
        seconds = int(ago[1]) * {"s": 1, "m": 60, "h": 3_600, "d": 86_400}[ago[2]]
        return time.time_ns() // 1_000_000 - 1000 * seconds
    if re.fullmatch(r"\d{11,14}", text):
        return int(text)
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no time: give 10m or 2h for so long ago, 2026-01-31T12:00, or Unix "
            "milliseconds",
            context,
            parameter,
        ) from None


def _end(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    return None if text is None else _moment(context, parameter, text)


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
    metavar="beginning|end|-N|OFFSET|s@WHEN",
    help="Where to begin: -N shows the last N records, OFFSET counts in each partition, WHEN is "
    "10m or 2h for so long ago, a date and time, or Unix milliseconds.",
)
@click.option(
    "--until", "end", metavar="WHEN", callback=_end, help="End before records of this time."
)
@click.option(
    "-p",
    "--partition",
    "partitions",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="N",
    help="Only this partition; may be repeated.",
)
@click.option("--version", type=click.IntRange(min=0), help="Only records of this policy version.")
@click.option(
    "-c",
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="End after N records; with --text after N finished trajectories.",
)
@click.option(
    "-f",
    "--format",
    "form",
    metavar="FORMAT",
    help="Print this for each record, as kcat does: %t topic, %p partition, %o offset, %k key, %T "
    r"time in ms, %h headers, %s record as JSON, \n, \t, %%.",
)
@click.option("-e", "--exit", "stop_at_end", is_flag=True, help="End at the end of the log.")
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
    end: int | None,
    partitions: tuple[int, ...],
    version: int | None,
    limit: int | None,
    form: str | None,
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
        for name in (
            "kind",
            "origin",
            "trajectory",
            "rows",
            "config_file",
            "end",
            "partitions",
            "form",
        )
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    if text:
        from dora.cli.tail.text import TextOptions, tail_text

        if given & {"kind", "end", "partitions", "form"}:
            raise UsageError(
                "--text shows chunks and trajectories as text: leave --topic out, and --until, "
                "--partition and --format"
            )
        if origin.last is not None or origin.offset >= 0 or origin.since is not None:
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
    if form is not None and as_json:
        raise UsageError("--json and --format are two forms: give one")
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
        if partitions:
            absent = sorted(set(partitions) - set(range(counts[topic])))
            if absent:
                raise UsageError(f"{topic} has partitions 0 to {counts[topic] - 1}, no {absent[0]}")
            wanted = {place: at for place, at in wanted.items() if place[1] in partitions}
        if end is not None:
            stop_at_end = stop_at_end or end <= time.time_ns() // 1_000_000
        messages = _messages(reader, wanted, origin, version, stop_at_end)
        if end is not None:
            messages = _before(messages, end, set(wanted))
        for message in itertools.islice(messages, limit):
            if form is not None:
                click.echo(formatted(message, form), nl=False)
            else:
                print_line(json.dumps(as_object(message)) if as_json else as_line(message))


def _before(
    messages: Iterable[Message], end: int, waiting: set[tuple[str, int]]
) -> Iterator[Message]:
    """The messages before the time `end`, until every partition has passed it."""
    for message in messages:
        if message.timestamp_ms < end:
            yield message
        else:
            waiting.discard((message.topic, message.partition))
            if not waiting:
                return


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
        if origin.since is not None:
            wanted = reader.offsets_since(list(wanted), origin.since)
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
