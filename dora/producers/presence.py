"""The coordinator's own account of itself, and how it notices another one.

Invariant: of two coordinators that both live, the one that was started first ends within about a
heartbeat, whether it has something to decide or not. Whoever hears the other speak says its next
word in a transaction, and the transactional id lets only the newest holder do that (KIP-98).
"""

import logging
import os
import socket
import uuid
from collections.abc import Callable, Mapping

from dora.bus.topics import RunTopics
from dora.bus.transactions import TransactionAbortedError, TransactionalWriter
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.core.roster import GONE
from dora.errors import DeadlineError
from dora.schemas.records import ProcessState, Status

log = logging.getLogger(__name__)

PROCESS = "coordinator"


class Presence:
    """Sends the coordinator's Status every `rollout.heartbeat_seconds`."""

    def __init__(
        self,
        config: Config,
        writer: LogWriter,
        transactions: TransactionalWriter,
        *,
        clock: Callable[[], float],
        now_ms: Callable[[], int],
    ) -> None:
        self._config = config
        self._writer = writer
        self._transactions = transactions
        self._clock = clock
        self._now_ms = now_ms
        self._topic = RunTopics(config.run.name).workers
        self._incarnation = uuid.uuid4().hex
        self._beat_at = float("-inf")
        self._rival = False

    def hear(self, status: Status) -> None:
        """Take note of a coordinator's status that has just come."""
        if status.incarnation != self._incarnation and status.state not in GONE:
            self._rival = True

    def beat(
        self,
        state: ProcessState,
        message: str,
        version: int,
        metrics: Mapping[str, float],
        *,
        force: bool = False,
    ) -> None:
        """Send a Status if one is due; FencedError if another coordinator took over."""
        now = self._clock()
        if not force and now - self._beat_at < self._config.rollout.heartbeat_seconds:
            return
        self._beat_at = now
        status = Status(
            run=self._config.run.name, process=PROCESS, role="coordinator",
            incarnation=self._incarnation, state=state, created_ms=self._now_ms(),
            message=message, version=version, metrics=dict(metrics),
            host=socket.gethostname(), pid=os.getpid(),
        )  # fmt: skip
        if self._rival:
            self._insist(status)
            return
        self._writer.send(self._topic, status, key=PROCESS)
        if state == "stopped":
            try:
                self._writer.flush(self._config.kafka.request_timeout_seconds)
            except DeadlineError:
                log.warning("the last status could not be delivered")

    def _insist(self, status: Status) -> None:
        log.info("another coordinator speaks: finding out which of the two is the newest")
        self._rival = False
        try:
            with self._transactions.transaction() as transaction:
                transaction.send(self._topic, status, key=PROCESS)
        except TransactionAbortedError as error:
            log.warning("the status was not written: %s", error)
