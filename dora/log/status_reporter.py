"""A process's statuses, which it writes to the run's workers topic as heartbeats."""

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Literal

from dora.bus.topics import RunTopics
from dora.bus.transactions import TransactionAbortedError, TransactionalWriter
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.schemas.records import ProcessState, Status
from dora.telemetry.meter import meter

log = logging.getLogger(__name__)

Role = Literal["rollout", "coordinator", "trainer"]


class StatusReporter:
    """Makes and sends the statuses of `process`.

    `clock` is monotonic, in seconds; `now_ms` is Unix time in milliseconds. `incarnation` tells
    this process from an earlier one of the same name.
    """

    def __init__(
        self,
        config: Config,
        writer: LogWriter,
        process: str,
        role: Role,
        *,
        incarnation: str = "",
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.process = process
        self.incarnation = incarnation or uuid.uuid4().hex
        self.sent_at = float("-inf")
        self._role = role
        self._run = config.run.name
        self._topic = RunTopics(config.run.name).workers
        self._interval = config.rollout.heartbeat_seconds
        self._writer = writer
        self._clock = clock
        self._now_ms = now_ms

    @property
    def due(self) -> bool:
        """Whether it is time for a heartbeat (`rollout.heartbeat_seconds`)."""
        return self._clock() - self.sent_at >= self._interval

    def status(
        self,
        state: ProcessState,
        message: str,
        *,
        version: int = -1,
        metrics: Mapping[str, float] = {},
        versions: tuple[int, ...] = (),
        capacity: int = 0,
        loading: int = -1,
        running: tuple[str, ...] = (),
        command_offset: int = -1,
    ) -> Status:
        """The process as it is now."""
        return Status(
            run=self._run, process=self.process, role=self._role, incarnation=self.incarnation,
            state=state, created_ms=self._now_ms(), message=message, version=version,
            versions=versions, capacity=capacity, loading=loading, running=running,
            command_offset=command_offset, metrics={**metrics, **meter().status_metrics},
            host=socket.gethostname(), pid=os.getpid(),
        )  # fmt: skip

    def send(self, status: Status) -> None:
        """Send a status without waiting for its delivery; BusError if Kafka does not take it."""
        self.sent_at = self._clock()
        meter().on_status(status)
        self._writer.send(self._topic, status, key=self.process)

    def settle_with_rival(
        self, rival: Status, transactions: TransactionalWriter, status: Status
    ) -> None:
        """Find out who is active when another process of the same role and run reports.

        A transaction of the fenced one fails (FencedError), even if it has nothing else to write.
        """
        if rival.incarnation == self.incarnation:
            return
        log.warning("another %s speaks: process %d on %s", self._role, rival.pid, rival.host)
        try:
            with transactions.transaction() as transaction:
                transaction.send(self._topic, status, key=self.process)
        except TransactionAbortedError as error:
            log.warning("not settled yet: %s", error)  # the rival's next status asks again
