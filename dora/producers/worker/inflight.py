"""The attempts that a worker has in hand, from the engine's tokens to the acknowledged record.

Invariant: an attempt leaves by exactly one of three ways: its trajectory is written and later
acknowledged (`confirm`), or it is handed back with its last chunk, or handed over as well.
"""

import logging
from collections.abc import Callable, Iterator

from dora import faults
from dora.bus.topics import RunTopics
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.core.ring import partition
from dora.core.scheduling.workers import lease_name
from dora.producers.engines.base import Delta, Engine
from dora.producers.tasks.tokenization import Tokenizer
from dora.producers.worker.attempt import Attempt
from dora.producers.worker.reporter import Reporter
from dora.producers.worker.scoring import EmulatedScorer, Scored, Scorer
from dora.telemetry.meter import meter

# Where a worker's attempts go in the log: chunks while they are generated, then the trajectory.
#
# Invariant: all records of an attempt go to the one partition of its group's version and lane, in
# either topic. A handover goes beside them, to whoever moves the trajectory.


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


log = logging.getLogger(__name__)


class InHand:
    """Attempts by trajectory id; `clock` is monotonic in seconds, `now_ms` Unix time."""

    def __init__(
        self,
        config: Config,
        writer: LogWriter,
        engine: Engine,
        tokenizer: Tokenizer,
        scorer: Scorer | EmulatedScorer,
        reporter: Reporter,
        clock: Callable[[], float],
        now_ms: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._reporter = reporter
        self._clock = clock
        self._now_ms = now_ms
        self._output = AttemptWriter(config, writer, now_ms)
        self._attempts: dict[str, Attempt] = {}
        self._scored: list[Scored] = []
        self._moving: list[Attempt] = []
        self._unconfirmed: list[str] = []

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._attempts.values())

    def find(self, trajectory_id: str) -> Attempt | None:
        """The attempt at a trajectory."""
        return self._attempts.get(trajectory_id)

    def unfinished(self) -> list[Attempt]:
        """Attempts that still generate."""
        return [a for a in self._attempts.values() if a.finish_reason is None]

    def holdings(self) -> Iterator[str]:
        """How a status names them."""
        return (
            lease_name(identity, attempt.command.attempt)
            for identity, attempt in self._attempts.items()
        )

    def add(self, attempt: Attempt) -> None:
        """A new attempt, in place of an earlier one at the same trajectory."""
        self._attempts[attempt.command.trajectory_id] = attempt

    def take(self, delta: Delta) -> None:
        """What one engine step produced for an attempt; others are left aside."""
        attempt = self._attempts.get(delta.request_id)
        if attempt is None:
            return
        attempt.take(delta, self._now_ms())
        attempt.progress_at = self._clock()
        self._reporter.count("tokens_total", len(delta.token_ids))
        self._output.chunk(attempt)
        if attempt.finish_reason == "error":
            self.fail(attempt, "generation_failed", attempt.error or "the engine gave no reason")
        elif attempt.finish_reason is not None:
            self._generated(attempt, attempt.finish_reason)
            text = self._tokenizer.decode(attempt.tokens)
            self._scorer.submit(delta.request_id, text, attempt.prompt.item)

    def fail(self, attempt: Attempt, code: str, reason: str) -> None:
        """The attempt, which is in hand, cannot be generated: its trajectory says so."""
        attempt.finish_reason = "error"
        self._reporter.dead_letter(code, reason, trajectory_id=attempt.command.trajectory_id)
        self._generated(attempt, code)
        self._write(attempt, None, {}, f"{code}: {reason}")

    def hand_back(self, attempt: Attempt, *, move: bool = False) -> None:
        """End an attempt early; what it has goes into its last chunk, and with `move` to whoever
        starts the trajectory elsewhere, once its chunks are safe.

        One that was interrupted by versions (`partial`) is found in the chunks only."""
        self._abort(attempt)
        self._output.chunk(attempt, last=True)
        self._generated(attempt, "moved" if move else "handed back")
        del self._attempts[attempt.command.trajectory_id]
        if move and len(attempt.runs) <= 1:
            self._moving.append(attempt)
            self._reporter.count("moved_total")

    def _generated(self, attempt: Attempt, outcome: str) -> None:
        if attempt.trace is not None:
            attempt.trace.generated(attempt, self._now_ms(), outcome)

    def interrupt(self, attempt: Attempt) -> None:
        """Take an attempt out of its engine; its next tokens are of another version."""
        self._abort(attempt)
        self._output.chunk(attempt, cut=True)

    def _abort(self, attempt: Attempt) -> None:
        """Take an attempt out of its engine, with all that was generated."""
        rest = self._engine.unreported(attempt.command.trajectory_id)
        if rest is not None:
            attempt.take(rest, self._now_ms())
            self._reporter.count("tokens_total", len(rest.token_ids))
        self._engine.abort(attempt.command.trajectory_id)

    def hand_back_stalled(self, limit: float) -> None:
        """Take back what its engine seems to have forgotten for `limit` seconds, so that it is
        tried again."""
        now = self._clock()
        for attempt in self.unfinished():
            if now - attempt.progress_at > limit:
                self._reporter.dead_letter(
                    "stalled",
                    f"attempt {attempt.command.attempt} got no token for {limit:g} s after "
                    f"{len(attempt.tokens)} (rollout.stall_timeout_seconds); it is tried again",
                    trajectory_id=attempt.command.trajectory_id,
                )
                self.hand_back(attempt)

    @property
    def has_results(self) -> bool:
        """Whether `write_results` would write what must come after chunks that were sent before."""
        return bool(self._scored or self._moving)

    def poll_scores(self) -> None:
        """Take what was scored meanwhile."""
        self._scored += self._scorer.poll()

    @property
    def scoring(self) -> int:
        """Responses that are being scored."""
        return self._scorer.pending

    def write_results(self) -> None:
        """Write what is scored, and hand over what moves.

        Chunks and trajectories lie in different partitions: should this process die, a trajectory
        that is in the log must not lack chunks. So these must be acknowledged.
        """
        for scored in self._scored:
            self._finish(scored)
        self._scored.clear()
        for attempt in self._moving:
            self._output.handover(attempt)
        self._moving.clear()

    def confirm(self) -> None:
        """Everything written before is acknowledged."""
        for identity in self._unconfirmed:
            self._attempts.pop(identity, None)
        self._unconfirmed.clear()

    def _finish(self, scored: Scored) -> None:
        attempt = self._attempts.get(scored.key)
        if attempt is None:
            return
        if scored.reward is None:
            code = scored.error_code or "verifier_failed"
            self._reporter.dead_letter(
                code,
                scored.error or code,
                trajectory_id=scored.key,
                payload=self._tokenizer.decode(attempt.tokens).encode(),
            )
        error = None if scored.reward is not None else f"{scored.error_code}: {scored.error}"
        waited_ms = max(0, self._now_ms() - attempt.generated_ms)
        meter().observe("dora_worker_scoring_seconds", waited_ms / 1000)
        self._write(attempt, scored.reward, scored.parts, error)

    def _write(
        self, attempt: Attempt, reward: float | None, parts: dict[str, float], error: str | None
    ) -> None:
        text = self._tokenizer.decode(attempt.tokens)
        self._output.trajectory(attempt, self._engine.name, reward, parts, error, text)
        self._reporter.count("trajectories_total")
        self._unconfirmed.append(attempt.command.trajectory_id)
