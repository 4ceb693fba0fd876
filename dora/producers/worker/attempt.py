"""One attempt at a trajectory, from its start command to its record.

Invariant: the chunks of an attempt, in sequence, hold exactly the generated tokens of its
trajectory record, each token once, with the log-probability under which it was sampled, and all are
of the one policy version that the attempt was started with (C1), unless the schedule is `partial`:
then each chunk is of one version. An attempt that goes on from an earlier one's tokens repeats them
in its first chunk (one for each version).
"""

import zlib
from array import array
from dataclasses import dataclass, field

import numpy as np

from dora.producers.engines.base import Delta, Request
from dora.producers.engines.base import Sampling as EngineSampling
from dora.producers.tasks.base import Prompt
from dora.schemas.records import (
    Chunk,
    Command,
    FinishReason,
    Sampling,
    Trajectory,
    VersionRun,
    pack_logprobs,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)
from dora.telemetry.tracer import (
    Event,
    Span,
    TraceContext,
    Value,
    dispatch_span,
    generation_span,
    scoring_span,
    tracer,
)

# An attempt as the trace of its group tells it: dispatch, generation with its chunks, scoring.
#
# Invariant: chunks and trajectory name their spans in their headers whether or not spans are
# made, so that who reads them can go on with the trace.

MOST_EVENTS = 256
"""Chunks of an attempt that its span tells of."""


class AttemptTrace:
    """The trace of the attempt that `command` starts; `context` stands in the command's header."""

    def __init__(self, command: Command, context: TraceContext, worker: str) -> None:
        identity, attempt = command.trajectory_id, command.attempt
        self._dispatch = context.at(dispatch_span(identity, attempt))
        self._generation = context.at(generation_span(identity, attempt))
        self._scoring = context.at(scoring_span(identity, attempt))
        self._commanded_by = context.span
        self._facts: dict[str, Value] = {
            "trajectory": identity,
            "attempt": attempt,
            "worker": worker,
            "version": command.policy_version,
        }
        self._events: list[Event] = []
        self.of_chunks = str(self._generation)
        """Header of the attempt's chunks."""
        self.of_trajectory = str(self._scoring)
        """Header of its trajectory."""

    def chunk(self, chunk: Chunk) -> None:
        """A chunk is written."""
        if tracer().active and len(self._events) < MOST_EVENTS:
            facts = {"sequence": chunk.sequence, "tokens": len(chunk.token_ids) // 4}
            self._events.append(Event("chunk", chunk.created_ms, facts))

    def generated(self, attempt: "Attempt", now_ms: int, outcome: str) -> None:
        """The attempt's last token is there, or it ends without one (`outcome` says how)."""
        if not tracer().active:
            return
        begun = attempt.command.created_ms, attempt.started_ms
        dispatch = Span("dispatch", self._dispatch, self._commanded_by, *begun, self._facts)
        facts = {
            **self._facts,
            "tokens": len(attempt.tokens),
            "resumed_tokens": attempt.resumed,
            "outcome": outcome,
        }
        tracer().tell(dispatch)
        tracer().tell(
            Span(
                "generation", self._generation, self._dispatch.span, attempt.started_ms, now_ms,
                facts, events=tuple(self._events), error=attempt.error or "",
            )
        )  # fmt: skip
        self._events.clear()

    def scored(
        self, generated_ms: int, now_ms: int, reward: float | None, error: str | None
    ) -> None:
        """The trajectory is written."""
        if tracer().active:
            facts = self._facts if reward is None else {**self._facts, "reward": reward}
            tracer().tell(
                Span(
                    "scoring", self._scoring, self._generation.span, generated_ms, now_ms, facts,
                    error=error or "",
                )
            )  # fmt: skip


def attempt_seed(run_seed: int, trajectory_id: str, attempt: int) -> int:
    """Seed of an attempt's sampling, the same in every process."""
    return zlib.crc32(f"{run_seed}:{trajectory_id}:{attempt}".encode()) & 0x7FFFFFFF


@dataclass(slots=True)
class Attempt:
    """What a worker knows of an attempt in its hands.

    `version` generates its next tokens. `resumed` counts the tokens that were taken over from an
    earlier attempt, `emitted` the tokens that are in chunks of this one already. `progress_at` is
    when the last token came, in seconds of the worker's clock. `trace` is None where the command
    named no trace.
    """

    command: Command
    prompt: Prompt
    sampling: Sampling
    worker: str
    started_ms: int
    progress_at: float = 0.0
    version: int = -1
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    runs: list[VersionRun] = field(default_factory=list)
    resumed: int = 0
    emitted: int = 0
    chunks: int = 0
    finish_reason: FinishReason | None = None
    generated_ms: int = 0
    error: str | None = None
    trace: AttemptTrace | None = None

    def __post_init__(self) -> None:
        command = self.command
        if self.version < 0:
            self.version = command.policy_version
        self.tokens.extend(unpack_tokens(command.prefix_token_ids).tolist())
        self.logprobs.extend(unpack_logprobs(command.prefix_logprobs).tolist())
        self.resumed = len(self.tokens)
        if self.resumed:
            whole = VersionRun(command.policy_version, self.resumed)
            self.runs += command.prefix_runs or (whole,)

    def request(self) -> Request:
        """What the engine is asked to generate."""
        sampling = self.sampling
        return Request(
            request_id=self.command.trajectory_id,
            prompt=self.prompt.token_ids,
            prefix=tuple(self.tokens),
            sampling=EngineSampling(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_new_tokens=sampling.max_new_tokens,
                stop_token_ids=sampling.stop_token_ids,
                seed=sampling.seed,
            ),
            version=self.version,
        )

    def take(self, delta: Delta, now_ms: int) -> None:
        """Adds what one engine step produced."""
        self._grow(len(delta.token_ids))
        self.tokens.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.generated_ms = now_ms
            self.error = delta.error

    def _grow(self, tokens: int) -> None:
        if not tokens:
            return
        if self.runs and self.runs[-1].version == self.version:
            tokens += self.runs.pop().tokens
        self.runs.append(VersionRun(self.version, tokens))

    @property
    def ready(self) -> int:
        """Tokens that are in no chunk yet."""
        return len(self.tokens) - self.emitted

    def chunk(self, now_ms: int, *, last: bool = False) -> Chunk:
        """The next chunk: all tokens that are in none yet. `last` says that the attempt ends here.

        ValueError if these tokens are of several versions: `repeated` must come first.
        """
        return self._chunk(len(self.tokens), self.version, now_ms, last=last)

    def repeated(self, now_ms: int) -> list[Chunk]:
        """The chunks that repeat a prefix of several versions, one for each; none for others, whose
        prefix is part of the first chunk."""
        chunks = []
        if self.resumed and not self.chunks and any(r.version != self.version for r in self.runs):
            for run in self.runs:
                end = min(self.emitted + run.tokens, self.resumed)
                if end > self.emitted:
                    chunks.append(self._chunk(end, run.version, now_ms, last=False))
        return chunks

    def whole(self, now_ms: int) -> Chunk:
        """All that the attempt has, in one chunk that is not for the chunk log."""
        return self._record(0, len(self.tokens), self.version, self.chunks, now_ms, last=True)

    def _chunk(self, end: int, version: int, now_ms: int, *, last: bool) -> Chunk:
        chunk = self._record(self.emitted, end, version, self.chunks, now_ms, last=last)
        self.emitted = end
        self.chunks += 1
        return chunk

    def _record(
        self, begin: int, end: int, version: int, sequence: int, now_ms: int, *, last: bool
    ) -> Chunk:
        command = self.command
        return Chunk(
            run=command.run, trajectory_id=command.trajectory_id, group_id=command.group_id,
            sample=command.sample, attempt=command.attempt, sequence=sequence,
            policy_version=version, ordinal=command.ordinal,
            purpose=command.purpose, position=begin,
            token_ids=pack_tokens(self.tokens[begin:end]),
            logprobs=pack_logprobs(self.logprobs[begin:end]),
            last=last, worker=self.worker, sampling=self.sampling, created_ms=now_ms,
            resumed_tokens=max(0, min(end, self.resumed) - begin),
        )  # fmt: skip

    def trajectory(
        self,
        *,
        engine: str,
        reward: float | None,
        parts: dict[str, float],
        error: str | None,
        text: str | None,
        now_ms: int,
    ) -> Trajectory:
        """The finished trajectory: prompt and response, with the response masked in."""
        command, prompt = self.command, self.prompt.token_ids
        generated = len(self.tokens)
        before = np.zeros(len(prompt), dtype=np.float32)
        return Trajectory(
            run=command.run, trajectory_id=command.trajectory_id, group_id=command.group_id,
            sample=command.sample, attempt=command.attempt, chunks=self.chunks,
            policy_version=command.policy_version, ordinal=command.ordinal,
            purpose=command.purpose,
            token_ids=pack_tokens(prompt) + pack_tokens(self.tokens),
            mask=bytes(len(prompt)) + b"\x01" * generated,
            logprobs=pack_logprobs(before) + pack_logprobs(self.logprobs),
            version_runs=tuple(self.runs), finish_reason=self.finish_reason or "error",
            reward=reward, reward_parts=parts, error=error, text=text, worker=self.worker,
            engine=engine, sampling=self.sampling, started_ms=self.started_ms,
            generated_ms=self.generated_ms or now_ms, created_ms=now_ms,
            resumed_tokens=self.resumed,
        )  # fmt: skip
