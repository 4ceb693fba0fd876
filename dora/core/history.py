"""How long responses to a prompt were, to start groups first that are expected to be long
(StreamRL ranks by length for the same reason: what starts last ends last).

Invariant: only the order of starts depends on it; what is admitted, and under which version, does
not. Memory is bounded: prompts not seen for long are forgotten.
"""

from collections.abc import Callable, Hashable

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
