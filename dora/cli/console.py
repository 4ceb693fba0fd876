"""Where commands print.

Standard output holds what was asked for and nothing else. That something takes its time
is said on standard error, and only to a person who watches.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

# Texts that others wrote, models above all, on a terminal.
#
# A terminal does nothing but show them: characters that would steer it are spelled
# out.


def visible(text: str, *, newlines: bool = True) -> str:
    """`text` with what is not printable spelled out, line ends too unless `newlines`."""
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or (newlines and char == "\n")
        else char.encode("unicode_escape").decode()
        for char in text
    )


# Tables of text that are as wide as their widest cells, wherever they are printed.
#
# Nothing is cut off or wrapped, so that a program may read them as well.


def columns(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """The rows as lines; with `numbers` all columns but the first stand at the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if numbers and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


_WIDTH = 200


def wide_console() -> Console:
    """A console whose tables are not squeezed when they go to a file or through a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


@contextmanager
def waiting(text: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show `text` while the block runs; what is yielded changes it. With `quiet`, or without a
    terminal, nothing is shown."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda text: None
        return
    with console.status(text) as status:
        yield status.update
