"""`dora train`: the trainer, with several ranks on this machine through DeepSpeed's launcher.

When `dora train` is gone, its ranks are too. When it is asked to end, all ranks end between two
steps, and its exit code is the one of the first failure.
"""

import base64
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import click
import psutil

from dora.broker.process import free_port
from dora.cli.coordinator import stop_on_signals
from dora.cli.main import RANK_PARENT
from dora.cli.options import Command, ConfigSource, config_argument, config_source, from_option
from dora.cli.process_log import log_to_stderr
from dora.config import Config
from dora.errors import ExitCode, UsageError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 1.0
_GRACE_SECONDS = 30.0
_HOST = "127.0.0.1"


@click.command(cls=Command)
@click.option(
    "--fail-incomplete",
    is_flag=True,
    help=f"End with exit code {ExitCode.INCOMPLETE} instead of 0 when asked to end before "
    "trainer.steps are committed: for supervisors that take 0 for done, such as a Kubernetes Job.",
)
@from_option
@config_argument
def train(config: Config, fail_incomplete: bool, origin: str | None) -> None:
    """Run the trainer of the run that CONFIG describes.

    It picks batches of finished groups, trains on them, publishes the new version and commits the
    step. Started again, it goes on where the ledger ends. It ends after trainer.steps.

    With trainer.ranks it starts that many processes on this machine, which share the training. A
    launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT may start them
    instead.
    """
    log_to_stderr()
    follow_launcher()
    context = click.get_current_context()
    if config.trainer.ranks > 1 and "RANK" not in os.environ:
        options = ["--fail-incomplete"] if fail_incomplete else []
        options += [] if origin is None else ["--from", origin]
        source, supervised = config_source(), bool(context.obj)
        context.exit(run_ranks(config, source, options, supervised=supervised))

    from dora.bus.acls import check_rights
    from dora.bus.settings import cluster_settings
    from dora.consumers.learner.ranks import Member, joined
    from dora.consumers.trainer.origin import Origin, find_origin
    from dora.consumers.trainer.trainer import Trainer
    from dora.log.continuation import check_recorded
    from dora.telemetry import observed

    settings = cluster_settings(config.kafka)
    # First what is lacking: topics that may not be seen look like ones that were deleted.
    check_rights("trainer", config.run.name, settings)
    # Before the trainer takes over from a running one: what is refused must end nothing.
    check_recorded(config, settings, inputs=True)
    stop = stop_on_signals()  # looked at by rank 0 only, which the others follow
    with joined(config) as ranks:
        if isinstance(ranks, Member):
            # with torch, which a trainer that only waits does without
            from dora.consumers.learner.rank_follower import RankFollower

            complete = RankFollower(config, settings, ranks).run()
        else:
            with observed(config, "trainer", "trainer", settings):
                start = origin and find_origin(config, settings, Origin.parse(origin))
                trainer = Trainer(config, settings, ranks, start or None)
                trainer.run(stop)
            complete = trainer.complete
            if ranks is not None:
                ranks.complete = complete
    if fail_incomplete and not complete:
        context.exit(ExitCode.INCOMPLETE)


def run_ranks(
    config: Config, source: ConfigSource, options: Sequence[str] = (), *, supervised: bool
) -> int:
    """Run `trainer.ranks` processes `dora train` with `options` until they end; returns the exit
    code of all of them."""
    visible = os.environ.get(VISIBLE_DEVICES)
    world = {"localhost": rank_devices(config.trainer.ranks, visible)}
    command = [
        *(sys.executable, "-m", "deepspeed.launcher.launch"),
        f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}",
        *(f"--master_addr={_HOST}", f"--master_port={free_port(set())}"),
        *("--log_level=error", "--no_local_rank", "--module"),
        *("dora", "train", *options, *source.arguments(config)),
    ]
    environment = os.environ | source.environment(config) | {RANK_PARENT: str(os.getpid())}
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _end_ranks())
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL) as launcher:
        code = launcher.wait()
    if code == ExitCode.PERMANENT:
        return ExitCode.PERMANENT if supervised else 1
    return code if code in (0, ExitCode.USAGE, ExitCode.FENCED, ExitCode.INCOMPLETE) else 1


def rank_devices(ranks: int, visible: str | None) -> list[str]:
    """The device of each rank on this machine, in order: the first of those that are `visible`
    (numbers or UUIDs with commas between them; None or empty says nothing about devices).

    UsageError if fewer are visible than there are ranks, or one is named twice.
    """
    if not visible:
        return [str(rank) for rank in range(ranks)]
    devices = [device.strip() for device in visible.split(",")]
    if len(devices) < ranks or len(set(devices)) < len(devices):
        raise UsageError(
            f"trainer.ranks = {ranks} needs as many devices, but {VISIBLE_DEVICES} = {visible}",
            hint="Name a device for each rank, each once, or lower trainer.ranks.",
        )
    return devices[:ranks]


def _end_ranks() -> None:
    """Ask the ranks, not their launcher, which would give them 30 seconds one after the other."""
    for launcher in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            for rank in launcher.children() or [launcher]:
                with suppress(psutil.NoSuchProcess):
                    rank.terminate()


def follow_launcher() -> None:
    """In a rank that `run_ranks` started: end when the launcher or `dora train` itself is gone."""
    text = os.environ.pop(RANK_PARENT, None)
    if text is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    arguments = (os.getppid(), int(text))
    threading.Thread(target=_watch, args=arguments, name="parent-watch", daemon=True).start()


def _watch(launcher: int, parent: int) -> None:
    while os.getppid() == launcher and psutil.pid_exists(parent):
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
