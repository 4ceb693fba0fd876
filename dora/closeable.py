"""Base class of what is closed at the end of a `with` block."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closeable(ABC):
    """`close` is called however the `with` block ends, and its errors are raised."""

    @abstractmethod
    def close(self) -> None:
        """Release connections, files or threads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
