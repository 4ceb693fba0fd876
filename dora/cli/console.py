"""Where commands print.

Standard output holds what was asked for and nothing else. That something takes its time
is said on standard error, and only to a person who watches.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

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
_WIDEST = 10_000


def wide_console() -> Console:
    """A console whose tables are not squeezed when they go to a file or through a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def table_width(table: Table, console: Console) -> int:
    """Columns that `table` takes where nothing is cut or wrapped."""
    return console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum


def print_table(table: Table, console: Console) -> None:
    """Print `table` so that no heading and no figure is cut.

    Where it is wider than the terminal each row becomes a block of lines, `heading  value`. Into a
    file or a pipe it is as wide as it needs.
    """
    there, needed = console.width, table_width(table, console)
    if needed <= there:
        console.print(table)
    elif console.is_terminal:
        _print_stacked(table, console)
    else:
        console.width = needed
        console.print(table)
        console.width = there


def _print_stacked(table: Table, console: Console) -> None:
    if table.title:
        console.print(table.title, style="italic")
    names = [column.header for column in table.columns]
    for row in zip(*(list(column.cells) for column in table.columns), strict=True):
        block = Table.grid(padding=(0, 2))
        block.add_column(overflow="fold")
        block.add_column(overflow="fold")
        for name, cell in zip(names, row, strict=True):
            block.add_row(name, cell)
        console.print(block)
        console.print()


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
