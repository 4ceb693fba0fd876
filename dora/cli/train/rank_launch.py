"""`dora train` with several ranks on this machine: DeepSpeed's launcher, and how it is tied in.

Invariant: when `dora train` is gone, its ranks are too; when it is asked to end, all ranks end
between two steps; and its exit code is the one that the first failure asks for.
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

import psutil

from dora.broker.process import free_port
from dora.cli.main import RANK_PARENT
from dora.cli.options import ConfigSource
from dora.config import Config
from dora.errors import ExitCode

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 1.0
_GRACE_SECONDS = 30.0
_HOST = "127.0.0.1"


def run_ranks(
    config: Config, source: ConfigSource, options: Sequence[str] = (), *, supervised: bool
) -> int:
    """Run `trainer.ranks` processes `dora train` with `options` until they end; returns the exit
    code of all of them."""
    world = {"localhost": list(range(config.trainer.ranks))}
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
    threading.Thread(target=_watch, args=arguments, name="lifeline", daemon=True).start()


def _watch(launcher: int, parent: int) -> None:
    while os.getppid() == launcher and psutil.pid_exists(parent):
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
