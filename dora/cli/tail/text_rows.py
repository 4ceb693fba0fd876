"""Which trajectories a terminal shows while they are generated, and how.

A trajectory keeps its row while it is written to; one that ends stays for a while,
marked with its reward, and the row then goes to the one that was written to last. Characters that
would steer the terminal are never printed.
"""

from dataclasses import dataclass

from rich.cells import chop_cells
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from dora.cli.console import visible
from dora.core.transcripts import Piece, Transcript

LINGER_SECONDS = 2.0
"""How long a finished trajectory keeps its row while others wait for one."""
QUIET_SECONDS = 10.0
"""Without a new token for so long, a row goes to one that is written to."""
ROW_LINES = 4


@dataclass(slots=True)
class Row:
    """A trajectory on the screen; times in seconds of the caller's clock."""

    script: Transcript
    active_at: float
    end: Piece | None = None
    ended_at: float = 0.0

    def free(self, now: float) -> bool:
        """Whether the row may go to another trajectory."""
        if self.end is not None:
            return now - self.ended_at >= LINGER_SECONDS
        return now - self.active_at >= QUIET_SECONDS


class TextRows:
    """At most `count` rows, fed with pieces and the transcripts that they come from."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.rows: list[Row] = []
        self._others: dict[str, tuple[Transcript, float]] = {}
        self.finished = 0

    @property
    def waiting(self) -> int:
        """Trajectories that are written to and have no row."""
        return len(self._others)

    def resize(self, count: int) -> None:
        """Allow another number of rows; those at the end go first."""
        self._count = count
        for row in self.rows[count:]:
            if row.end is None:
                self._others[row.script.trajectory] = (row.script, row.active_at)
        del self.rows[count:]

    def take(self, piece: Piece, script: Transcript | None, now: float) -> None:
        """Note a piece; `script` is its transcript as it is now, None if it has ended."""
        row = next((r for r in self.rows if r.script.trajectory == piece.trajectory), None)
        if row is not None:
            row.active_at = now
        elif script is not None:
            self._others.pop(piece.trajectory, None)
            self._others[piece.trajectory] = (script, now)
        if piece.last:
            self.finished += 1
            self._others.pop(piece.trajectory, None)
            if row is not None:
                row.end, row.ended_at = piece, now

    def arrange(self, now: float) -> None:
        """Give rows that are free to those that were written to last."""
        stale = [i for i, (_, at) in self._others.items() if now - at >= QUIET_SECONDS]
        for identity in stale:
            del self._others[identity]
        while self._others and len(self.rows) < self._count:
            self.rows.append(self._newest())
        for place, row in enumerate(self.rows):
            if self._others and row.free(now):
                self.rows[place] = self._newest()

    def _newest(self) -> Row:
        script, at = self._others.pop(next(reversed(self._others)))
        return Row(script, at)


@dataclass(frozen=True, slots=True)
class TextScreen:
    """The rows as a picture of at most `height` lines."""

    title: str
    rows: TextRows
    height: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, rows = options.max_width, self.rows
        more = f", {rows.waiting} more at work" if rows.waiting else ""
        lines = [Text(f"{self.title}: {rows.finished} finished{more}", style="dim")]
        each = (self.height - 1) // max(1, len(rows.rows))
        for row in rows.rows:
            lines += row_lines(row, width, max(2, each))
        for line in lines[: self.height]:
            line.truncate(width, overflow="ellipsis")
            yield line


def row_lines(row: Row, width: int, height: int) -> list[Text]:
    """A heading and the end of the text, `height` lines in all."""
    script, end = row.script, row.end
    head = Text.assemble(
        (script.trajectory, "bold"),
        (f"#{script.attempt}" if script.attempt else "", "yellow"),
        f"  v{script.version}  {script.worker}  {script.length} tokens",
    )
    if end is None:
        rate = script.tokens_per_second
        head.append(f"  {rate:,.0f} tok/s" if rate else "", style="cyan")
    else:
        head.append("  ")
        head.append_text(ending(end))
    room = height - 1
    text = script.text
    if script.begin:
        text = f"…{text}"
    # no more than what could be shown is wrapped
    wrapped: list[str] = []
    for paragraph in readable(text[-width * room :]).split("\n"):
        wrapped += chop_cells(paragraph, width) or [""]
    shown = wrapped[-room:]
    style = "" if end is None else "dim"
    return [head, *(Text(line, style=style) for line in shown)] + [Text("")] * (room - len(shown))


def ending(piece: Piece) -> Text:
    """How a trajectory ended."""
    if piece.reward is None:
        error = readable(piece.error or "", newlines=False)
        return Text(f"{piece.finish_reason}, no reward: {error}", style="red")
    style = "bold green" if piece.reward > 0 else "bold red"
    return Text.assemble(f"{piece.finish_reason}, ", (f"reward {piece.reward:g}", style))


def readable(text: str, *, newlines: bool = True) -> str:
    """The text with wide tabs, and what else is not printable spelled out (see `visible`)."""
    return visible(text.replace("\t", "    "), newlines=newlines)
