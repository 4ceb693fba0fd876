"""The canary: a fixed token sequence whose log-probabilities tell whether weights arrived.

It depends on seed and vocabulary alone, so every version of a run is checked on the same one. An
engine that reports success after an update but holds other weights cannot reproduce the trainer's
log-probabilities of it.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

CANARY_TOKENS = 32
"""Enough positions that every layer's error shows; short enough to cost nothing."""


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """Differences in nats between an engine's log-probabilities and the trainer's."""

    max_difference: float
    mean_difference: float
    passed: bool


def canary_tokens(seed: int, vocabulary: int, max_length: int) -> list[int]:
    """Token ids of the canary: uniform over the vocabulary, at most `max_length` of them."""
    generator = random.Random(f"canary-{seed}")
    length = max(2, min(CANARY_TOKENS, max_length))
    return [generator.randrange(vocabulary) for _ in range(length)]


def check(score: Sequence[float], expected: Sequence[float], tolerance: float) -> CanaryResult:
    """Compare an engine's `score` with the trainer's `expected` log-probabilities (nats, raw, of
    each canary token after the first).

    Anything that is no number, or the wrong count, fails with an infinite difference.
    """
    if len(score) != len(expected) or not score:
        return CanaryResult(math.inf, math.inf, passed=False)
    differences = [abs(a - b) for a, b in zip(score, expected, strict=True)]
    if not all(math.isfinite(d) for d in differences):
        return CanaryResult(math.inf, math.inf, passed=False)
    largest = max(differences)
    return CanaryResult(largest, sum(differences) / len(differences), largest <= tolerance)
