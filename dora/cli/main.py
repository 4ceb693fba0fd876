"""The command `dora`: its subcommands, imported when they are used, and how errors are shown.

`dora --help` imports nothing heavier than click. A `DoraError` becomes `error: ...` on
standard error with its hint and its exit code; only a defect of dora shows a traceback.
"""

import atexit
import importlib
import io
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Never

import click

from dora import __version__
from dora.cli.parent_watch import SUPERVISOR, follow_supervisor
from dora.errors import DoraError, ExitCode

RANK_PARENT = "DORA_RANK_PARENT"


@dataclass(frozen=True, slots=True)
class Entry:
    """A subcommand: where it is defined, and its line in the help."""

    target: str
    summary: str
    hidden: bool = False


COMMANDS: dict[str, Entry] = {
    "run": Entry("dora.cli.run.run:run", "Run everything on this machine, with live progress."),
    "list": Entry("dora.cli.status:list_command", "List the runs of a cluster."),
    "status": Entry("dora.cli.status:status", "Show window, backlog, workers and rates of a run."),
    "tail": Entry("dora.cli.tail.tail:tail", "Follow the records of a run, decoded."),
    "replay": Entry(
        "dora.cli.replay.replay:replay", "Train from the log again, or feed a trainer from it."
    ),
    "audit": Entry("dora.cli.audit:audit", "Prove consistency and exactly-once from the log."),
    "rescore": Entry(
        "dora.cli.rescore.rescore:rescore", "Score logged trajectories with a new verifier."
    ),
    "inspect": Entry("dora.cli.inspect.inspect:inspect", "List trajectories, or look at one."),
    "export": Entry("dora.cli.export:export", "Write trajectories as Parquet, tables, data sets."),
    "import": Entry(
        "dora.cli.imports:import_command", "Make prompts, or feed a trainer, from files."
    ),
    "report": Entry("dora.cli.report:report", "Write a run as one HTML file with plots."),
    "broker": Entry("dora.cli.broker:broker", "Start, stop and inspect the local Kafka broker."),
    "topics": Entry("dora.cli.topics.topics:topics", "Create, describe and delete a run's topics."),
    "coordinator": Entry("dora.cli.coordinator:coordinator", "Run the coordinator of a run."),
    "rollout": Entry("dora.cli.rollout:rollout", "Run one rollout worker."),
    "train": Entry("dora.cli.train:train", "Run the trainer of a run."),
    "bench": Entry("dora.cli.bench.bench:bench", "Measure schedules and engines on this machine."),
    "simulate": Entry("dora.cli.simulate:simulate", "Plan: schedules in virtual time, and advice."),
    "doctor": Entry("dora.cli.doctor:doctor", "Show what this machine lacks, and how to get it."),
    "prepare": Entry(
        "dora.cli.run.prepare:prepare", "Make the model directory of a run.", hidden=True
    ),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for."""

    def __init__(self, *args: Any, entries: dict[str, Entry], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return list(self.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        entry = self.entries.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        rows = [(name, entry.summary) for name, entry in self.entries.items() if not entry.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and turn dora's errors into messages and exit codes."""
        try:
            return super().invoke(ctx)
        except DoraError as error:
            click.echo(f"error: {error.message}", err=True)
            if error.hint:
                click.echo(f"  {error.hint}", err=True)
            # Only a supervisor asks for the difference; people see the documented codes.
            supervised = bool(ctx.obj) and error.exit_code == ExitCode.FAILED and error.permanent
            ctx.exit(ExitCode.PERMANENT if supervised else error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)


@click.group(
    cls=LazyGroup,
    entries=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="dora %(version)s")
def cli() -> None:
    """Asynchronous reinforcement learning of language models over Apache Kafka."""


def main() -> None:
    """Entry point of the `dora` command."""
    code: list[int] = []
    atexit.register(_leave, code)  # registered first, it is called last
    signal.signal(signal.SIGTERM, _terminated)
    for stream in (sys.stdout, sys.stderr):
        # A terminal or pipe of Latin-1 or ASCII shows what it lacks as an escape and ends nothing.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    supervised = SUPERVISOR in os.environ or RANK_PARENT in os.environ
    follow_supervisor()
    try:
        cli.main(prog_name="dora", obj=supervised)
    except SystemExit as end:
        if isinstance(end.code, int):
            code.append(end.code)
        raise


def _leave(code: list[int]) -> None:
    """End the process with this code, after all else that asked to be called at its end.

    Where torch or vLLM is loaded, taking the interpreter apart object by object takes seconds, for
    which a run would wait at its end and at each restart.
    """
    if "torch" not in sys.modules or not code:
        return
    import logging

    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a pipe without a reader
            stream.flush()
    os._exit(code[0])


def _terminated(number: int, frame: FrameType | None) -> Never:
    """Let `finally` blocks and context managers run when the process is asked to end."""
    raise SystemExit(128 + number)
