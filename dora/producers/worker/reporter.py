"""What a rollout worker reports: statuses with metrics, and dead letters."""

import logging
from collections.abc import Callable, Iterable

from dora.bus.reader import Message
from dora.bus.topics import RunTopics
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.log.dead_letters import DeadLetterWriter
from dora.log.status_reporter import StatusReporter
from dora.schemas.records import ProcessState

log = logging.getLogger(__name__)

FLUSHED_STATES = ("loading", "stopped", "failed")
"""States after which nothing else is sent for a while, or ever."""


class Reporter(StatusReporter):
    """Reports for `worker`; `clock` is in seconds, `now_ms` Unix time in milliseconds."""

    def __init__(
        self,
        config: Config,
        writer: LogWriter,
        worker: str,
        clock: Callable[[], float],
        now_ms: Callable[[], int],
    ) -> None:
        super().__init__(config, writer, worker, "rollout", clock=clock, now_ms=now_ms)
        self.state: ProcessState = "starting"
        self.message = ""
        self.metrics: dict[str, float] = {"tokens_total": 0.0, "trajectories_total": 0.0}
        self._config = config
        topics = RunTopics(config.run.name)
        self._dead_letters = DeadLetterWriter(
            writer, topics, worker, config.kafka.max_message_bytes, now_ms
        )
        self._rate_at = clock()
        self._rate_tokens = 0.0
        self._commanded_at = clock()

    def on_command(self) -> None:
        """A command of the coordinator was read."""
        self._commanded_at = self._clock()

    def count(self, name: str, by: float = 1.0) -> None:
        """Add to a metric that counts."""
        self.metrics[name] = self.metrics.get(name, 0.0) + by

    def report_status(
        self,
        *,
        version: int | None,
        versions: tuple[int, ...],
        loading: int,
        running: Iterable[str],
        command_offset: int,
    ) -> None:
        """Send a status; BusError if Kafka does not take it.

        Everything that was written before must be acknowledged: a trajectory that the status no
        longer names counts as safe in the log.
        """
        now = self._clock()
        if now - self._rate_at >= 1.0:
            total = self.metrics["tokens_total"]
            self.metrics["tokens_per_second"] = (total - self._rate_tokens) / (now - self._rate_at)
            self._rate_at, self._rate_tokens = now, total
        running = tuple(running)
        self.send(
            self.status(
                self.state,
                self._message_to_send(idle=not running),
                version=-1 if version is None else version,
                metrics=self.metrics,
                versions=versions,
                capacity=self._config.rollout.capacity,
                loading=loading,
                running=running,
                command_offset=command_offset,
            )
        )
        if self.state in FLUSHED_STATES:
            self._writer.flush(self._config.kafka.request_timeout_seconds)

    def _message_to_send(self, *, idle: bool) -> str:
        """The message, with how long an idle worker has been waiting for its coordinator where that
        is longer than a process may be silent."""
        waited = self._clock() - self._commanded_at
        if self.state != "ready" or not idle:
            return self.message
        if waited <= self._config.rollout.heartbeat_timeout_seconds:
            return self.message
        return f"{self.message}; no command for {waited:.0f} s: does a coordinator live?"

    def dead_letter(
        self,
        code: str,
        reason: str,
        *,
        message: Message | None = None,
        trajectory_id: str = "",
        payload: bytes = b"",
    ) -> None:
        """Record what could not be read, generated or scored, and why."""
        log.warning("dead letter %s %s: %s", code, trajectory_id, reason)
        self._dead_letters.write(
            code,
            reason,
            message=message,
            trajectory_id=trajectory_id,
            payload=payload,
            key=trajectory_id or code,
        )
