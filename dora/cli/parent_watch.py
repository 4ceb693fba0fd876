"""A process that `dora run` started ends when `dora run` is gone, however that ended: the kernel
sends SIGTERM, and if the orderly end takes too long the whole process group is killed."""

import os
import signal
import sys
import threading
import time

SUPERVISOR = "DORA_SUPERVISOR"
"""Environment variable with the process id of the supervisor."""

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
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # It may have ended before this was set.
    if os.getppid() != supervisor:
        raise SystemExit("the supervisor is gone")
    threading.Thread(target=_watch, args=(supervisor,), name="parent-watch", daemon=True).start()


def _watch(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(_POLL_SECONDS)
    if sys.platform != "linux":
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
