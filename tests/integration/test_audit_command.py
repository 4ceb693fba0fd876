"""`dora audit` over a real Kafka: committed records only, running runs too, and exit codes."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
from click.testing import CliRunner, Result

from dora.bus import (
    ClusterSettings,
    LogWriter,
    RunTopics,
    TopicAdmin,
    TransactionalWriter,
    topic_plan,
)
from dora.cli.main import cli
from dora.config import Config
from dora.consumers.audit import audit_run
from dora.core import ring
from dora.errors import RunError, TopicError
from dora.schemas.records import Policy, RunStarted, Step
from tests.damaged_log import LANES, RING, B, G, K, Log, clean_log, policy

DEADLINE = 30.0


class StopTraining(Exception):
    """The trainer dies within a transaction."""


@pytest.fixture
def topics(settings: ClusterSettings, run_name: str) -> RunTopics:
    config = Config.model_validate(
        {
            "run": {"name": run_name},
            "kafka": {"lanes": LANES},
            "policy": {"model": "model"},
            "task": {"kind": "reasoning-gym", "name": "spell_backward"},
            "trainer": {"steps": 2},
            "window": {"max_staleness": K, "groups_per_step": B, "group_size": G},
        }
    )
    with TopicAdmin(settings) as admin:
        admin.create(topic_plan(config))
    return RunTopics(run_name)


@pytest.fixture
def trainer(settings: ClusterSettings, topics: RunTopics) -> Iterator[TransactionalWriter]:
    with TransactionalWriter(
        settings, f"{topics.run}.trainer", client_id="test", transaction_timeout=DEADLINE
    ) as writer:
        yield writer


def write(
    log: Log, settings: ClusterSettings, topics: RunTopics, trainer: TransactionalWriter
) -> None:
    """Write the log as a run does: data as they come, versions and steps in transactions."""
    with LogWriter(settings, client_id="test") as writer:
        for partition, records in log.trajectories.items():
            for _, record in records:
                writer.send(topics.trajectories, record, partition=partition)
        for chunk in log.chunks:
            partition = ring.partition(chunk.policy_version, chunk.group_id, RING, LANES)
            writer.send(topics.chunks, chunk, partition=partition)
        for admission in log.journal:
            writer.send(topics.dispatch, admission, partition=0)
        writer.flush(DEADLINE)
    for entry, published in zip(log.ledger, log.policies, strict=True):
        commit(trainer, topics, entry, published)


def commit(
    trainer: TransactionalWriter, topics: RunTopics, entry: RunStarted | Step, published: Policy
) -> None:
    with trainer.transaction() as transaction:
        transaction.send(topics.steps, entry, partition=0)
        transaction.send(topics.policies, published, key=str(published.version), partition=0)


def invoke(settings: ClusterSettings, run: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["audit", run, "-b", settings.bootstrap_servers, *arguments])


def test_a_clean_run_is_proved(
    settings: ClusterSettings, topics: RunTopics, trainer: TransactionalWriter
) -> None:
    write(clean_log(stride=1), settings, topics, trainer)
    result = invoke(settings, topics.run, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["steps"] == 2
    assert report["groups_trained"] == 4
    assert report["groups_outstanding"] == 2
    assert report["max_staleness"] == 1
    assert set(report["violations"].values()) == {0}
    people = invoke(settings, topics.run)
    assert people.exit_code == 0
    assert "every rule was kept" in people.output


def test_a_violation_ends_with_exit_code_1_and_a_sentence(
    settings: ClusterSettings, topics: RunTopics, trainer: TransactionalWriter
) -> None:
    log = clean_log(stride=1)
    write(log, settings, topics, trainer)
    forged = replace(log.step(2), sequence=2, version_in=2, version_out=3)
    commit(trainer, topics, forged, replace(policy(3), weights_checksum="sum2"))
    result = invoke(settings, topics.run, "--json")
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert report["violations"]["duplicated"] == B
    twice = [each for each in report["findings"] if each["kind"] == "duplicated"]
    assert [each["ids"] for each in twice] == [["g2"], ["g3"]]
    assert twice[0]["offsets"][1]["topic"] == topics.steps
    people = invoke(settings, topics.run)
    assert people.exit_code == 1
    assert "duplicated: group g2 is trained by ledger entry 2" in " ".join(people.output.split())


def test_an_aborted_step_never_happened(
    settings: ClusterSettings, topics: RunTopics, trainer: TransactionalWriter
) -> None:
    log = clean_log(stride=1)
    last = log.ledger.pop(), log.policies.pop()
    write(log, settings, topics, trainer)
    with suppress(StopTraining), trainer.transaction() as transaction:
        transaction.send(topics.steps, last[0], partition=0)
        transaction.send(topics.policies, last[1], key="2", partition=0)
        raise StopTraining
    report = audit_run(settings, topics.run, deadline=DEADLINE)
    assert not report.violated, report.findings
    assert report.steps == 1
    commit(trainer, topics, last[0], last[1])
    report = audit_run(settings, topics.run, deadline=DEADLINE)
    assert not report.violated, report.findings
    assert report.steps == 2


def test_a_trajectory_that_is_not_there_is_lost(
    settings: ClusterSettings, topics: RunTopics, trainer: TransactionalWriter
) -> None:
    log = clean_log(stride=1)
    partition = log.step(1).trained[0].samples[0].partition
    dropped = log.trajectories[partition].pop()
    write(log, settings, topics, trainer)
    report = audit_run(settings, topics.run, deadline=DEADLINE)
    assert report.violations["lost"] == 1
    assert dropped[1].trajectory_id in report.findings[0].ids


def test_a_run_that_has_not_started_is_told(settings: ClusterSettings, topics: RunTopics) -> None:
    with pytest.raises(RunError, match="has not started"):
        audit_run(settings, topics.run, deadline=DEADLINE)


def test_an_unknown_run_is_told(settings: ClusterSettings, topics: RunTopics) -> None:
    with pytest.raises(TopicError, match="no run"):
        audit_run(settings, topics.run + "x", deadline=DEADLINE)
