"""Many emulated workers in one process, with the emulated trainer: whole runs over real Kafka."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dora.bus import ClusterSettings, RunTopics
from dora.consumers.audit import audit_run
from dora.errors import DoraError
from dora.schemas.records import Status
from dora.simulation.device import emulation_warning
from tests.processes import statuses
from tests.small_run import dora

CONFIG = """\
[run]
name = "{run}"
directory = "{directory}/runs"

[policy]
model = "emulated"

[task]
kind = "synthetic"
synthetic_prompt_tokens = 32
held_out_fraction = 0.0

[window]
max_staleness = 2
groups_per_step = 12
group_size = 4

[rollout]
workers = 8
workers_per_process = 5
engine = "emulated"
capacity = 8
max_new_tokens = 2000
chunk_tokens = 64
heartbeat_seconds = 0.3
heartbeat_timeout_seconds = 3

[rollout.emulated]
length_mean = 300
load_seconds = 1.0
time_scale = 0.02
speeds = [1.0, 0.5]

[trainer]
steps = 4
engine = "emulated"
streamed = true

[trainer.emulated]
step_seconds = 5.0
publish_seconds = 0.5
"""


def write(tmp_path: Path, run: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(run=run, directory=tmp_path))
    return path


def worker_statuses(settings: ClusterSettings, run: str) -> list[Status]:
    return [s for s in statuses(settings, RunTopics(run).workers) if s.role == "rollout"]


def test_eight_workers_in_two_processes_of_which_one_is_killed_make_a_sound_run(
    run_name: str, settings: ClusterSettings, tmp_path: Path
) -> None:
    path, address = write(tmp_path, run_name), settings.bootstrap_servers
    log = tmp_path / "run.log"
    with log.open("wb") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "dora", "run", str(path), "--plain", "-b", address],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        victim = pid_at_work(settings, run_name, "w5", log)
        os.kill(victim, signal.SIGKILL)
        assert run.wait(120) == 0, log.read_text()
    finally:
        run.kill()
        run.wait()
    for name, started in (("w0", True), ("w5", True), ("w1", False)):
        assert (f"{name} started" in log.read_text()) == started, log.read_text()
    report = audit_run(settings, run_name)
    assert not any(report.violations.values()), report
    assert report.groups_trained == 48
    last = {status.process: status for status in worker_statuses(settings, run_name)}
    assert sorted(last) == [f"w{number}" for number in range(8)]
    assert {status.state for status in last.values()} == {"stopped"}
    assert len({status.incarnation for status in last.values()}) == 8
    assert len({status.pid for status in last.values()} | {victim}) == 3
    assert all(last[f"w{number}"].metrics["tokens_total"] > 0 for number in range(5))
    shown = dora("status", run_name, "-b", address, "--json")
    assert json.loads(shown.stdout)["emulation_late_share"] >= 0


def pid_at_work(settings: ClusterSettings, run: str, worker: str, log: Path) -> int:
    """Process id of a worker, once it generates."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for status in _worker_statuses(settings, run):
            if status.process == worker and status.running:
                return status.pid
        time.sleep(0.2)
    raise AssertionError(log.read_text())


def _worker_statuses(settings: ClusterSettings, run: str) -> list[Status]:
    """None before the topics are there."""
    try:
        return worker_statuses(settings, run)
    except DoraError:
        return []


@pytest.mark.parametrize(("share", "warned"), [(None, False), (0.05, False), (0.06, True)])
def test_emulation_that_does_not_keep_up_is_told(share: float | None, warned: bool) -> None:
    assert (emulation_warning(share) is not None) == warned
