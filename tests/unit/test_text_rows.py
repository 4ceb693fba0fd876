"""Which trajectories have a row on the terminal, and how a row looks."""

import io
from collections.abc import Sequence

from rich.console import Console

from dora.cli.tail.text import as_line
from dora.cli.tail.text_rows import QUIET_SECONDS, TextRows, TextScreen, readable, row_lines
from dora.core.transcripts import Detokenizer, Piece, Transcript


def script(identity: str, text: str = "", begin: int = 0) -> Transcript:
    made = Transcript(identity, 3, begin, Detokenizer(lambda ids: ""))
    made.text, made.worker, made.tokens = text, "w0", [0] * len(text)
    return made


def piece(
    identity: str, *, last: bool = False, reward: float | None = None, text: str = "a"
) -> Piece:
    reason = "stop" if last else None
    return Piece(identity, 0, 3, 0, 1, text, "w0", 0, False, last, reason, reward)


def rows_of(rows: TextRows) -> list[str]:
    return [row.script.trajectory for row in rows.rows]


def feed(rows: TextRows, names: Sequence[str], now: float) -> None:
    for name in names:
        rows.take(piece(name), script(name), now)
    rows.arrange(now)


def test_rows_are_kept_while_they_are_written_to_and_the_rest_waits() -> None:
    rows = TextRows(2)
    feed(rows, ["a", "b"], 0.0)
    feed(rows, ["c", "d", "a", "b"], 1.0)
    assert (sorted(rows_of(rows)), rows.waiting) == (["a", "b"], 2)


def test_a_finished_row_shows_its_reward_for_a_while_and_goes_to_the_latest() -> None:
    rows = TextRows(2)
    feed(rows, ["a", "b"], 0.0)
    feed(rows, ["c", "d"], 1.0)
    rows.take(piece("a", last=True, reward=1.0), None, 1.5)
    rows.arrange(1.6)
    assert "a" in rows_of(rows) and rows.finished == 1
    rows.arrange(4.0)
    assert (sorted(rows_of(rows)), rows.waiting) == (["b", "d"], 1)
    rows.take(piece("c", last=True, reward=0.0), None, 4.0)
    assert (rows.finished, rows.waiting) == (2, 0)


def test_a_row_that_falls_quiet_is_given_away_only_if_another_is_at_work() -> None:
    rows = TextRows(1)
    feed(rows, ["a"], 0.0)
    rows.arrange(5 * QUIET_SECONDS)
    assert rows_of(rows) == ["a"]
    feed(rows, ["b"], 5 * QUIET_SECONDS)
    assert rows_of(rows) == ["b"]


def test_a_smaller_terminal_has_fewer_rows() -> None:
    rows = TextRows(3)
    feed(rows, ["a", "b", "c"], 0.0)
    rows.resize(1)
    assert len(rows.rows) == 1 and rows.waiting == 2


def test_a_row_shows_the_end_of_its_text_in_its_lines() -> None:
    rows = TextRows(1)
    rows.take(piece("g1/0"), script("g1/0", "first\n" + "x" * 30 + "\nend 你好"), 0.0)
    rows.arrange(0.0)
    lines = [line.plain for line in row_lines(rows.rows[0], 20, 4)]
    assert lines[0].startswith("g1/0  v3  w0  43 tokens")
    assert lines[1:] == ["x" * 20, "x" * 10, "end 你好"]
    assert all(line.cell_len <= 20 for line in row_lines(rows.rows[0], 20, 9)[1:])


def test_who_came_late_sees_that_the_beginning_is_missing() -> None:
    rows = TextRows(1)
    rows.take(piece("g1/0"), script("g1/0", "more", begin=12), 0.0)
    rows.arrange(0.0)
    head, text, *_ = (line.plain for line in row_lines(rows.rows[0], 80, 3))
    assert "16 tokens" in head and text == "…more"


def test_the_screen_fits() -> None:
    rows = TextRows(3)
    for name in ("a", "b", "c", "d"):
        rows.take(piece(name), script(name, f"{name} " * 200), 0.0)
    rows.arrange(0.0)
    rows.take(piece("a", last=True, reward=None), None, 0.0)
    console = Console(
        file=io.StringIO(), width=60, height=20, force_terminal=True, color_system=None
    )
    console.print(TextScreen("run", rows, 19))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= 19 and max(map(len, lines)) <= 60
    assert lines[0] == "run: 1 finished"


def test_generated_text_cannot_steer_the_terminal() -> None:
    evil = "a\x1b[2Jb\r\tc\x07\u202e"
    assert readable(evil) == "a\\x1b[2Jb\\r    c\\x07\\u202e"
    assert readable("two\nlines", newlines=False) == "two\\nlines"
    assert "\x1b" not in as_line(piece("g0/0", text=evil))


def test_a_line_says_where_a_text_is_another_one_and_how_it_ended() -> None:
    again = Piece("g0/0", 1, 3, 7, 2, "ab", "w1", 0, True)
    assert as_line(again) == "g0/0#1  v3  [from token 7 on again] ab"
    end = Piece("g0/0", 0, 3, 7, 2, "ab", "w1", 0, False, True, "stop", 0.5)
    assert as_line(end) == "g0/0  v3  ab [stop, reward 0.5, 9 tokens]"
    failed = Piece("g0/0", 0, 3, 9, 0, "", "w1", 0, False, True, "stop", None, "too\nslow")
    assert as_line(failed) == "g0/0  v3  [stop, no reward: too\\nslow, 9 tokens]"
