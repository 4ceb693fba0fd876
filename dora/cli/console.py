"""Where commands print.

Invariant: standard output holds what was asked for and nothing else. That something takes its time
is said on standard error, and only to a person who watches.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

_WIDTH = 200


def wide_console() -> Console:
    """A console whose tables are not squeezed when they go to a file or through a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


@contextmanager
def waiting(text: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show `text` while the block runs; what is yielded changes it. With `quiet`, or where nobody
    watches, nothing is shown."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda text: None
        return
    with console.status(text) as status:
        yield status.update
