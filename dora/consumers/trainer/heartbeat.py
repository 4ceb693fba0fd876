"""The trainer's own account of itself, in the workers topic.

Invariant: while the trainer works, no more than about a heartbeat passes between two of its Status
records, whatever it does in between: it is called from within long steps, and by a thread of its
own through calls that do not come back for a while, such as a write to a slow disk. That thread
gives up after a limit, so that a call that never returns shows as silence.
"""

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from dora.bus.topics import RunTopics
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.errors import BusError
from dora.schemas.records import ProcessState, Status
from dora.telemetry.meter import meter

log = logging.getLogger(__name__)

PROCESS = "trainer"


class Heartbeat:
    """Sends a Status at each change of state and every `rollout.heartbeat_seconds`."""

    def __init__(self, config: Config, writer: LogWriter) -> None:
        self.incarnation = uuid.uuid4().hex
        self.version = -1
        self.metrics: dict[str, float] = {}
        self._run = config.run.name
        self._topic = RunTopics(config.run.name).workers
        self._interval = config.rollout.heartbeat_seconds
        self._target = float(config.trainer.steps)
        self._writer = writer
        self._state: ProcessState = "starting"
        self._message = ""
        self._sent_at = float("-inf")
        self._limit = config.rollout.load_timeout_seconds
        self._lock = threading.Lock()

    def say(self, state: ProcessState, message: str) -> None:
        """Change state; a change is sent at once, a new message with the next heartbeat."""
        changed = state != self._state or self._sent_at == float("-inf")
        self._state, self._message = state, message
        self.beat(force=changed)

    @contextmanager
    def through(self, message: str) -> Iterator[None]:
        """Beat on through the block, which may not return to do so itself, for as long as
        `rollout.load_timeout_seconds`. The writer is used for nothing else in it."""
        self.say(self._state, message)
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
            self._beat(force=force)

    def _beat(self, *, force: bool) -> None:
        now = time.monotonic()
        if not force and now - self._sent_at < self._interval:
            return
        self._sent_at = now
        status = self.status()
        meter().heard(status)
        self._writer.send(self._topic, status, key=PROCESS)
        self._writer.poll()

    def status(self) -> Status:
        """The trainer as it is now."""
        return Status(
            run=self._run,
            process=PROCESS,
            role="trainer",
            incarnation=self.incarnation,
            state=self._state,
            created_ms=time.time_ns() // 1_000_000,
            message=self._message,
            version=self.version,
            metrics={"steps_target": self._target, **self.metrics, **meter().said},
            host=socket.gethostname(),
            pid=os.getpid(),
        )
