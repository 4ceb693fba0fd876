"""Tables of text that are as wide as their widest cells, wherever they are printed.

Invariant: nothing is cut off or wrapped, so that a program may read them as well.
"""

from collections.abc import Sequence


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
