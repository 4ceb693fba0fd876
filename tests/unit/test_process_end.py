"""How a `dora` process ends: at once, with its exit code, and with all that it said."""

import os
import subprocess
import sys

import pytest

MAIN = """
import atexit, sys, types
from dora.cli import main

class Piece:
    def __del__(self):
        print("taken apart")

def command(**_):
    main.piece = Piece()
    atexit.register(print, "called at the end")
    print("done")
    sys.exit({code})

if {heavy}:
    sys.modules["torch"] = types.ModuleType("torch")
main.cli.main = command
main.main()
"""


@pytest.mark.parametrize("code", [0, 4])
@pytest.mark.parametrize("heavy", [False, True])
def test_a_process_with_torch_is_not_taken_apart_at_its_end(heavy: bool, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", MAIN.format(heavy=heavy, code=code)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = ["done", "called at the end", *([] if heavy else ["taken apart"])]
    assert (ended.returncode, ended.stdout.splitlines(), ended.stderr) == (code, said, "")


def test_a_defect_shows_its_traceback_with_torch_too() -> None:
    text = MAIN.format(heavy=True, code="1 / 0")
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "ZeroDivisionError" in ended.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_that_the_terminal_cannot_show_ends_no_command(encoding: str) -> None:
    text = MAIN.replace('"done"', '"reward \\u2265 \\u00e9 \\U0001f600"').format(
        heavy=False, code=0
    )
    ended = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    shown = ended.stdout.decode(encoding).splitlines()[0]
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert shown.startswith("reward \\u2265 ") and shown.endswith(" \\U0001f600")
