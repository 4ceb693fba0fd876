"""Where a worker's attempts go in the log: chunks while they are generated, then the trajectory.

Invariant: all records of an attempt go to the one partition of its group's version and lane, in
either topic. A handover goes beside them, to whoever moves the trajectory.
"""

from collections.abc import Callable

from dora import faults
from dora.bus.topics import RunTopics
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.core.ring import partition
from dora.producers.generation import Attempt
from dora.telemetry.meter import meter


class AttemptWriter:
    """Writes with `writer`, without waiting; `now_ms` is Unix time in milliseconds."""

    def __init__(self, config: Config, writer: LogWriter, now_ms: Callable[[], int]) -> None:
        self._ring, self._lanes = config.window.ring, config.kafka.lanes
        self._chunk_tokens = config.rollout.chunk_tokens
        self._topics = RunTopics(config.run.name)
        self._writer = writer
        self._now_ms = now_ms

    def chunk(self, attempt: Attempt, *, last: bool = False, cut: bool = False) -> None:
        """Write the attempt's next chunk if one is due: enough tokens wait, the attempt is finished
        or ends here (`last`), or its next tokens will be of another version (`cut`)."""
        last = last or attempt.finish_reason is not None
        ready = attempt.ready
        if not last and ready < (1 if cut else self._chunk_tokens):
            return
        now_ms, trace = self._now_ms(), attempt.trace
        for chunk in (*attempt.repeated(now_ms), attempt.chunk(now_ms, last=last)):
            self._writer.send(
                self._topics.chunks,
                chunk,
                key=chunk.trajectory_id,
                partition=self._partition(attempt),
                trace=None if trace is None else trace.of_chunks,
            )
            if trace is not None:
                trace.chunk(chunk)
            faults.point("worker.chunk_sent")

    def handover(self, attempt: Attempt) -> None:
        """Tell whoever starts the trajectory elsewhere what this attempt had; its chunks must be
        acknowledged."""
        whole = attempt.whole(self._now_ms())
        trace = None if attempt.trace is None else attempt.trace.of_chunks
        self._writer.send(
            self._topics.handovers, whole, key=whole.trajectory_id, partition=0, trace=trace
        )

    def trajectory(
        self,
        attempt: Attempt,
        engine: str,
        reward: float | None,
        parts: dict[str, float],
        error: str | None,
        text: str,
    ) -> None:
        """Write the finished trajectory; its chunks must be acknowledged."""
        trajectory = attempt.trajectory(
            engine=engine, reward=reward, parts=parts, error=error, text=text, now_ms=self._now_ms()
        )
        trace = attempt.trace
        self._writer.send(
            self._topics.trajectories,
            trajectory,
            key=trajectory.trajectory_id,
            partition=self._partition(attempt),
            trace=None if trace is None else trace.of_trajectory,
        )
        if trace is not None:
            trace.scored(trajectory.generated_ms, trajectory.created_ms, reward, error)
        meter().count("dora_worker_trajectories_total", value=trajectory.finish_reason)
        faults.point("worker.trajectory_sent")

    def _partition(self, attempt: Attempt) -> int:
        command = attempt.command
        return partition(command.policy_version, command.group_id, self._ring, self._lanes)
