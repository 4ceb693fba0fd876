"""One attempt at a trajectory, from its start command to its record.

The chunks of an attempt, in sequence, hold the generated tokens of its trajectory record, each
token once with the log-probability under which it was sampled. All tokens are of the policy version
that the attempt was started with (C1); under the schedule `partial` each chunk is of one version.
An attempt that resumes an earlier one repeats its tokens in the first chunk (one for each version).
"""

from array import array
from dataclasses import dataclass, field

import numpy as np

from dora.producers.engines.base import Delta, Request
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
    prompt_hash,
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

MOST_EVENTS = 256
"""Chunks of an attempt that are events of its generation span."""


@dataclass(slots=True)
class Attempt:
    """The state of an attempt: prompt, tokens so far, chunks written, result.

    `version` generates its next tokens. `resumed` counts the tokens taken over from an earlier
    attempt, `emitted` those that are in chunks of this one already. `progress_at` is when the last
    token came, in seconds of the worker's clock. `context` is the trace that the start command
    named; None if it named none.
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
    context: TraceContext | None = None
    chunk_header: str | None = None
    """`traceparent` of the attempt's chunks."""
    trajectory_header: str | None = None
    """`traceparent` of its trajectory."""
    chunk_events: list[Event] = field(default_factory=list)
    prompt_hash: str = field(init=False)
    """Names the prompt in chunks, so that what it resumed from is of the same one."""

    def __post_init__(self) -> None:
        command = self.command
        self.prompt_hash = prompt_hash(pack_tokens(self.prompt.token_ids))
        if self.version < 0:
            self.version = command.policy_version
        self.tokens.extend(unpack_tokens(command.prefix_token_ids).tolist())
        self.logprobs.extend(unpack_logprobs(command.prefix_logprobs).tolist())
        self.resumed = len(self.tokens)
        if self.resumed:
            whole = VersionRun(command.policy_version, self.resumed)
            self.runs += command.prefix_runs or (whole,)
        if self.context is not None:
            identity, attempt = command.trajectory_id, command.attempt
            self.chunk_header = str(self.context.at(generation_span(identity, attempt)))
            self.trajectory_header = str(self.context.at(scoring_span(identity, attempt)))

    def request(self) -> Request:
        """What the engine is asked to generate."""
        return Request(
            request_id=self.command.trajectory_id,
            prompt=self.prompt.token_ids,
            prefix=tuple(self.tokens),
            sampling=self.sampling,
            version=self.version,
        )

    def extend(self, delta: Delta, now_ms: int) -> None:
        """Adds what one engine step produced."""
        added = len(delta.token_ids)
        if added:
            if self.runs and self.runs[-1].version == self.version:
                added += self.runs.pop().tokens
            self.runs.append(VersionRun(self.version, added))
        self.tokens.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.generated_ms = now_ms
            self.error = delta.error

    @property
    def unwritten(self) -> int:
        """Tokens that are in no chunk yet."""
        return len(self.tokens) - self.emitted

    def chunk(self, now_ms: int, *, last: bool = False) -> Chunk:
        """The next chunk: all tokens that are in none yet. `last` says that the attempt ends here.

        `prefix_chunks` must come first.
        """
        return self._chunk(len(self.tokens), self.version, now_ms, last=last)

    def prefix_chunks(self, now_ms: int) -> list[Chunk]:
        """The chunks that repeat a prefix of several versions, one for each. A prefix of a single
        version is part of the first chunk instead."""
        chunks = []
        if self.resumed and not self.chunks and any(r.version != self.version for r in self.runs):
            for run in self.runs:
                end = min(self.emitted + run.tokens, self.resumed)
                if end > self.emitted:
                    chunks.append(self._chunk(end, run.version, now_ms, last=False))
        return chunks

    def handover(self, now_ms: int) -> Chunk:
        """All tokens in one chunk, for the attempt that goes on elsewhere."""
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
            prompt_hash="" if begin else self.prompt_hash,
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

    def trace_chunk(self, chunk: Chunk) -> None:
        """A chunk was written: an event of the generation span."""
        if self.context is not None and tracer().active and len(self.chunk_events) < MOST_EVENTS:
            facts = {"sequence": chunk.sequence, "tokens": len(chunk.token_ids) // 4}
            self.chunk_events.append(Event("chunk", chunk.created_ms, facts))

    def trace_generated(self, now_ms: int, outcome: str) -> None:
        """The last token is there, or generation ended without one: the spans until now."""
        if self.context is None or not tracer().active:
            return
        command, facts = self.command, self._trace_facts()
        dispatch = self.context.at(dispatch_span(command.trajectory_id, command.attempt))
        generation = self.context.at(generation_span(command.trajectory_id, command.attempt))
        begun = command.created_ms, self.started_ms
        tracer().emit(Span("dispatch", dispatch, self.context.span, *begun, facts))
        tracer().emit(
            Span(
                "generation", generation, dispatch.span, self.started_ms, now_ms,
                {
                    **facts,
                    "tokens": len(self.tokens),
                    "resumed_tokens": self.resumed,
                    "outcome": outcome,
                },
                events=tuple(self.chunk_events), error=self.error or "",
            )
        )  # fmt: skip
        self.chunk_events.clear()

    def trace_scored(self, trajectory: Trajectory) -> None:
        """The trajectory was written: the scoring span."""
        if self.context is None or not tracer().active:
            return
        identity, attempt = trajectory.trajectory_id, trajectory.attempt
        facts = self._trace_facts()
        if trajectory.reward is not None:
            facts["reward"] = trajectory.reward
        tracer().emit(
            Span(
                "scoring", self.context.at(scoring_span(identity, attempt)),
                generation_span(identity, attempt), trajectory.generated_ms, trajectory.created_ms,
                facts, error=trajectory.error or "",
            )
        )  # fmt: skip

    def _trace_facts(self) -> dict[str, Value]:
        return {
            "trajectory": self.command.trajectory_id,
            "attempt": self.command.attempt,
            "worker": self.worker,
            "version": self.command.policy_version,
        }
