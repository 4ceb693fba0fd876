"""What a serving of logged trajectories says of itself, in place of coordinator and worker.

Invariant: whoever looks at the run sees a coordinator and one worker that holds everything which is
still to come; nothing of it decides anything.
"""

import os
import socket
import time
import uuid
from collections.abc import Mapping

from dora.bus.topics import RunTopics
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.core.holdings import holding
from dora.schemas.records import ProcessState, Status

WORKER = "replay"
_SHOWN = 1000


class ServingStatus:
    """Sends a status for both roles every `rollout.heartbeat_seconds`."""

    def __init__(self, config: Config, writer: LogWriter) -> None:
        self._config = config
        self._writer = writer
        self._incarnation = uuid.uuid4().hex
        self._topic = RunTopics(config.run.name).workers
        self._sent_at = float("-inf")
        self._version = -1

    def beat(self, message: str, version: int, running: Mapping[str, int]) -> None:
        """Send statuses if they are due. `running` are trajectories and their attempts."""
        self._version = version
        now = time.monotonic()
        if now - self._sent_at < self._config.rollout.heartbeat_seconds:
            return
        self._sent_at = now
        self._send("ready", message, [holding(i, a) for i, a in list(running.items())[:_SHOWN]])
        self._writer.poll()

    def end(self, state: ProcessState, message: str) -> None:
        """The last word."""
        self._send(state, message, [])

    def _send(self, state: ProcessState, message: str, running: list[str]) -> None:
        for process in ("coordinator", WORKER):
            worker = process == WORKER
            status = Status(
                run=self._config.run.name,
                process=process,
                role="rollout" if worker else "coordinator",
                incarnation=self._incarnation,
                state=state,
                created_ms=time.time_ns() // 1_000_000,
                message=message,
                version=self._version,
                versions=(self._version,) if worker and self._version >= 0 else (),
                capacity=self._config.rollout.capacity if worker else 0,
                running=tuple(running) if worker else (),
                host=socket.gethostname(),
                pid=os.getpid(),
            )
            self._writer.send(self._topic, status, key=process)
