"""`dora replay`: train logged steps again, or feed a trainer from the log."""

import contextlib
import json
import logging
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dora.bus.settings import ClusterSettings, cluster_settings
from dora.cli.console import waiting
from dora.cli.options import (
    Command,
    config_file_option,
    json_option,
    kafka_options,
    print_line,
    registry_arguments,
    sets_option,
    timeout_option,
    wait_option,
)
from dora.cli.process_log import log_to_stderr
from dora.config import KafkaSection
from dora.consumers.replay.plan import check_sets, parse_steps
from dora.errors import UsageError
from dora.log.recorded_config import recorded_config
from dora.log.run_log import RunLog


class Speed(click.ParamType):  # type: ignore[type-arg]
    """`recorded`, `full` or a factor, as a number: 1, infinity, or the factor."""

    name = "speed"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """The factor; fails for anything else."""
        if isinstance(value, float):
            return value
        named = {"recorded": 1.0, "full": math.inf}
        try:
            speed = named[value] if value in named else float(value)
        except ValueError:
            speed = math.nan
        if not speed > 0:
            self.fail(f"{value!r} is none of recorded, full, or a factor above 0", param, ctx)
        return speed


@click.command(cls=Command)
@click.argument("run")
@click.option("--step", type=int, metavar="N", help="Replay the step that made version N.")
@click.option("--steps", "span", metavar="A:B", help="Replay steps A to B; without it all.")
@sets_option("What if: train with another value of trainer.*; may be repeated.")
@config_file_option
@click.option("--no-checkpoint", is_flag=True, help="Begin at version 0 in any case.")
@timeout_option(3600.0)
@click.option("--trajectory", metavar="ID", help="Show one trajectory, like `dora inspect`.")
@click.option("--serve", is_flag=True, help="Feed the trainer of another run from the log.")
@click.option("--as", "name", metavar="NEWRUN", help="With --serve: the run to feed.")
@click.option(
    "--speed",
    type=Speed(),
    default="recorded",
    show_default=True,
    metavar="recorded|full|X",
    help="With --serve: at the recorded speed, at once, or X times as fast.",
)
@wait_option
@click.option(
    "--config-out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="With --serve: write NEWRUN's configuration to FILE.",
)
@kafka_options
@json_option
@click.pass_context
def replay(
    context: click.Context,
    run: str,
    step: int | None,
    span: str | None,
    sets: tuple[str, ...],
    config_file: Path | None,
    no_checkpoint: bool,
    timeout: float,
    trajectory: str | None,
    serve: bool,
    name: str | None,
    speed: float,
    wait: float,
    config_out: Path | None,
    kafka: KafkaSection,
    as_json: bool,
) -> None:
    """Train the steps of RUN again from its log, without generating anything.

    Begins at the nearest checkpoint, compares weights and metrics with the ledger and says
    `bit-identical` or shows the first difference, with exit code 1. With --set it shows what
    another loss or learning rate would have done on the same data, beside the recorded values.
    RUN is not changed, and may go on meanwhile.

    With --serve its logged trajectories feed the trainer of another run, NEWRUN, in place of
    coordinator and workers.
    """
    settings = cluster_settings(kafka)
    if trajectory is not None:
        if serve or sets or step is not None or span is not None:
            raise UsageError("--trajectory shows one trajectory and goes with none of the others")
        from dora.cli.inspect.inspect import show_trajectory

        show_trajectory(
            run, trajectory, kafka, config_file=config_file, as_json=as_json, timeout=timeout
        )
        return
    if not serve:
        if name is not None or config_out is not None:
            raise UsageError("--as and --config-out go with --serve")
        first, last = _asked(step, span)
        code = _retrain(
            run, first, last, sets, config_file, no_checkpoint, timeout, kafka, settings, as_json
        )
        context.exit(code)
    if step is not None or span is not None or no_checkpoint:
        raise UsageError("--serve feeds all that was recorded: leave --step and --steps out")
    if name is None:
        raise UsageError("--serve needs the name of the run to feed: --as NEWRUN")
    if name == run:
        raise UsageError(f"--as {name}: a run cannot be fed from itself; give another name")
    _serve(run, name, sets, config_file, timeout, speed, wait, config_out, kafka, settings, as_json)


def _asked(step: int | None, span: str | None) -> tuple[int | None, int | None]:
    if step is not None and span is not None:
        raise UsageError("--step and --steps exclude one another")
    if step is not None:
        return step, step
    return (None, None) if span is None else parse_steps(span)


def _retrain(
    run: str,
    first: int | None,
    last: int | None,
    sets: tuple[str, ...],
    config_file: Path | None,
    no_checkpoint: bool,
    timeout: float,
    kafka: KafkaSection,
    settings: ClusterSettings,
    as_json: bool,
) -> int:
    log_to_stderr(logging.WARNING)
    recorded = RunLog(settings, run, deadline=timeout)
    recorded.span(first, last)  # before anything is loaded
    changed = recorded_config(recorded.started, kafka, config_file, sets)
    what_if = check_sets(sets)
    elsewhere = [text for text in sets if not text.strip().startswith("trainer.")]
    config = recorded_config(recorded.started, kafka, config_file, elsewhere)

    from dora.consumers.replay.replay import replay as train_again

    # libraries print to standard output what is not the report
    with (
        waiting(f"loading the model of {run}", quiet=as_json) as report_progress,
        contextlib.redirect_stdout(sys.stderr),
    ):
        report = train_again(
            recorded,
            config,
            settings,
            first,
            last,
            checkpoints=not no_checkpoint,
            what_if=changed if what_if else None,
            sets=sets,
            deadline=timeout,
            progress=lambda done, steps: report_progress(f"{done} of {steps} steps"),
        )
    if as_json:
        print_line(json.dumps(report.to_json() | {"log_notes": recorded.unreadable}, indent=2))
    else:
        from dora.cli.replay.tables import show

        console = Console(highlight=False)
        show(report, console)
        for note in recorded.unreadable:
            console.print(f"note: {note}")
    return 1 if report.identical is False else 0


def _serve(
    run: str,
    name: str,
    sets: tuple[str, ...],
    config_file: Path | None,
    timeout: float,
    speed: float,
    wait: float,
    config_out: Path | None,
    kafka: KafkaSection,
    settings: ClusterSettings,
    as_json: bool,
) -> None:
    from dora.bus.topics import TopicAdmin, topic_plan
    from dora.cli.coordinator import stop_on_signals
    from dora.config.loading import to_toml
    from dora.producers.replay.recording import Recording
    from dora.producers.replay.serving import ReplayServer

    log_to_stderr()
    recorded = RunLog(settings, run, deadline=timeout)
    check_sets(sets)
    config = recorded_config(recorded.started, kafka, config_file, [*sets, f"run.name={name}"])
    recording = Recording(recorded, name)
    recording.check_kept(settings)
    if config_out is not None and config_out.exists():
        raise UsageError(f"cannot write --config-out {config_out}: File exists")
    with TopicAdmin(settings) as admin:
        new = admin.create(topic_plan(config), exist_ok=True)
    if config_out is not None:
        _write_new(config_out, to_toml(config))
    command = ["dora", "train", str(config_out or config_file or "CONFIG")]
    if config_out is None:
        command += [part for text in (*sets, f"run.name={name}") for part in ("--set", text)]
    command += ["-b", str(kafka.bootstrap_servers), *registry_arguments(kafka)]
    stream = sys.stderr if as_json else sys.stdout
    made = f"made the topics of {name}; " if new else ""
    click.echo(
        f"{made}start its trainer beside this command:\n  {shlex.join(command)}", file=stream
    )
    stream.flush()
    server = ReplayServer(recording, config, settings, speed=speed, wait=wait)
    report = server.serve(stop_on_signals())
    if as_json:
        print_line(json.dumps(report.to_json(), indent=2))
        return
    print_line(f"{report.outcome}: {name} is at version {report.version}")
    print_line(
        f"served {report.groups:,} of {report.recorded_groups:,} groups with "
        f"{report.trajectories:,} trajectories in {report.seconds:.1f} s; run {run} recorded "
        f"{report.recorded_steps} steps"
    )
    if report.without_chunks:
        print_line(
            f"the chunks of {report.without_chunks:,} trajectories are not in the log any more: "
            f"`dora audit {name} --no-chunks` checks the rest"
        )


def _write_new(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise UsageError(f"cannot write --config-out {path}: {error.strerror}") from error
