"""How fast workers are, from what they report, and how long responses are.

A worker that runs few sequences gives each of them more tokens a second than a full one. So a
worker is compared with what workers of about the same load reach; its speed is 1 if it is like
them. (AReaL-Hex schedules over mixed GPUs by measured throughput.)

A speed is finite, positive and within `SLOWEST .. FASTEST`, whatever a worker reports.
"""

import math
from collections.abc import Callable, Hashable

# How long responses to a prompt were, to start groups first that are expected to be long
# (StreamRL ranks by length for the same reason: what starts last ends last).
#
# Only the order of starts depends on it; what is admitted, and under which version,
# does not. Memory is bounded: prompts not seen for long are forgotten.

REMEMBERED = 100_000
"""Prompts."""
_LATEST = 32
"""Responses after which older ones count ever less."""

PromptOf = Callable[[int], Hashable]
"""Which prompt stands at an ordinal of the training stream; equal ones are the same prompt."""


class History:
    """Mean response lengths in tokens by prompt."""

    def __init__(self, prompt_of: PromptOf) -> None:
        self._prompt_of = prompt_of
        self._means: dict[Hashable, tuple[float, int]] = {}

    def finished(self, ordinal: int, tokens: int) -> None:
        """A response to the prompt at `ordinal` has this many tokens."""
        prompt = self._prompt_of(ordinal)
        mean, count = self._means.pop(prompt, (0.0, 0))
        count = min(count + 1, _LATEST)
        self._means[prompt] = mean + (tokens - mean) / count, count
        if len(self._means) > REMEMBERED:
            del self._means[next(iter(self._means))]

    def expected(self, ordinal: int) -> float:
        """Expected length of responses to the prompt at `ordinal`; 0 for one never seen."""
        return self._means.get(self._prompt_of(ordinal), (0.0, 0))[0]


SLOWEST, FASTEST = 1 / 8, 8.0
_ABSURD = 16.0
"""Rates further from the peers' than this factor are no measurement."""
_PLAUSIBLE = (1e-3, 1e6)
"""Tokens per second and sequence that any device could have."""
_SMOOTHING = 0.2
_STEPS = 8
"""Speeds are rounded to eighths, so that noise changes no decision."""


class Speeds:
    """Takes tokens per second and running sequences of workers, by name."""

    def __init__(self) -> None:
        self._typical: dict[int, float] = {}  # tokens per second and sequence, by bucket of load
        self._ratios: dict[str, float] = {}

    def observe(self, name: str, tokens_per_second: float, running: int) -> None:
        """A report; nonsense (no number, implausible, absurdly far from its peers) is ignored."""
        if running < 1 or not math.isfinite(tokens_per_second):
            return
        rate = tokens_per_second / running
        if not _PLAUSIBLE[0] <= rate <= _PLAUSIBLE[1]:
            return
        bucket = running.bit_length()
        typical = self._typical.get(bucket)
        if typical is None:
            self._typical[bucket] = rate
            return
        ratio = rate / typical
        if not 1 / _ABSURD <= ratio <= _ABSURD:
            return
        self._typical[bucket] = typical * ratio ** (_SMOOTHING / 4)
        known = self._ratios.get(name, 1.0)
        self._ratios[name] = known * (ratio / known) ** _SMOOTHING

    def forget(self, name: str) -> None:
        """The worker is gone."""
        self._ratios.pop(name, None)

    def of(self, name: str) -> float:
        """Speed of a worker relative to its peers; 1 while nothing is known."""
        ratio = min(FASTEST, max(SLOWEST, self._ratios.get(name, 1.0)))
        return max(SLOWEST, round(ratio * _STEPS) / _STEPS)
