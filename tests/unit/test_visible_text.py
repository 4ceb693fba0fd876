"""What others wrote reaches a terminal as text alone."""

import dataclasses
from io import StringIO

from rich.console import Console

from dora.bus.reader import Message
from dora.cli.console import visible
from dora.cli.rescore.display import Change, Outcome, show
from dora.cli.tail.lines import as_line
from dora.core.rescoring import Rescored, compare
from tests.factories import admission, trajectory

EVIL = "\x1b[2J\r[bold]\x07"


def test_what_is_not_printable_is_spelled_out() -> None:
    assert visible("a\x1b[2J\tb\x00\nc") == "a\\x1b[2J\\tb\\x00\nc"
    assert visible("a\nb", newlines=False) == "a\\nb"
    assert visible("Grüße, 你好 🚀") == "Grüße, 你好 🚀"


def test_neither_a_response_nor_a_reason_steers_the_terminal_of_rescore() -> None:
    scores = [
        Rescored("g0/0", "g0", 0, "train", 1.0, 0.0),
        Rescored("g0/1", "g0", 0, "train", 1.0, None, "verifier_raised", EVIL),
    ]
    outcome = Outcome(
        "r", "m:f", "m:g", compare(scores, threshold=1.0, group_sizes={"g0": 2}), 0, 0, (), (EVIL,),
        1.0, 1, 0.1, tuple(Change(each, f"prompt {EVIL}", f"response {EVIL}") for each in scores),
    )  # fmt: skip
    out = StringIO()
    show(outcome, Console(file=out, width=200, highlight=False))
    shown = out.getvalue()
    assert shown.replace("\n", "").isprintable()
    assert shown.count("\\x1b[2J\\r[bold]\\x07") == 7


def test_a_record_cannot_steer_the_terminal_of_tail() -> None:
    record = dataclasses.replace(trajectory(admission(0, 0)), error=EVIL, text=EVIL, worker=EVIL)
    line = as_line(Message("r.trajectories", 0, 7, None, 0, {}, record))
    assert line.isprintable() and line.count("\\x1b[2J") == 3
