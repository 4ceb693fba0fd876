"""`dora tail --text`: responses as they are generated.

On a terminal several trajectories at once, elsewhere a line for each piece of text; in
both forms a token is shown once, from any attempt (see `core.transcripts`).
"""

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live

from dora.bus.reader import BEGINNING, END, LogReader, Unreadable
from dora.bus.settings import cluster_settings
from dora.cli.options import print_line
from dora.cli.tail.text_rows import ROW_LINES, TextRows, TextScreen, ending, readable
from dora.config import Config, KafkaSection
from dora.core.ring import parse_trajectory_id, partition, slot_partitions, version_starts
from dora.core.transcripts import Decode, Piece, Transcripts
from dora.errors import PolicyError
from dora.log.recorded_config import recorded_config
from dora.log.run_log import RunLog
from dora.producers.tasks.tokenization import tokenizer_of
from dora.schemas.records import Chunk, Trajectory

_READ_SECONDS = 600.0
_POLL_SECONDS = 0.2
_SETTLE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What is shown. `limit` counts finished trajectories; `rows` None fits the terminal."""

    run: str
    beginning: bool
    version: int | None
    trajectory: str | None
    limit: int | None
    rows: int | None
    stop_at_end: bool
    as_json: bool
    config_file: Path | None


def tail_text(options: TextOptions, kafka: KafkaSection) -> None:
    """Show until interrupted, or as `options` say. RunError if the run has not begun, or has no
    such trajectory (the nearest ones are named)."""
    settings = cluster_settings(kafka)
    log = RunLog(settings, options.run)
    version = options.version
    if options.trajectory is not None:
        version = log.version_of(options.trajectory)
    scripts = Transcripts(_decoder(recorded_config(log.started, kafka, options.config_file)))
    wanted = None if options.trajectory is None else {options.trajectory}.__contains__
    with LogReader(settings, client_id=f"{options.run}.tail", wanted=wanted) as reader:
        reader.assign(places(reader, log, version, options))
        pieces = _ended(follow(reader, scripts, version, options), options)
        console = Console(highlight=False)
        if options.as_json:
            for batch in pieces:
                for piece in batch:
                    print_line(json.dumps(dataclasses.asdict(piece)))
        elif console.is_terminal:
            _show(console, pieces, scripts, options)
        else:
            for batch in pieces:
                for piece in batch:
                    print_line(as_line(piece))


def places(
    reader: LogReader, log: RunLog, version: int | None, options: TextOptions
) -> dict[tuple[str, int], int]:
    """Where to begin in chunks and trajectories."""
    ring, lanes = log.started.ring, log.started.lanes
    numbers = range(ring * lanes) if version is None else slot_partitions(version, ring, lanes)
    if options.trajectory is not None and version is not None:
        group, _ = parse_trajectory_id(options.trajectory)
        one = partition(version, group, ring, lanes)
        numbers = range(one, one + 1)
    keys = [(t, n) for t in (log.topics.chunks, log.topics.trajectories) for n in numbers]
    if not options.beginning:
        return dict.fromkeys(keys, END)
    starts = version_starts(log.policies.get(version)) if version is not None else {}
    first = reader.start_offsets(keys)  # retention may have deleted what the version began with
    return {key: max(first[key], starts.get(key, BEGINNING)) for key in keys}


def follow(
    reader: LogReader, scripts: Transcripts, version: int | None, options: TextOptions
) -> Iterator[list[Piece]]:
    """New pieces, again and again; an empty list where there are none for a moment."""
    unreadable = 0

    def told(record: object) -> list[Piece]:
        nonlocal unreadable
        if isinstance(record, Unreadable):
            unreadable += 1
            if unreadable == 1:
                click.echo(f"a record cannot be read and is passed over: {record.reason}", err=True)
            return []
        if not isinstance(record, Chunk | Trajectory):
            return []
        if options.trajectory is not None and record.trajectory_id != options.trajectory:
            return []
        # where versions mix in a trajectory, its own version is the one that it began with
        begun = scripts.find(record.trajectory_id) is not None
        if version not in (None, record.policy_version) and not begun:
            return []
        return [p for p in scripts.on_record(record) if p.last or p.text or p.rewound]

    if options.stop_at_end:
        for message in reader.read_to_end(_READ_SECONDS):
            yield told(message.value)
        yield scripts.settle(everything=True)
        return
    settled = time.monotonic()
    while True:
        for message in reader.poll(timeout=_POLL_SECONDS):
            yield told(message.value)
        if time.monotonic() - settled >= _SETTLE_SECONDS:
            settled = time.monotonic()
            yield scripts.settle()
        yield []


def as_line(piece: Piece) -> str:
    """A piece on one line."""
    attempt = f"#{piece.attempt}" if piece.attempt else ""
    head = f"{piece.trajectory}{attempt}  v{piece.version}  "
    if piece.rewound:
        head += f"[from token {piece.position} on again] "
    line = head + readable(piece.text, newlines=False)
    if not piece.last:
        return line
    tokens = piece.position + piece.tokens
    return f"{line}{' ' * bool(piece.text)}[{ending(piece).plain}, {tokens} tokens]"


def _ended(pieces: Iterator[list[Piece]], options: TextOptions) -> Iterator[list[Piece]]:
    """Pieces until enough trajectories have finished."""
    enough = 1 if options.trajectory is not None else options.limit
    finished = 0
    for batch in pieces:
        yield batch
        finished += sum(piece.last for piece in batch)
        if enough is not None and finished >= enough:
            return


def _show(
    console: Console,
    pieces: Iterator[list[Piece]],
    scripts: Transcripts,
    options: TextOptions,
) -> None:
    rows = TextRows(options.rows or _fitting(console))
    drawn = 0.0
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for batch in pieces:
            now = time.monotonic()
            for piece in batch:
                rows.take(piece, scripts.find(piece.trajectory), now)
            rows.arrange(now)
            if now - drawn >= _POLL_SECONDS / 2:
                drawn = now
                if options.rows is None:
                    rows.resize(_fitting(console))
                live.update(TextScreen(options.run, rows, console.height - 1), refresh=True)
        live.update(TextScreen(options.run, rows, console.height - 1), refresh=True)


def _fitting(console: Console) -> int:
    return max(1, (console.height - 2) // ROW_LINES)


def _decoder(config: Config) -> Decode:
    """How tokens become text; as numbers where there is no tokenizer, which is said."""
    if config.task.kind == "synthetic":
        click.echo(
            f"run {config.run.name} has no tokenizer (task.kind = synthetic): tokens are shown as "
            "numbers",
            err=True,
        )
        return _numbers
    try:
        return tokenizer_of(config).decode
    except PolicyError as error:
        click.echo(f"{error.message}: tokens are shown as numbers", err=True)
        return _numbers


def _numbers(token_ids: Sequence[int]) -> str:
    return "".join(f"{token} " for token in token_ids)
