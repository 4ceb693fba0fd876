"""A child's tie to its supervisor.

Invariant: a process that was started by `dora run` ends when that is gone, however it went: the
kernel sends SIGTERM, and if the orderly end takes too long the whole process group is killed.
"""

import ctypes
import os
import signal
import sys
import threading
import time

from dora.cli.main import SUPERVISOR

_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 30.0
_POLL_SECONDS = 1.0


def follow_supervisor() -> None:
    """End with the process named in the environment, if there is one. Call from the main thread."""
    text = os.environ.pop(SUPERVISOR, None)
    if text is None:
        return
    supervisor = int(text)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # It may have gone before the kernel was told.
    if os.getppid() != supervisor:
        raise SystemExit("the supervisor is gone")
    threading.Thread(target=_watch, args=(supervisor,), name="lifeline", daemon=True).start()


def _watch(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(_POLL_SECONDS)
    if sys.platform != "linux":
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
