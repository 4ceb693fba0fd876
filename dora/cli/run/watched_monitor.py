"""The monitor of a run that `dora run` watches, through outages of the cluster.

Losing the cluster for a while never ends the watching; the monitor is made anew.
"""

import socket
import time
from collections.abc import Callable

import psutil

from dora.cli.display.display import Display
from dora.consumers.monitor.monitor import RunMonitor
from dora.consumers.monitor.snapshot import Snapshot
from dora.errors import BusError, DeadlineError, DoraError

CATCH_UP_SECONDS = 300.0
_POLL_SECONDS = 0.25


class WatchedMonitor:
    """A monitor that survives an unreachable cluster."""

    def __init__(self, monitor: RunMonitor) -> None:
        self.monitor = monitor

    def poll(self, display: Display) -> bool:
        """Handle what comes; whether the connection must be opened again."""
        end = time.monotonic() + _POLL_SECONDS
        try:
            while (left := end - time.monotonic()) > 0:
                self.monitor.poll(timeout=left)
        except BusError as error:
            display.note(f"cannot read the log: {error.message}")
            return True
        return False

    def look(self, display: Display) -> Snapshot | None:
        """The run as its log says now; None if the cluster does not answer."""
        try:
            self.monitor.catch_up(CATCH_UP_SECONDS)
        except (BusError, DeadlineError) as error:
            display.note(f"cannot read the log: {error.message}")
            return None
        return self.monitor.snapshot()

    def replaced(self, name: str, pid: int, display: Display) -> bool:
        """Whether another process speaks in the place of `pid`, which has ended.

        The last word under its name may be that of a process which it had started itself (a rank of
        the trainer); that one has ended with it.
        """
        snapshot, here = self.look(display), socket.gethostname()
        return snapshot is not None and any(
            process.alive
            and process.process == name
            and process.pid != pid
            and (process.host != here or _runs(process.pid))
            for process in snapshot.processes
        )

    def reopen(self, make: Callable[[], RunMonitor], display: Display) -> None:
        """Read the log anew over a new connection, if the cluster answers."""
        try:
            monitor = make()
            monitor.catch_up(CATCH_UP_SECONDS)
        except DoraError as error:
            display.note(f"the cluster does not answer: {error.message}")
            return
        self.monitor.close()
        self.monitor = monitor


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
