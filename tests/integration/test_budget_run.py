"""A run whose steps end at a budget of tokens: real Kafka and coordinator, emulated workers and
trainer."""

import threading
from pathlib import Path

import pytest

from dora.config import Config
from dora.consumers.audit import audit_run
from dora.consumers.trainer.trainer import Trainer
from dora.schemas.records import Step, Trajectory
from tests.played_trainer import Cluster, check_log, coordinate, running, work

BUDGET = 60
MOST = 6


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def config(config: Config, request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    window = {"max_staleness": 1, "groups_per_step": MOST, "group_size": 2}
    data = config.model_dump(mode="json", exclude_defaults=True)
    data["run"] = {**data["run"], "directory": str(tmp_path)}
    data["kafka"] = {"bootstrap_servers": config.kafka.bootstrap_servers}
    data["policy"] = {"model": str(tmp_path)}  # the cluster puts a vocabulary there
    data["window"] = {**window, "tokens_per_step": BUDGET}
    data["trainer"] = {
        "steps": 6,
        "engine": "emulated",
        "streamed": request.param,
        "batch_timeout_seconds": 30,
        "emulated": {"step_seconds": 2.0},
    }
    data["evaluation"] = {"prompts": 0}
    return Config.model_validate(data)


def test_steps_end_at_the_budget_of_tokens_and_the_log_proves_the_rules(cluster: Cluster) -> None:
    stop = threading.Event()
    with (
        running(coordinate(cluster)),
        running(work(cluster, "w0")),
        running(work(cluster, "w1")),
    ):
        Trainer(cluster.config, cluster.settings).run(stop)
    check_log(cluster)
    report = audit_run(cluster.settings, cluster.config.run.name)
    assert not any(report.violations.values()), report.findings
    assert report.max_staleness <= 1
    steps = [step for step in cluster.all(Step) if isinstance(step, Step)]
    assert [step.version_out for step in steps] == list(range(1, 7))
    sizes = [len(step.trained) for step in steps]
    assert min(sizes) < MOST, "a step ended early"
    tokens = {
        t.trajectory_id: t.generated_tokens
        for t in cluster.all(Trajectory)
        if isinstance(t, Trajectory)
    }
    for step in steps:
        total = step.metrics["tokens"]
        own = [
            sum(tokens[f"{ref.group_id}/{sample.sample}"] for sample in ref.samples)
            for ref in step.trained
        ]
        assert total == sum(own)
        assert total >= BUDGET or len(step.trained) == MOST
