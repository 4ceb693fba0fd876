"""A chaos run small enough for every change: twenty faults on every kind of process."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.profiles import PROFILES
from tests.chaos.report import summary

FAULTS = 20
SECONDS = 120.0


def test_nothing_is_lost_whatever_is_killed_or_frozen(tmp_path: Path) -> None:
    findings = Campaign(tmp_path / "run", PROFILES["emulated"], seed=0, faults=FAULTS).run()
    report = findings.to_json()
    told = "\n".join(summary(report))
    assert findings.passed, f"{told}\n{json.dumps(report['list'])}"
    assert sum(report["faults"].values()) == FAULTS, told
    assert set(report["violations"].values()) == {0}, told
    assert report["conserved"], told
    assert report["redo_identical"], told
    assert processes_of(tmp_path) == []
    shutil.rmtree(tmp_path / "run")


def processes_of(directory: Path) -> list[str]:
    """What runs with the directory in its command line or as its own."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if any(str(directory) in text for text in (*words, process.cwd())):
                found.append(" ".join(words))
        except psutil.Error:
            continue  # it is gone
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_runs_on_when_a_chaos_run_is_interrupted(
    tmp_path: Path, number: signal.Signals
) -> None:
    directory = tmp_path / "run"
    command = [sys.executable, "-m", "tests.chaos", "--directory", str(directory), "--faults=5"]
    chaos = subprocess.Popen(
        [*command, f"--report={tmp_path / 'report.json'}"],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        # harness, nursery, broker, and what the nursery has started
        await_count(directory, 3 + len(PROFILES["emulated"].workers) + 2, chaos)
        chaos.send_signal(number)
        code = chaos.wait(SECONDS)
        assert code == (130 if number == signal.SIGINT else -signal.SIGKILL)
        await_count(directory, 0, chaos)
    finally:
        chaos.kill()
        chaos.wait()


def await_count(directory: Path, count: int, chaos: "subprocess.Popen[bytes]") -> None:
    """Wait until `count` processes or more belong to the directory; for 0, until none does."""
    deadline = time.monotonic() + SECONDS
    while len(found := processes_of(directory)) < count or (found and count == 0):
        assert time.monotonic() < deadline, found
        assert count == 0 or chaos.poll() is None, "the chaos run has ended"
        time.sleep(0.1)
