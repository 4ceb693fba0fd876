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
from dora.core.emulation_check import emulation_warning
from dora.errors import DoraError
from dora.schemas.records import Status
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
max_staleness = {staleness}
groups_per_step = 12
group_size = 4

[rollout]
workers = 8
workers_per_process = {shared}
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
steps = {steps}
engine = "emulated"
streamed = {streamed}

[trainer.emulated]
step_seconds = 5.0
publish_seconds = 0.5
"""


def write(tmp_path: Path, run: str, **values: object) -> Path:
    path = tmp_path / "run.toml"
    defaults = {"staleness": 1, "shared": 8, "steps": 4, "streamed": "false"}
    path.write_text(CONFIG.format(run=run, directory=tmp_path, **defaults | values))
    return path


def worker_statuses(settings: ClusterSettings, run: str) -> list[Status]:
    return [s for s in statuses(settings, RunTopics(run).workers) if s.role == "rollout"]


def test_eight_workers_in_two_processes_make_a_run_that_passes_the_audit(
    run_name: str, settings: ClusterSettings, tmp_path: Path
) -> None:
    path = write(tmp_path, run_name, shared=5, staleness=2, streamed="true")
    result = dora("run", str(path), "-b", settings.bootstrap_servers, "--plain")
    assert result.exit_code == 0, result.output
    assert "w0 started" in result.output
    assert "w5 started" in result.output
    assert "w1 started" not in result.output
    report = audit_run(settings, run_name)
    assert not any(report.violations.values()), report
    assert report.groups_trained == 48
    last = {status.process: status for status in worker_statuses(settings, run_name)}
    assert sorted(last) == [f"w{number}" for number in range(8)]
    assert {status.state for status in last.values()} == {"stopped"}
    assert len({status.incarnation for status in last.values()}) == 8
    assert len({status.pid for status in last.values()}) == 2
    assert all(s.metrics["tokens_total"] > 0 for s in last.values())
    assert "emulation_late_share" in last["w0"].metrics
    shown = dora("status", run_name, "-b", settings.bootstrap_servers, "--json")
    assert json.loads(shown.stdout)["emulation_late_share"] >= 0


def test_a_killed_process_of_many_workers_is_recovered_like_any(
    run_name: str, settings: ClusterSettings, tmp_path: Path
) -> None:
    path, address = write(tmp_path, run_name, shared=4, steps=4), settings.bootstrap_servers
    with (tmp_path / "run.log").open("wb") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", "dora", "run", str(path), "--plain", "-b", address],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 60
        victim = 0
        while not victim:
            assert time.monotonic() < deadline, (tmp_path / "run.log").read_text()
            victim = next(
                (
                    status.pid
                    for status in _worker_statuses(settings, run_name)
                    if status.process == "w4" and status.running
                ),
                0,
            )
        os.kill(victim, signal.SIGKILL)
        assert run.wait(120) == 0, (tmp_path / "run.log").read_text()
    finally:
        run.kill()
        run.wait()
    report = audit_run(settings, run_name)
    assert not any(report.violations.values()), report
    assert report.groups_trained == 48
    last = {status.process: status for status in worker_statuses(settings, run_name)}
    assert {status.state for status in last.values()} == {"stopped"}
    assert last["w7"].pid != victim


def _worker_statuses(settings: ClusterSettings, run: str) -> list[Status]:
    """None before the topics are there."""
    try:
        return worker_statuses(settings, run)
    except DoraError:
        return []


@pytest.mark.parametrize(("share", "warned"), [(None, False), (0.05, False), (0.06, True)])
def test_emulation_that_does_not_keep_up_is_told(share: float | None, warned: bool) -> None:
    assert (emulation_warning(share) is not None) == warned
