"""`dora import`: prompts for a task, or trajectories for a trainer, from files."""

import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from dora.atomic_write import atomic_write
from dora.bus.settings import cluster_settings
from dora.cli.console import waiting
from dora.cli.options import (
    Command,
    ConfigSource,
    cluster_options,
    json_option,
    local_broker,
    print_line,
    sets_option,
    wait_option,
    with_broker,
)
from dora.cli.process_log import log_to_stderr
from dora.config import PolicySection
from dora.config.loading import KafkaOverrides, load_config
from dora.errors import UsageError
from dora.producers.tasks.import_files import find_files
from dora.producers.tasks.import_prompts import Columns, Decode, Prompts, prompts_of


@click.command(name="import", cls=Command)
@click.argument(
    "paths", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="TASK.jsonl",
    help="Make the prompts of a task of task.kind = jsonl.",
)
@click.option("--prompt-field", metavar="NAME", help="Column with the prompt.")
@click.option("--answer-field", metavar="NAME", help="Column with the reference answer.")
@click.option("--keep", multiple=True, metavar="NAME", help="A column to keep; may be repeated.")
@click.option(
    "--min-reward", type=float, metavar="R", help="Leave out rows with less reward, or without one."
)
@click.option(
    "--tokenizer",
    metavar="MODEL",
    help="Directory or name of the model whose tokenizer made prompts that are token ids.",
)
@click.option(
    "--serve",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="CONFIG",
    help="Feed the exported trajectories to the trainer of CONFIG's run.",
)
@sets_option("With --serve: override a key of CONFIG; may be repeated.")
@wait_option
@cluster_options
@json_option
def import_command(
    paths: tuple[Path, ...],
    out: Path | None,
    prompt_field: str | None,
    answer_field: str | None,
    keep: tuple[str, ...],
    min_reward: float | None,
    tokenizer: str | None,
    config_path: Path | None,
    sets: tuple[str, ...],
    wait: float,
    overrides: KafkaOverrides,
    broker_directory: Path,
    as_json: bool,
) -> None:
    """Make prompts for a run from FILEs (JSON lines, Parquet, or directories of them), or feed a
    trainer with the trajectories that `dora export` wrote there.

    With --out every prompt is written once, in the order of its first occurrence, with its
    reference answer. With --serve the trajectories take the place of coordinator and workers, as
    with `dora replay --serve`, but from files: the log that they came from may be deleted.
    """
    if (out is None) == (config_path is None):
        raise UsageError("give --out FILE for prompts, or --serve CONFIG for trajectories")
    if config_path is not None:
        if prompt_field or answer_field or keep or tokenizer or min_reward is not None:
            raise UsageError("--serve takes trajectories as they are: leave the others out")
        serve_files(paths, config_path, sets, wait, overrides, broker_directory, as_json)
        return
    assert out is not None
    files = find_files(paths)
    with waiting(f"reading {len(files)} files", quiet=as_json):
        decode = None if tokenizer is None else _decode(tokenizer)
        columns = Columns(prompt_field, answer_field, keep)
        made = prompts_of(files, columns, least=min_reward, decode=decode)
        new = _write(out, made)
    if as_json:
        print_line(json.dumps(_summary(out, made, new)))
        return
    state = "" if new else " (it was there already)"
    print_line(f"{out}: {len(made.items):,} prompts from {made.rows:,} rows{state}")
    if made.repeated:
        print_line(
            f"{made.repeated:,} rows repeat a prompt, {made.conflicting:,} of them with another "
            "answer"
        )
    if made.unsuited:
        print_line(f"{made.unsuited:,} rows left out: too little reward, or a held-out prompt")
    if made.conversations:
        print_line("prompts are conversations: set task.chat_template = true")


def _summary(out: Path, made: Prompts, new: bool) -> dict[str, Any]:
    return {
        "out": str(out),
        "prompts": len(made.items),
        "rows": made.rows,
        "repeated": made.repeated,
        "conflicting": made.conflicting,
        "left_out": made.unsuited,
        "conversations": made.conversations,
        "written": new,
    }


def _write(out: Path, made: Prompts) -> bool:
    """Write the data set; False if it is there already. UsageError if something else is."""
    text = "".join(made.lines())
    try:
        if out.exists():
            if out.read_bytes() != text.encode():
                raise UsageError(
                    f"{out} exists and holds something else",
                    hint="Name another file: a data set that a run uses must not change.",
                )
            return False
        atomic_write(out, text)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from error
    return True


def _decode(model: str) -> Decode:
    from dora.producers.tasks.prompts import prompt_text
    from dora.producers.tasks.tokenization import load_tokenizer

    tokenizer = load_tokenizer(PolicySection(model=model))
    highest = tokenizer.highest_id

    def decode(token_ids: Sequence[int]) -> str:
        for token in token_ids:
            if not 0 <= token <= highest:
                raise ValueError(f"{token} is no token of {model} (0 to {highest})")
        return prompt_text(tokenizer, token_ids)

    return decode


def serve_files(
    paths: Sequence[Path],
    config_path: Path,
    sets: tuple[str, ...],
    wait: float,
    overrides: KafkaOverrides,
    broker_directory: Path,
    as_json: bool,
) -> None:
    """Make the topics of the configured run, and feed its trainer from the files. Raises as
    `FileRecording` and `ReplayServer` do."""
    from dora.bus.topics import TopicAdmin, topic_plan
    from dora.cli.coordinator import stop_on_signals
    from dora.producers.replay.exported import FileRecording
    from dora.producers.replay.serving import ReplayServer

    log_to_stderr()
    config = load_config(config_path, sets=sets, kafka=overrides)
    if config.kafka.bootstrap_servers is None:
        config = with_broker(config, local_broker(broker_directory))
    settings = cluster_settings(config.kafka)
    recording = FileRecording(find_files(paths), config)
    with TopicAdmin(settings) as admin:
        new = admin.create(topic_plan(config), exist_ok=True)
    source = ConfigSource(config_path, sets, broker_directory)
    command = ["dora", "train", *source.arguments(config)]
    stream = sys.stderr if as_json else sys.stdout
    made = f"made the topics of {recording.name}; " if new else ""
    click.echo(
        f"{made}start its trainer beside this command:\n  {shlex.join(command)}", file=stream
    )
    stream.flush()
    server = ReplayServer(recording, config, settings, speed=math.inf, wait=wait)
    report = server.serve(stop_on_signals())
    if as_json:
        print_line(json.dumps(report.to_json() | {"left_out": recording.left_out}, indent=2))
        return
    print_line(f"{report.outcome}: {report.run} is at version {report.version}")
    print_line(
        f"served {report.groups:,} of {report.recorded_groups:,} groups with "
        f"{report.trajectories:,} trajectories in {report.seconds:.1f} s from files of run "
        f"{report.source}"
    )
    if recording.left_out:
        print_line(
            f"{recording.left_out:,} groups were left out: they, or a prompt before them, are not "
            "whole in the files"
        )
    print_line(f"an export has no chunks: `dora audit {report.run} --no-chunks` checks the rest")
