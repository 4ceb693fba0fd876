"""A written run exported by the command line, and what readers then see."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from click.testing import Result

from dora.bus import BEGINNING, LogReader
from dora.faults import VARIABLE
from dora.schemas.records import DeadLetter
from tests.small_run import dora
from tests.written_run import DEADLINE, WrittenRun

CLOSED = (0, 1, 2)
"""Of version 3, the last one, groups are outstanding."""
FORMATS = ("parquet", "jsonl")


@pytest.fixture(scope="session")
def exported(written: WrittenRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It as Parquet. Do not change it."""
    directory = tmp_path_factory.mktemp("exported") / "rows"
    assert export(written, directory).exit_code == 0
    return directory


def command(written: WrittenRun, directory: Path, to: str, *options: str) -> list[str]:
    address = written.settings.bootstrap_servers
    return ["export", written.run, "--to", to, str(directory), "-b", address, *options]


def export(written: WrittenRun, directory: Path, *options: str, to: str = "parquet") -> Result:
    return dora(*command(written, directory, to, *options))


def kill(written: WrittenRun, directory: Path, fault: str, *, to: str = "parquet") -> None:
    """The command as a process that is killed (SIGKILL) at a point."""
    killed = subprocess.run(
        [sys.executable, "-m", "dora", *command(written, directory, to)],
        env={**os.environ, VARIABLE: fault},
        capture_output=True,
        timeout=4 * DEADLINE,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr


def summary(result: Result) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def rows(directory: Path) -> list[dict[str, Any]]:
    """All rows, sorted, as readers of the directory see them."""
    files = sorted(directory.glob("version=*/trajectories.jsonl"))
    if files:
        found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    else:
        found = ds.dataset(directory, partitioning="hive").to_table().to_pylist()
        for row in found:
            row["reward_parts"] = dict(row["reward_parts"])
            for name in ("started_at", "generated_at", "created_at"):
                row[name] = row[name].isoformat()
    return sorted(found, key=lambda row: (row["version"], row["ordinal"], row["trajectory_id"]))


def visible(directory: Path) -> list[str]:
    return sorted(p.relative_to(directory).as_posix() for p in directory.glob("*/[!._]*"))


def dead_letters(written: WrittenRun) -> list[DeadLetter]:
    with LogReader(written.settings, client_id="test") as reader:
        reader.assign({(written.topics.dead_letters, 0): BEGINNING})
        found = [message.value for message in reader.read_to_end(DEADLINE)]
    return [value for value in found if isinstance(value, DeadLetter)]
