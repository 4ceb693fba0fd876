"""`dora audit` over a real Kafka: committed records only, running runs too, and exit codes."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest

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
from dora.errors import RunError, TopicError
from dora.schemas.records import DeadLetter, Policy, RunStarted, Step
from tests import forgeries
from tests.damaged_log import LANES, Log, finished_log, live_log
from tests.factories import B, G, K, policy
from tests.forgeries import Forgery, in_order, told

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


FILLER = DeadLetter("r", "filler", "takes the place of a record that is not there", "test", 0)


def write(
    log: Log, settings: ClusterSettings, topics: RunTopics, trainer: TransactionalWriter
) -> None:
    """Write the log as a run does, at the very offsets that it says: data as they come, versions
    and steps in transactions."""
    with LogWriter(settings, client_id="test") as writer:
        for partition, records in log.trajectories.items():
            for offset in range(max(records, default=-1) + 1):
                record = records.get(offset, FILLER)
                writer.send(topics.trajectories, record, partition=partition)
        for chunk, place in zip(log.chunks, log.chunk_places(), strict=True):
            writer.send(topics.chunks, chunk, partition=place.partition)
        for admission in log.journal:
            writer.send(topics.dispatch, admission, partition=0)
        writer.flush(DEADLINE)
    for entry, published in zip_longest(log.ledger, log.policies):
        commit(trainer, topics, entry, published)


def commit(
    trainer: TransactionalWriter,
    topics: RunTopics,
    entry: RunStarted | Step | None,
    published: Policy | None,
) -> None:
    with trainer.transaction() as transaction:
        if entry is not None:
            transaction.send(topics.steps, entry, partition=0)
        if published is not None:
            key = str(published.version)
            transaction.send(topics.policies, published, key=key, partition=0)


def invoke(settings: ClusterSettings, run: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["audit", run, "-b", settings.bootstrap_servers, *arguments])


def test_a_clean_run_is_proved(
    settings: ClusterSettings, topics: RunTopics, trainer: TransactionalWriter
) -> None:
    write(live_log(), settings, topics, trainer)
    result = invoke(settings, topics.run, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["steps"] == 2
    assert report["groups_trained"] == 4
    assert report["groups_outstanding"] == 2
    assert report["max_staleness"] == 1
    assert report["conserved"] is True
    assert set(report["violations"].values()) == {0}
    people = invoke(settings, topics.run)
    assert people.exit_code == 0
    assert "every rule was kept" in people.output
    assert "conserved: started = trained + set aside + outstanding" in " ".join(
        people.output.split()
    )


def test_a_violation_ends_with_exit_code_1_and_a_sentence(
    settings: ClusterSettings, topics: RunTopics, trainer: TransactionalWriter
) -> None:
    log = live_log()
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
    log = live_log()
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


@pytest.mark.parametrize(
    ("forge", "made"),
    [
        (forgeries.a_group_left_behind, live_log),
        (forgeries.a_named_trajectory_missing, finished_log),
        (forgeries.the_first_chunk_missing, live_log),
        (forgeries.resumed_with_other_tokens, finished_log),
        (forgeries.trained_by_two_steps, live_log),
        (forgeries.a_chunk_written_twice, finished_log),
        (forgeries.a_chunk_of_another_version_that_does_not_count, live_log),
        (forgeries.another_version_in_the_ledger, finished_log),
        (forgeries.trained_before_its_version, live_log),
        (forgeries.trained_without_a_sample, finished_log),
        (forgeries.a_gap_in_the_ledger, live_log),
        (forgeries.trained_on_a_later_record, finished_log),
        (forgeries.other_weights_than_the_policy, live_log),
    ],
    ids=lambda value: value.__name__,
)
def test_a_forged_log_is_found_out_with_its_offsets(
    settings: ClusterSettings,
    topics: RunTopics,
    trainer: TransactionalWriter,
    forge: Forgery,
    made: Callable[[], Log],
) -> None:
    log = made()
    expected = [
        (
            kind,
            ids,
            tuple(replace(p, topic=p.topic.replace("r.", f"{topics.run}.")) for p in places),
        )
        for kind, ids, places in forge(log)
    ]
    write(log, settings, topics, trainer)
    report = audit_run(settings, topics.run, deadline=DEADLINE)
    assert told(report.findings) == in_order(expected), report.findings


def test_a_run_that_has_not_started_is_told(settings: ClusterSettings, topics: RunTopics) -> None:
    with pytest.raises(RunError, match="has not started"):
        audit_run(settings, topics.run, deadline=DEADLINE)


def test_an_unknown_run_is_told(settings: ClusterSettings, topics: RunTopics) -> None:
    with pytest.raises(TopicError, match="no run"):
        audit_run(settings, topics.run + "x", deadline=DEADLINE)
