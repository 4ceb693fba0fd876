"""What an iteration of an emulated accelerator costs, and the formula for many of them.

Invariant: `Epoch.end(k)` is the sum of the costs of `k` iterations in which the batch does not
change and each context grows by one token per iteration.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Times in seconds, on a device of speed 1; `speed` divides those of computing, not of loading.

    `kv_cache_tokens` bounds the tokens of all running contexts together; None is no bound.
    """

    iteration_seconds: float
    per_sequence: float = 0.0
    per_context_token: float = 0.0
    prefill_seconds_per_token: float = 0.0
    load_seconds: float = 0.0
    kv_cache_tokens: int | None = None
    speed: float = 1.0

    def iteration(self, sequences: int, context: float = 0.0) -> float:
        """Seconds of one iteration over so many sequences with so many context tokens in all."""
        return (
            self.iteration_seconds
            + sequences * self.per_sequence
            + context * self.per_context_token
        ) / self.speed

    def prefill(self, tokens: int) -> float:
        """Seconds to read so many tokens."""
        return tokens * self.prefill_seconds_per_token / self.speed


@dataclass(slots=True)
class Epoch:
    """Iterations over an unchanging batch: iteration `first + k` ends at `end(k + 1)`.

    Before the first one `reading` tokens are read and `stall` seconds pass; both are in `head`. The
    batch must be preempted before iteration `preempts_at`.
    """

    first: int
    start: float
    reading: int
    stall: float
    head: float
    linear: float
    quadratic: float
    preempts_at: float

    def end(self, count: int) -> float:
        """When so many iterations have ended."""
        if count == 0:
            return self.start
        return self.start + (self.head + count * self.linear + count * (count - 1) * self.quadratic)

    def completed(self, now: float) -> int:
        """Iterations that have ended by `now`."""
        rest = now - self.start - self.head
        if rest < self.linear or self.linear == 0:
            return 0
        if self.quadratic == 0:
            count = int(rest / self.linear)
        else:
            slope = self.linear - self.quadratic
            root = math.sqrt(slope * slope + 4 * self.quadratic * rest)
            count = int((root - slope) / (2 * self.quadratic))
        while self.end(count + 1) <= now:
            count += 1
        while count > 0 and self.end(count) > now:
            count -= 1
        return count
