"""The trainer's statuses in the workers topic.

While the trainer works, about a heartbeat passes between two statuses: they are sent from within
long steps, and by a thread of their own during calls that do not return for a while, such as a
write to a slow disk. That thread gives up after a limit, so a call that never returns shows as
silence.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dora.bus.transactions import TransactionalWriter
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.errors import BusError
from dora.log.status_reporter import StatusReporter
from dora.schemas.records import ProcessState, Status

log = logging.getLogger(__name__)

PROCESS = "trainer"


class Heartbeat:
    """Sends a Status at each change of state and every `rollout.heartbeat_seconds`."""

    def __init__(self, config: Config, writer: LogWriter) -> None:
        self.version = -1
        self.metrics: dict[str, float] = {}
        self._statuses = StatusReporter(config, writer, PROCESS, "trainer")
        self.incarnation = self._statuses.incarnation
        self._interval = config.rollout.heartbeat_seconds
        self._target = float(config.trainer.steps)
        self._writer = writer
        self._state: ProcessState = "starting"
        self._message = ""
        self._limit = config.rollout.load_timeout_seconds
        self._lock = threading.Lock()

    def report(self, state: ProcessState, message: str) -> None:
        """Change state; a change is sent at once, a new message with the next heartbeat."""
        changed = state != self._state or self._statuses.sent_at == float("-inf")
        self._state, self._message = state, message
        self.beat(force=changed)

    @contextmanager
    def beat_through(self, message: str) -> Iterator[None]:
        """Send heartbeats from a thread during the block, for at most
        `rollout.load_timeout_seconds`. The writer is used for nothing else in it."""
        self.report(self._state, message)
        done = threading.Event()

        def beat_on() -> None:
            until = time.monotonic() + self._limit
            while not done.wait(self._interval) and time.monotonic() < until:
                try:
                    self.beat()
                except BusError as error:  # raised again by the next beat of the trainer itself
                    log.warning("no heartbeat: %s", error.message)
                    return

        thread = threading.Thread(target=beat_on, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(self._limit)

    def beat(self, *, force: bool = False) -> None:
        """Send a Status if one is due."""
        with self._lock:
            if force or self._statuses.due:
                self._statuses.send(self._status())
                self._writer.poll()

    def settle_with_rival(self, rival: Status, transactions: TransactionalWriter) -> None:
        """Find out which trainer is active; FencedError if it is the other one."""
        self._statuses.settle_with_rival(rival, transactions, self._status())

    def _status(self) -> Status:
        metrics = {"steps_target": self._target, **self.metrics}
        return self._statuses.status(
            self._state, self._message, version=self.version, metrics=metrics
        )
