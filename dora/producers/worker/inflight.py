"""A worker's inflight attempts, from the engine's tokens to the acknowledged record.

All records of an attempt go to the partition of its group's version and lane, in the topics of
chunks and of trajectories alike. An attempt leaves in one of three ways: its trajectory is written
and later acknowledged (`confirm`), it is handed back with its last chunk, or it is also handed over
to another worker.
"""

import zlib
from collections.abc import Callable, Iterator

from dora import faults
from dora.bus.topics import RunTopics
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.core.ring import partition
from dora.core.scheduling.workers import lease_name
from dora.producers.engines.base import Delta, Engine
from dora.producers.tasks.base import Prompt
from dora.producers.tasks.tokenization import Tokenizer
from dora.producers.worker.attempt import Attempt
from dora.producers.worker.reporter import Reporter
from dora.producers.worker.scoring import EmulatedScorer, Scored, Scorer
from dora.schemas.records import Command, Sampling
from dora.telemetry.meter import meter
from dora.telemetry.tracer import TraceContext


def attempt_seed(run_seed: int, trajectory_id: str, attempt: int) -> int:
    """Seed of an attempt's sampling, the same in every process."""
    return zlib.crc32(f"{run_seed}:{trajectory_id}:{attempt}".encode()) & 0x7FFFFFFF


class InflightAttempts:
    """Attempts by trajectory id; `clock` is monotonic in seconds, `now_ms` Unix time.

    Records are written with `writer`, without waiting.
    """

    def __init__(
        self,
        config: Config,
        writer: LogWriter,
        engine: Engine,
        tokenizer: Tokenizer,
        scorer: Scorer | EmulatedScorer,
        reporter: Reporter,
        stop_token_ids: tuple[int, ...],
        clock: Callable[[], float],
        now_ms: Callable[[], int],
    ) -> None:
        self._config = config
        self._writer = writer
        self._engine = engine
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._reporter = reporter
        self._stop_token_ids = stop_token_ids
        self._clock = clock
        self._now_ms = now_ms
        self._topics = RunTopics(config.run.name)
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

    def leases(self) -> Iterator[str]:
        """How a status names the attempts."""
        return (
            lease_name(identity, attempt.command.attempt)
            for identity, attempt in self._attempts.items()
        )

    def add(
        self, command: Command, prompt: Prompt, version: int, context: TraceContext | None
    ) -> Attempt:
        """The attempt that `command` starts, in place of an earlier one at the same trajectory;
        `version` generates its tokens."""
        rollout, identity = self._config.rollout, command.trajectory_id
        sampling = Sampling(
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            rollout.max_new_tokens,
            self._stop_token_ids,
            attempt_seed(self._config.run.seed, identity, command.attempt)
            if rollout.seeded
            else None,
        )
        attempt = Attempt(
            command, prompt, sampling, self._reporter.process, self._now_ms(), self._clock(),
            version=version, context=context,
        )  # fmt: skip
        meter().count("dora_worker_attempts_total")
        if attempt.resumed:
            meter().count("dora_worker_attempts_resumed_total")
        self._attempts[identity] = attempt
        return attempt

    def on_delta(self, delta: Delta) -> None:
        """An engine step produced this for an attempt; unknown ones are ignored."""
        attempt = self._attempts.get(delta.request_id)
        if attempt is None:
            return
        attempt.extend(delta, self._now_ms())
        attempt.progress_at = self._clock()
        self._reporter.count("tokens_total", len(delta.token_ids))
        self._write_chunk(attempt)
        if attempt.finish_reason == "error":
            self.fail(attempt, "generation_failed", attempt.error or "the engine gave no reason")
        elif attempt.finish_reason is not None:
            attempt.trace_generated(self._now_ms(), attempt.finish_reason)
            text = self._tokenizer.decode(attempt.tokens)
            self._scorer.submit(delta.request_id, text, attempt.prompt.item)

    def fail(self, attempt: Attempt, code: str, reason: str) -> None:
        """The attempt cannot be generated: its trajectory says so."""
        attempt.finish_reason = "error"
        self._reporter.dead_letter(code, reason, trajectory_id=attempt.command.trajectory_id)
        attempt.trace_generated(self._now_ms(), code)
        self._write_trajectory(attempt, None, {}, f"{code}: {reason}")

    def hand_back(self, attempt: Attempt, *, move: bool = False) -> None:
        """End an attempt early, with all its tokens in chunks.

        With `move` they are also handed over to the worker that goes on, once the chunks are
        acknowledged; except for an attempt of several versions (`partial`), whose tokens are found
        in the chunks only.
        """
        self.interrupt(attempt, last=True)
        attempt.trace_generated(self._now_ms(), "moved" if move else "handed back")
        del self._attempts[attempt.command.trajectory_id]
        if move and len(attempt.runs) <= 1:
            self._moving.append(attempt)
            self._reporter.count("moved_total")

    def interrupt(self, attempt: Attempt, *, last: bool = False) -> None:
        """Take an attempt out of its engine, with all that was generated, and write its tokens.

        Unless this is its `last` chunk, its next tokens are of another version.
        """
        identity = attempt.command.trajectory_id
        rest = self._engine.unreported(identity)
        if rest is not None:
            attempt.extend(rest, self._now_ms())
            self._reporter.count("tokens_total", len(rest.token_ids))
        self._engine.abort(identity)
        self._write_chunk(attempt, last=last, cut=True)

    def hand_back_stalled(self, limit: float) -> None:
        """Hand back what got no token for `limit` seconds, so that it is tried again."""
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
        """Whether `write_results` has something to write; earlier chunks must be acknowledged."""
        return bool(self._scored or self._moving)

    @property
    def scoring(self) -> int:
        """Responses that are being scored."""
        return self._scorer.pending

    def poll_scores(self) -> None:
        """Collect the scores that have come in."""
        self._scored += self._scorer.poll()

    def write_results(self) -> None:
        """Write what is scored, and hand over what moves.

        Chunks and trajectories lie in different partitions. If this process dies, a trajectory in
        the log must not lack chunks, so these must be acknowledged before.
        """
        for scored in self._scored:
            self._on_scored(scored)
        self._scored.clear()
        for attempt in self._moving:
            self._writer.send(
                self._topics.handovers,
                attempt.handover(self._now_ms()),
                key=attempt.command.trajectory_id,
                partition=0,
                trace=attempt.chunk_header,
            )
        self._moving.clear()

    def confirm(self) -> None:
        """Everything written before is acknowledged."""
        for identity in self._unconfirmed:
            self._attempts.pop(identity, None)
        self._unconfirmed.clear()

    def _on_scored(self, scored: Scored) -> None:
        attempt = self._attempts.get(scored.key)
        if attempt is None:
            return
        error = None
        if scored.reward is None:
            error = f"{scored.error_code}: {scored.error}"
            code = scored.error_code or "verifier_failed"
            self._reporter.dead_letter(
                code,
                scored.error or code,
                trajectory_id=scored.key,
                payload=self._tokenizer.decode(attempt.tokens).encode(),
            )
        waited_ms = max(0, self._now_ms() - attempt.generated_ms)
        meter().observe("dora_worker_scoring_seconds", waited_ms / 1000)
        self._write_trajectory(attempt, scored.reward, scored.parts, error)

    def _write_chunk(self, attempt: Attempt, *, last: bool = False, cut: bool = False) -> None:
        """Write the attempt's next chunk if one is due: enough tokens wait, the attempt is finished
        or ends here (`last`), or its next tokens will be of another version (`cut`)."""
        last = last or attempt.finish_reason is not None
        least = 1 if cut else self._config.rollout.chunk_tokens
        if not last and attempt.unwritten < least:
            return
        now_ms = self._now_ms()
        for chunk in (*attempt.prefix_chunks(now_ms), attempt.chunk(now_ms, last=last)):
            self._writer.send(
                self._topics.chunks,
                chunk,
                key=chunk.trajectory_id,
                partition=self._partition(attempt),
                trace=attempt.chunk_header,
            )
            attempt.trace_chunk(chunk)
            faults.point("worker.chunk_sent")

    def _write_trajectory(
        self, attempt: Attempt, reward: float | None, parts: dict[str, float], error: str | None
    ) -> None:
        trajectory = attempt.trajectory(
            engine=self._engine.name,
            reward=reward,
            parts=parts,
            error=error,
            text=self._tokenizer.decode(attempt.tokens),
            now_ms=self._now_ms(),
        )
        self._writer.send(
            self._topics.trajectories,
            trajectory,
            key=trajectory.trajectory_id,
            partition=self._partition(attempt),
            trace=attempt.trajectory_header,
        )
        attempt.trace_scored(trajectory)
        meter().count("dora_worker_trajectories_total", value=trajectory.finish_reason)
        faults.point("worker.trajectory_sent")
        self._reporter.count("trajectories_total")
        self._unconfirmed.append(trajectory.trajectory_id)

    def _partition(self, attempt: Attempt) -> int:
        command, config = attempt.command, self._config
        return partition(
            command.policy_version, command.group_id, config.window.ring, config.kafka.lanes
        )
