"""What an emulated engine puts into the log in place of a language model's words, and how late.

Invariant: a token depends on the engine's seed, the request's id and the token's position alone.
"""

import math
from array import array
from functools import lru_cache
from hashlib import blake2b
from random import Random

PERIOD = 1 << 16
"""Tokens after which a request's noise repeats. Requests read the same noise from places of their
own, so that a thousand tokens cost no more than copying them."""

SHARE_SECONDS = 60.0


class Noise:
    """Tokens that mean nothing, and their log-probabilities."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._logprobs = array("f")

    def tokens(
        self, request_id: str, start: int, end: int, vocabulary: int, stops: tuple[int, ...]
    ) -> "array[int]":
        """The tokens at positions `start` to `end`, none of which is a stop token, unless nothing
        else is in the vocabulary."""
        key = f"{self._seed}:{request_id}".encode()
        place = int.from_bytes(blake2b(key, digest_size=4).digest(), "little")
        table = _table(vocabulary, stops)
        result = array("i")
        while start < end:
            first = (place + start) % PERIOD
            count = min(end - start, PERIOD - first)
            result += table[first : first + count]
            start += count
        return result

    def logprobs(self, count: int, vocabulary: int) -> "array[float]":
        """So many log-probabilities (nats) of the uniform distribution."""
        if len(self._logprobs) < count or self._logprobs[0] != _uniform(vocabulary):
            self._logprobs = array("f", [-math.log(vocabulary)]) * max(count, 4096)
        return self._logprobs[:count]


@lru_cache(maxsize=256)
def _uniform(vocabulary: int) -> float:
    return array("f", [-math.log(vocabulary)])[0]


@lru_cache(maxsize=4)
def _table(vocabulary: int, stops: tuple[int, ...]) -> "array[int]":
    allowed = [token for token in range(min(vocabulary, PERIOD)) if token not in stops]
    return array("i", Random(vocabulary).choices(allowed or range(vocabulary), k=PERIOD))


class Lateness:
    """By how much reports came too late, over the last one to two minutes."""

    def __init__(self) -> None:
        self._late = self._span = 0.0
        self._former = (0.0, 0.0)
        self._since = -math.inf

    def add(self, late: float, span: float, now: float) -> None:
        """A response that took `span` emulated seconds was reported `late` such seconds after its
        end; `now` is the real time."""
        if now - self._since > SHARE_SECONDS:
            self._former = (self._late, self._span)
            self._late = self._span = 0.0
            self._since = now
        self._late += late
        self._span += span

    @property
    def share(self) -> float:
        """Lateness as a share of the time that the responses took; 0 before the first."""
        late, span = self._former
        span += self._span
        return (late + self._late) / span if span > 0 else 0.0
