"""One attempt at a trajectory, from its start command to its record.

Invariant: the chunks of an attempt, in sequence, hold exactly the generated tokens of its
trajectory record, each token once, with the log-probability under which it was sampled, and all are
of the one policy version that the attempt was started with (C1). An attempt that goes on from an
earlier one's tokens repeats them in its first chunk.
"""

import zlib
from dataclasses import dataclass, field

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


def attempt_seed(run_seed: int, trajectory_id: str, attempt: int) -> int:
    """Seed of an attempt's sampling, the same in every process."""
    return zlib.crc32(f"{run_seed}:{trajectory_id}:{attempt}".encode()) & 0x7FFFFFFF


@dataclass(slots=True)
class Attempt:
    """What a worker knows of an attempt in its hands.

    `resumed` counts the tokens that were taken over from an earlier attempt, `emitted` the tokens
    that are in chunks of this one already. `progress_at` is when the last token came, in seconds of
    the worker's clock.
    """

    command: Command
    prompt: Prompt
    sampling: Sampling
    worker: str
    started_ms: int
    progress_at: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    resumed: int = 0
    emitted: int = 0
    chunks: int = 0
    finish_reason: FinishReason | None = None
    generated_ms: int = 0
    error: str | None = None

    def __post_init__(self) -> None:
        self.tokens += unpack_tokens(self.command.prefix_token_ids).tolist()
        self.logprobs += unpack_logprobs(self.command.prefix_logprobs).tolist()
        self.resumed = len(self.tokens)

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
        )

    def take(self, delta: Delta, now_ms: int) -> None:
        """Adds what one engine step produced."""
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.generated_ms = now_ms
            self.error = delta.error

    def chunk(self, size: int, now_ms: int, *, last: bool = False) -> Chunk | None:
        """The next chunk, once `size` tokens wait or the attempt ends (`last`, or finished)."""
        last = last or self.finish_reason is not None
        if not last and len(self.tokens) - self.emitted < size:
            return None
        command = self.command
        chunk = Chunk(
            run=command.run, trajectory_id=command.trajectory_id, group_id=command.group_id,
            sample=command.sample, attempt=command.attempt, sequence=self.chunks,
            policy_version=command.policy_version, ordinal=command.ordinal,
            purpose=command.purpose, position=self.emitted,
            token_ids=pack_tokens(self.tokens[self.emitted :]),
            logprobs=pack_logprobs(self.logprobs[self.emitted :]),
            last=last, worker=self.worker, sampling=self.sampling, created_ms=now_ms,
            resumed_tokens=0 if self.chunks else self.resumed,
        )  # fmt: skip
        self.emitted = len(self.tokens)
        self.chunks += 1
        return chunk

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
        runs = (VersionRun(command.policy_version, generated),) if generated else ()
        return Trajectory(
            run=command.run, trajectory_id=command.trajectory_id, group_id=command.group_id,
            sample=command.sample, attempt=command.attempt, chunks=self.chunks,
            policy_version=command.policy_version, ordinal=command.ordinal,
            purpose=command.purpose,
            token_ids=pack_tokens([*prompt, *self.tokens]),
            mask=bytes(len(prompt)) + b"\x01" * generated,
            logprobs=pack_logprobs([0.0] * len(prompt) + self.logprobs),
            version_runs=runs, finish_reason=self.finish_reason or "error", reward=reward,
            reward_parts=parts, error=error, text=text, worker=self.worker, engine=engine,
            sampling=self.sampling, started_ms=self.started_ms,
            generated_ms=self.generated_ms or now_ms, created_ms=now_ms,
            resumed_tokens=self.resumed,
        )  # fmt: skip
