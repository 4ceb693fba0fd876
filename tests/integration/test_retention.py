"""A log of which a part was deleted: refused with what is missing, unless nobody needs it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from dora.bus import ClusterSettings, LogReader, TransactionalWriter
from dora.consumers.monitor.chunk_progress import ChunkProgress, Search
from dora.core import ring
from dora.core.scheduling.prefixes import Prefix
from dora.core.state import RunState
from dora.core.window import Window
from dora.errors import RunError
from dora.log.ledger import read_ledger
from dora.log.retention import check_ledger, check_retention
from dora.producers.coordinator.takeover import Lost, scan
from tests import factories
from tests.integration.test_bad_input import started
from tests.log_writer import RunLogWriter
from tests.small_run import SmallRun, refused
from tests.training_world import trajectory

K, B, G, RING, STEPS = 1, 2, 2, 3, 4
WINDOW = Window(K, B)
DEADLINE = 30.0


@dataclass(frozen=True, slots=True)
class Written:
    """The log of a run that has committed `STEPS` steps; the last two are in no checkpoint."""

    small: SmallRun
    settings: ClusterSettings

    def delete(self, topic: str, partition: int, before: int) -> None:
        """Let the partition begin at `before`, as retention does (DeleteRecords, KIP-107)."""
        admin = AdminClient({"bootstrap.servers": self.settings.bootstrap_servers})
        if topic == self.small.topics.policies:  # Kafka shortens no topic that is only compacted
            change = ConfigResource(
                ConfigResource.Type.TOPIC,
                topic,
                incremental_configs=[
                    ConfigEntry(
                        "cleanup.policy", "delete", incremental_operation=AlterConfigOpType.SET
                    )
                ],
            )
            for future in admin.incremental_alter_configs([change]).values():
                future.result(DEADLINE)
        found = admin.delete_records([TopicPartition(topic, partition, before)])
        for future in found.values():
            assert future.result(DEADLINE).low_watermark == before

    def check(self) -> None:
        """What a trainer does first, with the checkpoint of version 2 at hand."""
        with LogReader(self.settings, client_id="test") as reader:
            check_ledger(reader, self.small.topics)
            state = RunState(WINDOW, G)
            history = read_ledger(reader, self.small.topics, state, {"at-2"}, DEADLINE)
            assert [step.version_in for step in history.redo] == [2, 3]
            check_retention(reader, self.small.topics, history, state.newest, WINDOW)


@pytest.fixture
def written(small: SmallRun, settings: ClusterSettings) -> Written:
    small.make_topics(settings)
    topics, run = small.topics, small.name
    with RunLogWriter(settings, run) as writer:
        writer.send(started(small, settings))
        for version in range(STEPS + 1):
            part = ring.slot(version, RING)
            places = [(topics.trajectories, part), (topics.dispatch, 0), (topics.chunks, part)]
            writer.send(factories.policy(version, run, writer.slots(places)))
            groups = [factories.admission(B * version + n, version, run) for n in range(B)]
            for group in groups:
                writer.send(group)
                for sample in range(G):
                    of = (run, version, group.ordinal, sample)
                    writer.send(trajectory(*of, float(sample)))
            if version < STEPS:
                step = factories.step(version, version, groups, writer.places)
                writer.send(replace(step, checkpoint="at-2" if version == 1 else None))
        last = factories.admission(9, STEPS, run)
        for position in range(3):
            at = {"created_ms": 1_000 + position}
            writer.send(factories.chunk_of(last, 1, position, 2 * position, [1, 2], **at))
    return Written(small, settings)


def test_a_log_that_retention_left_alone_is_complete(written: Written) -> None:
    written.check()


def test_what_nobody_needs_any_more_may_be_deleted(written: Written) -> None:
    topics = written.small.topics
    written.delete(topics.trajectories, 0, 4)  # version 0, trained and in the checkpoint
    written.delete(topics.dispatch, 0, 3 * B)  # admissions before the oldest live version
    written.check()


Case = tuple[Callable[[Written], None], tuple[str, ...]]
CASES: dict[str, Case] = {
    "the ledger's beginning": (
        lambda w: w.delete(w.small.topics.steps, 0, 2),
        (".steps partition 0 begins at offset 2, but offset 0 is needed: the ledger is read",),
    ),
    "the whole ledger": (
        lambda w: w.delete(w.small.topics.steps, 0, STEPS + 1),
        (f".steps partition 0 begins at offset {STEPS + 1}, but offset 0 is needed",),
    ),
    "announcements of live versions": (
        lambda w: w.delete(w.small.topics.policies, 0, STEPS),
        (f".policies does not announce version {STEPS - 1} any more", "cleanup.policy=compact"),
    ),
    "admissions of live versions": (
        lambda w: w.delete(w.small.topics.dispatch, 0, 3 * B + 1),
        (
            f".dispatch partition 0 begins at offset {3 * B + 1}, but offset {3 * B} is needed: "
            "the admissions since version 3 are there",
        ),
    ),
    "a live version's trajectories": (
        lambda w: w.delete(w.small.topics.trajectories, ring.slot(4, RING), 5),
        (
            ".trajectories partition 1 begins at offset 5, but offset 4 is needed: the "
            "trajectories of live version 4 are there",
        ),
    ),
    "trajectories of a step to redo": (
        lambda w: w.delete(w.small.topics.trajectories, ring.slot(2, RING), 1),
        (
            ".trajectories partition 2 begins at offset 1, but offset 0 is needed: "
            "step 2 -> 3, which no checkpoint holds, trained group g4 from there",
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_recovery_needs_and_retention_deleted_is_named(written: Written, case: str) -> None:
    delete, parts = CASES[case]
    delete(written)
    with pytest.raises(RunError) as caught:
        written.check()
    assert caught.value.permanent, "starting again would not help"
    for part in parts:
        assert f"{written.small.name}{part}" in str(caught.value) or part in str(caught.value)


def test_a_trainer_refuses_a_log_without_its_beginning_and_writes_and_ends_nothing(
    written: Written,
) -> None:
    small = written.small
    written.delete(small.topics.steps, 0, STEPS + 1)
    healthy = TransactionalWriter(
        written.settings, f"{small.name}.trainer", client_id="healthy",
        transaction_timeout=30.0, partitions=[(small.topics.workers, 0)],
    )  # fmt: skip
    refused(
        small.dora("train"),
        1,
        f"the log of run {small.name} lacks what it needs to go on: {small.topics.steps} "
        f"partition 0 begins at offset {STEPS + 1}, but offset 0 is needed",
        "kafka.retention_hours must be longer",
    )
    with LogReader(written.settings, client_id="test") as reader:
        place = (small.topics.steps, 0)
        assert reader.end_offsets([place]) == {place: STEPS + 1}
    with healthy.transaction() as transaction:  # which was not ended by the one that was refused
        transaction.send(small.topics.workers, factories.status("trainer", run=small.name), key="t")
    healthy.close()


def test_deleted_chunks_are_missed_by_nobody(written: Written) -> None:
    topic, index = written.small.topics.chunks, ring.slot(STEPS, RING)
    lost = {"g9/1": Lost(STEPS, (topic, index), 0)}
    search = {"g9/1": Search((topic, index), 0)}
    assert scan(written.settings, lost, DEADLINE)["g9/1"].tokens == 6
    written.delete(topic, index, 1)
    written.check()
    assert scan(written.settings, lost, DEADLINE) == {"g9/1": Prefix()}, "it starts over"
    sign = ChunkProgress(written.settings, "test").look(search, DEADLINE)["g9/1"]
    assert (sign.worker, sign.sequence, sign.created_ms) == ("w0", 2, 1_002)
    written.delete(topic, index, 3)
    assert ChunkProgress(written.settings, "test").look(search, DEADLINE) == {}
    written.check()
