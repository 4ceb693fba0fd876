"""Processes that meet others of their kind, and a cluster that goes away."""

import os
import signal
import threading
import time
from pathlib import Path

from dora.broker.local import running_broker, start_broker, stop_broker
from dora.bus import ClusterSettings, LogWriter, cluster_settings
from dora.config import KafkaSection
from dora.consumers.monitor.monitor import RunMonitor
from tests.factories import policy, status
from tests.integration.test_bad_input import started
from tests.processes import DEADLINE, Process, process, statuses, until
from tests.small_run import SmallRun, dora, refused

OUTAGE_SECONDS = 20.0


def test_a_second_worker_with_the_same_id_is_refused_with_host_and_pid(
    small: SmallRun, settings: ClusterSettings
) -> None:
    small.make_topics(settings)
    with process(small, "first", "rollout", "--worker-id", "w0") as first:
        until(lambda: statuses(settings, small.topics.workers), "the first worker", first)
        (host,) = {each.host for each in statuses(settings, small.topics.workers)}
        refused(
            small.dora("rollout", "--worker-id", "w0"),
            1,
            f"worker id w0 is in use by process {first.process.pid} on {host}",
            "--worker-id",
        )
        assert first.process.poll() is None, "the first one works on"
    assert first.process.returncode == 0, first.said


def test_of_two_coordinators_the_first_ends_and_says_that_another_took_over(
    small: SmallRun, settings: ClusterSettings
) -> None:
    small.make_topics(settings)
    with LogWriter(settings, client_id="test") as writer:
        record = started(small, settings)
        writer.send(small.topics.steps, record, key=small.name, partition=0)
        writer.send(small.topics.policies, policy(0, small.name), key="0", partition=0)
    with process(small, "first", "coordinator") as first:
        until(lambda: "rebuilt from the log" in first.said, "the first coordinator", first)
        with process(small, "second", "coordinator") as second:
            until(lambda: "rebuilt from the log" in second.said, "the second one", second)
            with LogWriter(settings, client_id="test") as writer:
                idle = status("w0", run=small.name, version=-1, capacity=8)  # something to decide
                writer.send(small.topics.workers, idle, key="w0")
            until(lambda: first.process.poll() is not None, "the first to end", first)
            assert first.process.returncode == 4, first.said
            assert "error: another process took over while" in first.said
            assert "this process must stop" in first.said
            assert "Traceback" not in first.said
            assert second.process.poll() is None, second.said
    assert second.process.returncode == 0, second.said


def test_a_second_dora_run_of_the_same_run_is_refused(
    small: SmallRun, settings: ClusterSettings
) -> None:
    from filelock import FileLock

    directory = small.directory / "runs" / small.name
    directory.mkdir(parents=True)
    with FileLock(directory / "run.lock"):
        refused(
            small.dora("run"),
            4,
            f"another `dora run` of {small.name} is active on this machine",
            f"dora status {small.name} --watch",
        )


def test_a_run_whose_part_cannot_run_ends_at_once_with_the_reason(small: SmallRun) -> None:
    small.emulate_training()
    small.data.write_text('{"prompt": "sun", "answer": "nus"}\n{"prompt": "mo\n')
    began = time.monotonic()
    result = small.dora("run", "--plain")
    refused(
        result,
        1,
        "w0 cannot run as things are, and starting it again would not help",
        "words.jsonl, line 2: not JSON",
        "the run is safe in its log and goes on with: dora run",
    )
    assert "restart 1" not in result.output
    assert time.monotonic() - began < DEADLINE


def test_a_run_waits_for_a_cluster_that_is_away_for_twenty_seconds_and_goes_on(
    run_name: str, small_model: Path, tmp_path: Path
) -> None:
    home = tmp_path / "broker"
    broker = start_broker(home, heap_mb=256)
    child: Process | None = None
    try:
        run = SmallRun(run_name, tmp_path, small_model, broker.bootstrap_servers)
        run.emulate_training()
        run.replace("steps = 2", "steps = 4")
        run.replace("time_scale = 0.05", "time_scale = 1.5")
        child = Process(
            tmp_path / "run.log", "run", str(run.path), "-b", broker.bootstrap_servers, "--plain"
        )
        steps_when_it_went = follow(broker.bootstrap_servers, run_name, 2, child)
        os.kill(broker.pid, signal.SIGKILL)
        threading.Event().wait(OUTAGE_SECONDS)
        assert child.process.poll() is None, child.said
        again = start_broker(home, heap_mb=256)
        assert again.bootstrap_servers == broker.bootstrap_servers
        assert child.process.wait(120) == 0, child.said
        assert steps_when_it_went < 4, "the cluster went away in the middle"
        assert "audit: no violation" in child.said
        audit = dora("audit", run_name, "-b", broker.bootstrap_servers)
        assert audit.exit_code == 0 and "no violation" in audit.stdout
    finally:
        if child is not None:
            child.end()
        if running_broker(home) is not None:
            stop_broker(home, force=True)


def follow(address: str, run: str, steps: int, child: Process) -> int:
    """Wait until the run has committed `steps`; the number of those that it has."""
    settings = cluster_settings(KafkaSection(bootstrap_servers=address))
    until(lambda: "trainer started" in child.said, "the processes to start", child)
    monitor = RunMonitor(settings, run)
    try:
        monitor.catch_up(DEADLINE)
        until(lambda: monitor.poll() + 1 and monitor.snapshot().step >= steps, "steps", child)
        return monitor.snapshot().step
    finally:
        monitor.close()
