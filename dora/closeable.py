"""What is closed at the end of a `with` block.

Invariant: `close` is called however the block is left, and its errors are raised.
"""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Base of what holds something until `close`; usable in `with`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
