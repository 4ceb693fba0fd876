"""Runs of which a part stands still: status says which and why, and the run goes on."""

import json
import time
from typing import Any

import pytest

from dora.bus import LogWriter
from dora.config import Config
from dora.schemas.records import Chunk, Command, Status, Trajectory
from tests.factories import status
from tests.part_processes import coordinator_process, freeze, thaw, worker_process
from tests.played_trainer import Cluster, check_log, coordinate, running, work
from tests.small_run import SmallRun, dora


@pytest.fixture
def config(kafka: Any, run_name: str) -> Config:
    """One step of four groups; a trajectory takes about two seconds."""
    return Config.model_validate(
        {
            "run": {"name": run_name},
            "policy": {"model": "none"},
            "task": {"kind": "reasoning-gym", "name": "spell_backward", "max_prompt_tokens": 8},
            "window": {"max_staleness": 1, "groups_per_step": 4, "group_size": 2},
            "trainer": {"steps": 1},
            "rollout": {
                "engine": "emulated",
                "capacity": 8,
                "max_new_tokens": 32,
                "chunk_tokens": 2,
                "heartbeat_seconds": 0.2,
                "heartbeat_timeout_seconds": 3.0,
                "emulated": {
                    "time_scale": 4,
                    "length": "fixed",
                    "length_mean": 20,
                    "load_seconds": 0.01,
                },
            },
            "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
        }
    )


def look(cluster: Cluster, *options: str) -> dict[str, Any]:
    """What `dora status --json` says."""
    address = cluster.settings.bootstrap_servers
    result = dora("status", cluster.config.run.name, "-b", address, "--json", *options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def trained(cluster: Cluster, state: str) -> None:
    """The trainer's word."""
    with LogWriter(cluster.settings, client_id="trainer") as writer:
        word = status(
            "trainer",
            state,
            run=cluster.config.run.name,
            at=time.time_ns() // 1_000_000,
            metrics={"steps_target": float(cluster.config.trainer.steps)},
        )
        writer.send(cluster.topics.workers, word, key="trainer")


def test_a_frozen_worker_is_named_its_work_is_taken_over_and_its_late_records_are_ignored(
    cluster: Cluster,
) -> None:
    """A worker that silently never returns; later it does return, as a zombie."""

    def begun() -> list[Chunk]:
        return [c for c in cluster.all(Chunk) if isinstance(c, Chunk) and c.sequence > 0]

    def finished(worker: str) -> list[Trajectory]:
        found = [t for t in cluster.all(Trajectory) if isinstance(t, Trajectory)]
        return [t for t in found if t.worker == worker]

    cluster.begin()
    trained(cluster, "waiting")
    with running(coordinate(cluster)), worker_process(cluster, "w0") as frozen:
        cluster.until(lambda: len({c.trajectory_id for c in begun()}) == 8, "chunks of w0")
        freeze(frozen)
        cluster.read(to_end=True)
        assert finished("w0") == []
        silent: list[dict[str, Any]] = []
        deadline = time.monotonic() + 2.5  # sooner than the coordinator gives the worker up
        while not silent:
            assert time.monotonic() < deadline, look(cluster, "--heartbeat-timeout", "0.5")
            found = look(cluster, "--heartbeat-timeout", "0.5")
            silent = [wait for wait in found["waits"] if wait["state"] == "silent"]
        assert (found["health"], found["waiting_for"]) == ("stalled", 8)
        wait = silent[0]
        assert (wait["version"], wait["group"], wait["worker"]) == (0, "g0", "w0")
        assert 0 < wait["seconds_without_chunk"] < 10
        head = f"version 0 waits for group g0, sample {wait['sample']}, on worker w0, silent for "
        assert wait["text"].startswith(head)
        assert wait["text"] in found["reasons"]
        with running(work(cluster, "w1")):
            cluster.until(lambda: len(cluster.state.complete_groups()) == 4, "all groups")
            resumed = [t for t in finished("w1") if t.resumed_tokens]
            assert len(resumed) == 8, "every trajectory goes on from its chunks"
            thaw(frozen)
            cluster.until(lambda: len(finished("w0")) == 8, "the zombie's records")
            assert cluster.state.counters.duplicates == 8
            cluster.train_step()
            cluster.until(
                lambda: (
                    {s.process for s in cluster.all(Status) if s.state == "stopped"}
                    >= {"w0", "w1", "coordinator"}
                ),
                "everybody to stop",
            )
    trained(cluster, "stopped")
    check_log(cluster)
    found = look(cluster)
    assert (found["health"], found["groups_trained"]) == ("complete", 4)
    assert found["duplicates"] + found["late"] == 8, "ignored, and counted"


def test_the_trainer_ending_first_strands_no_worker(cluster: Cluster) -> None:
    """The last step is committed while the coordinator is dead: the workers wait, status says for
    whom, and the next coordinator ends them."""
    cluster.begin()
    with running(work(cluster, "w0")):
        with coordinator_process(cluster):
            cluster.until(
                lambda: sum(c.kind == "start" for c in cluster.all(Command)) == 8, "all starts"
            )  # and it is killed
        cluster.until(lambda: len(cluster.state.complete_groups()) == 4, "the last batch")
        cluster.train_step()
        trained(cluster, "stopped")
        found = look(cluster, "--heartbeat-timeout", "1")
        while found["processes"][1]["age_seconds"] < 1:
            found = look(cluster, "--heartbeat-timeout", "1")
        assert (found["health"], found["reasons"]) == (
            "complete",
            [
                "w0 still waits for commands and no coordinator lives: the next "
                "`dora coordinator` tells it to stop"
            ],
        )
        with running(coordinate(cluster)):
            cluster.until(
                lambda: (
                    {s.process for s in cluster.all(Status) if s.state == "stopped"}
                    >= {"w0", "coordinator"}
                ),
                "everybody to stop",
            )
    found = look(cluster)
    assert (found["health"], found["reasons"]) == ("complete", [])


def test_a_part_of_dora_run_that_freezes_is_killed_and_the_run_goes_on(small: SmallRun) -> None:
    """The trainer freezes inside the transaction of its second step."""
    small.emulate_training()
    small.replace("heartbeat_timeout_seconds = 5", "heartbeat_timeout_seconds = 1.5")
    result = small.dora(
        "run",
        "--plain",
        "--set=trainer.steps=3",
        "--set=kafka.request_timeout_seconds=2",
        "--set=rollout.load_timeout_seconds=60",
        env={"DORA_FAULT": "trainer.inside_transaction:freeze:3", "OMP_NUM_THREADS": "1"},
    )
    assert result.exit_code == 0, result.output
    assert "trainer is killed: it has been silent for" in result.output
    assert "trainer ended with signal SIGKILL; starts again" in result.output
    assert "audit: no violation" in result.output
