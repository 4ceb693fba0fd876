"""Text of tokens that arrive piece by piece.

Invariant: what was returned is final, and all of it together is the text of all tokens: a character
whose bytes are spread over several tokens is returned once its last token is there (or the end is).
Tokens are decoded with some of those before them, because their text may depend on these (leading
spaces, for instance).
"""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What tokenizers put where bytes are no character, or not yet."""
CONTEXT_TOKENS = 8
"""Tokens that are decoded again with new ones, at least, as far as there are any."""
_LONGEST_TAIL = 32

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Text of one token sequence; `decode` gives the text of token ids."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        # Stretches of tokens after each of which no character was open.
        self._stretches: list[list[int]] = []
        self._open: list[int] = []
        self._returned = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make sure."""
        self._open.extend(token_ids)
        return self._take(final=False)

    def finish(self) -> str:
        """What is left, incomplete characters included."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        if not self._open:
            return ""
        text = self._decode([*(t for stretch in self._stretches for t in stretch), *self._open])
        sure = text if final else text.rstrip(REPLACEMENT)
        if len(text) - len(sure) > _LONGEST_TAIL:
            sure = text  # no character is that long: these bytes never become one
        new = sure[self._returned :]
        self._returned = max(self._returned, len(sure))
        if len(sure) == len(text):
            self._close()
        return new

    def _close(self) -> None:
        self._stretches.append(self._open)
        self._open = []
        kept = sum(map(len, self._stretches))
        while kept - len(self._stretches[0]) >= CONTEXT_TOKENS:
            kept -= len(self._stretches.pop(0))
        self._returned = len(self._decode([t for stretch in self._stretches for t in stretch]))
