"""The queries of docs/export.md, run as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exports import export
from tests.written_run import WrittenRun

PAGE = Path(__file__).resolve().parents[2] / "docs" / "export.md"
QUERIES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
SECONDS = 120.0


@pytest.fixture(scope="module")
def directory(written: WrittenRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page exports, of a small run."""
    made = tmp_path_factory.mktemp("queries")
    for to, name in (("parquet", "trajectories"), ("jsonl", "lines")):
        assert export(written, made / name, to=to).exit_code == 0
    return made


def test_every_query_of_the_page_runs_and_finds_the_run(directory: Path) -> None:
    assert len(QUERIES) == PAGE.read_text("utf-8").count("```python") >= 7
    script = "\n".join(f"{query}\nprint('=' * 9)" for query in QUERIES)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=directory, capture_output=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr.decode()
    rewards, surprise, best, steps, tokens, lines, source, _ = done.stdout.decode().split("=" * 9)
    assert re.search(r"│ +1 │ +4 │ +0\.525 │ +6\.0 │ +1 │", rewards), rewards
    assert "below_1_percent" in surprise and surprise.count("│") > 20
    assert re.findall(r"text of (\S+)", best) == ["g4/1", "g5/1"], best
    assert "shape: (4, 4)" in steps and "0.53 " in steps, steps
    assert "shape: (3, 3)" in tokens, tokens
    assert "length" in lines and "stop" in lines
    assert source.strip().endswith("{'2': [0, 6]}")
