"""An accelerator that is only a clock: the timing of decoding, without a language model.

Invariant: what a request yields depends on the engine's seed, the request's id and its sampling
limits alone, never on the clock, on the batch, on the version or on the worker. Hence a request
that is resumed elsewhere under the same id goes on exactly as it would have: same tokens, same
total length. `Sampling.seed` plays no part, since it may differ between attempts.

The latency model is that of the project's reference simulations: one iteration over a batch of `n`
sequences takes `base + n * per_sequence` seconds and yields one token for each; prompts are read at
a fixed time per token. There are no weights: `load` takes its time, and every log-probability is
that of the uniform distribution over the vocabulary, in `step` and in `score` alike. A trainer that
publishes `-log(vocabulary)` as its canary passes; other canaries need an infinite tolerance.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from dora.errors import DoraError, WeightsError
from dora.producers.engines.base import Delta, Engine, Request, complete, refusal, resumed_seed


@dataclass(frozen=True, slots=True)
class EmulatedSpec:
    """Times in seconds of the emulated device; lengths in tokens.

    `length` names the distribution of response lengths: `fixed` is always `length_mean`, `uniform`
    runs from 1 to `2 * length_mean - 1`, `lognormal` has the mean `length_mean` and the standard
    deviation `length_sigma` of its logarithm. All are cut to [1, max_new_tokens]. `time_scale`
    turns emulated into real seconds; 0 does not wait.
    """

    iteration_seconds: float = 0.024
    iteration_seconds_per_sequence: float = 0.0001
    prefill_seconds_per_token: float = 0.00001
    load_seconds: float = 0.5
    length: Literal["fixed", "uniform", "lognormal"] = "lognormal"
    length_mean: float = 64.0
    length_sigma: float = 1.0
    time_scale: float = 1.0


@dataclass(slots=True)
class _Sequence:
    """A request in progress: `position` response tokens exist, of `total` in all."""

    request: Request
    seed: int
    position: int
    total: int
    ends_with_stop: bool
    prefilled: bool = False


class EmulatedEngine(Engine):
    """The latency model behind the interface of a real engine.

    `clock` (seconds, monotonic) and `sleep` are passed in, so that tests run in virtual time. Steps
    keep a schedule: what the caller does between two steps overlaps with the next iteration, up to
    its length, as on a device that computes beside its driver. Without `vocabulary`, the number of
    tokens is that of the config.json in the loaded directory.
    """

    name = "emulated"

    def __init__(
        self,
        spec: EmulatedSpec,
        *,
        capacity: int,
        max_model_len: int,
        vocabulary: int | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.capacity = capacity
        self.version: int | None = None
        self.vocabulary = vocabulary or 0
        self.max_model_len = max_model_len
        self._given_vocabulary = vocabulary
        self._seed = seed
        self._spec = spec
        self._clock = clock
        self._sleep = sleep
        self._sequences: dict[str, _Sequence] = {}
        self._finished: list[Delta] = []
        self._busy_until = clock()

    def load(self, directory: Path, version: int) -> None:
        """Take the time of an update; of the directory only config.json may be read.

        Raises `DoraError` while requests run, `WeightsError` where the vocabulary is not known.
        """
        if self._sequences:
            raise DoraError(
                f"weights of version {version} cannot be loaded while {len(self._sequences)} "
                "requests run",
                hint="Abort them or let them finish first.",
            )
        if self._given_vocabulary is None:
            self.vocabulary = vocabulary_of(directory)
        self._spend(self._spec.load_seconds)
        self.version = version

    def restart(self, directory: Path, version: int) -> None:
        """Forget all requests, then `load`."""
        self._sequences.clear()
        self._finished.clear()
        self.load(directory, version)

    def score(self, token_ids: Sequence[int], version: int | None = None) -> list[float]:
        """`-log(vocabulary)` for each token after the first: there are no weights."""
        self._check_ready()
        return [-math.log(self.vocabulary)] * max(0, len(token_ids) - 1)

    def add(self, request: Request) -> None:
        """Take a request; see `Engine.add`."""
        name = request.request_id
        if name in self._sequences:
            raise DoraError(f"request {name} runs already")
        self._check_ready()
        reason = refusal(request, self.vocabulary, self.max_model_len)
        if reason is not None:
            self._finished.append(Delta(name, finish_reason="error", error=reason))
            return
        ended = complete(request)
        if ended is not None:
            self._finished.append(Delta(name, finish_reason=ended))
            return
        seed = self._seed_of(request)
        drawn = self._draw_length(seed)
        room = self.max_model_len - len(request.prompt)
        total = min(drawn, request.sampling.max_new_tokens, room)
        # A prefix that outgrew the drawn length (made elsewhere) ends with the next token.
        total = max(total, len(request.prefix) + 1)
        ends = drawn <= total and bool(request.sampling.stop_token_ids)
        self._sequences[name] = _Sequence(request, seed, len(request.prefix), total, ends)

    def abort(self, request_id: str) -> None:
        """Drop a request; see `Engine.abort`."""
        self._sequences.pop(request_id, None)
        self._finished = [delta for delta in self._finished if delta.request_id != request_id]

    def step(self) -> list[Delta]:
        """One token for each of the first `capacity` requests, after one iteration's time."""
        deltas, self._finished = self._finished, []
        batch = list(self._sequences.values())[: self.capacity]
        if not batch:
            return deltas
        seconds = self._spec.iteration_seconds + self._spec.iteration_seconds_per_sequence * len(
            batch
        )
        for sequence in batch:
            if not sequence.prefilled:
                sequence.prefilled = True
                tokens = len(sequence.request.prompt) + len(sequence.request.prefix)
                seconds += self._spec.prefill_seconds_per_token * tokens
        self._spend(seconds)
        deltas.extend(self._grow(sequence) for sequence in batch)
        return deltas

    @property
    def running(self) -> int:
        """Requests taken and not reported as finished."""
        return len(self._sequences) + len(self._finished)

    def close(self) -> None:
        """Forget all requests."""
        self._sequences.clear()
        self._finished.clear()

    def _grow(self, sequence: _Sequence) -> Delta:
        name = sequence.request.request_id
        stops = sequence.request.sampling.stop_token_ids
        last = sequence.position + 1 == sequence.total
        logprobs = (-math.log(self.vocabulary),)
        if last and sequence.ends_with_stop:
            token = stops[0]
        else:
            token = _token(sequence.seed, sequence.position, self.vocabulary, stops)
        sequence.position += 1
        if not last:
            return Delta(name, (token,), logprobs)
        del self._sequences[name]
        ended: Literal["stop", "length"] = "stop" if sequence.ends_with_stop else "length"
        return Delta(name, (token,), logprobs, ended)

    def _check_ready(self) -> None:
        if self.version is None:
            raise DoraError("the engine was never started", hint="Load or restart it first.")

    def _seed_of(self, request: Request) -> int:
        name = f"{self._seed}:{request.request_id}".encode()
        return int.from_bytes(blake2b(name, digest_size=7).digest(), "little")

    def _draw_length(self, seed: int) -> int:
        spec = self._spec
        share = (resumed_seed(seed, 0x4C454E) % (2**53) + 0.5) / 2**53
        if spec.length == "fixed":
            drawn = spec.length_mean
        elif spec.length == "uniform":
            drawn = 1 + math.floor(share * (2 * spec.length_mean - 1))
        elif spec.length_sigma == 0:
            drawn = spec.length_mean
        else:
            # The mean of a log-normal is exp(mu + sigma^2 / 2).
            mu = math.log(spec.length_mean) - spec.length_sigma**2 / 2
            drawn = math.exp(statistics.NormalDist(mu, spec.length_sigma).inv_cdf(share))
        return max(1, round(drawn))

    def _spend(self, seconds: float) -> None:
        now = self._clock()
        duration = seconds * self._spec.time_scale
        # Sleeping is never exact: waiting for points in time keeps the errors from adding up.
        late = now - self._busy_until
        self._busy_until = (self._busy_until if late < duration else now) + duration
        if self._busy_until > now:
            self._sleep(self._busy_until - now)


def vocabulary_of(directory: Path) -> int:
    """Number of tokens of a model directory, from its config.json; raises `WeightsError`."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"cannot read the size of the vocabulary from {path}: {error}"
        ) from error
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int) or size < 2:
        raise WeightsError(f"{path} has no usable vocab_size: {size!r}")
    return size


def _token(seed: int, position: int, vocabulary: int, stops: tuple[int, ...]) -> int:
    """A pseudo-random token that is no stop token, unless nothing else is in the vocabulary."""
    start = resumed_seed(seed, position + 1)
    for offset in range(len(stops) + 1):
        token = (start + offset) % vocabulary
        if token not in stops:
            return token
    return start % vocabulary
