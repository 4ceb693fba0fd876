"""Consumer lag, measured against a real Kafka."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dora.bus import ClusterSettings, RunTopics, TopicAdmin, topic_plan
from dora.bus.transactions import TransactionalWriter
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.schemas.records import DeadLetter
from dora.telemetry import lag
from dora.telemetry.lag import LagProbe

DEADLINE = 60.0
LAG = "dora_trainer_trajectories_lag_records"


def test_lag_ends_at_the_last_stable_offset(
    settings: ClusterSettings, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lag, "MEASURE_SECONDS", 0.1)
    config = Config.model_validate(
        {
            "run": {"name": run_name, "directory": str(tmp_path)},
            "policy": {"model": "emulated"},
            "task": {"kind": "synthetic"},
            "trainer": {"steps": 3},
            "rollout": {"engine": "emulated"},
        }
    )
    with TopicAdmin(settings) as admin:
        admin.create(topic_plan(config))
    topics = RunTopics(run_name)
    record = DeadLetter(run_name, "code", "reason", "test", 0)
    probe = LagProbe(config, settings, time.monotonic)

    def wait_for(expected: dict[str, float]) -> None:
        until = time.monotonic() + DEADLINE
        found: dict[str, dict[str, float]] = {}
        while found.get(LAG) != expected:
            assert time.monotonic() < until, found
            time.sleep(0.02)
            found = probe.gauges(time.monotonic())
        assert found["dora_trainer_lag_age_seconds"][""] < DEADLINE
        assert found["dora_trainer_journal_lag_records"] == {"": 0.0}

    def send(write: Callable[..., None], count: int) -> None:
        for _ in range(count):
            write(topics.trajectories, record, partition=1)

    try:
        with LogWriter(settings, client_id="test") as writer:
            send(writer.send, 3)
            writer.flush(DEADLINE)
        # versions 0 and 1 have partitions 0 and 1; the trainer has read one record of version 1
        places = {(topics.trajectories, 0): 0, (topics.trajectories, 1): 1, (topics.dispatch, 0): 0}
        probe.position(places, range(2))
        wait_for({"0": 0.0, "1": 2.0})
        with (
            TransactionalWriter(
                settings, f"{run_name}.test", client_id="test", transaction_timeout=60
            ) as transactional,
            transactional.transaction() as transaction,
        ):
            send(transaction.send, 4)
            transaction.flush()
            probe.position(places | {(topics.trajectories, 1): 2}, range(2))
            # only the position has moved: what is not committed yet is no lag
            wait_for({"0": 0.0, "1": 1.0})
        # the transaction's four records and its marker
        wait_for({"0": 0.0, "1": 6.0})
        probe.position({(topics.trajectories, 1): 8, (topics.dispatch, 0): 0}, range(1, 2))
        wait_for({"1": 0.0})
    finally:
        probe.close()
