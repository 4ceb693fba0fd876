"""Trajectories in an Iceberg table by way of a real Kafka Connect, which is killed while it sinks,
and records that are not trajectories."""

import re
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient

from dora.bus import ClusterSettings, cluster_settings
from dora.config import KafkaSection
from dora.config.kafka import RegistrySection
from dora.schemas.codec import decode, encode
from dora.schemas.records import Admission, DeadLetter, Record, Trajectory, unpack_tokens
from tests import written_run
from tests.brokers import Cluster
from tests.connect_worker import ROOT, ConnectWorker, Lake, connector, make_topic
from tests.raw_log import raw_messages
from tests.schema_registry import Registry
from tests.waiting import until

pytestmark = pytest.mark.timeout(900)

PARTITIONS = 3
BATCH = 30
DEADLINE = 240.0
TRAJECTORIES, ARCHIVE = "dora.trajectories", "dora.archive"
QUICK = {
    "iceberg.control.commit.interval-ms": "1000",
    "iceberg.control.commit.timeout-ms": "5000",
}
UNKNOWN_ID = b"\x00\x7f\xff\xff\xf0"

Place = tuple[int, int]
"""Partition and offset."""


@dataclass(frozen=True, slots=True)
class Sunk:
    """What was written, and where it went."""

    lake: Lake
    written: dict[Place, Trajectory]
    foreign: dict[str, bytes]
    letters: list[Message]
    archived: dict[tuple[str, int, int], Record]
    killed_at: int
    """Rows in the table when the worker was killed."""


class TrajectoryWriter:
    """Writes trajectories under the registry's ids and remembers where each of them is."""

    def __init__(self, settings: ClusterSettings, run: str) -> None:
        assert settings.registry is not None
        self.topic = f"{run}.trajectories"
        self.written: dict[Place, Trajectory] = {}
        self.framing = settings.registry.prepare()
        self._run = run
        self._producer = Producer({"bootstrap.servers": settings.bootstrap_servers})

    def trajectories(self, count: int) -> None:
        """Write the next ones."""
        for ordinal in range(len(self.written), len(self.written) + count):
            partition = ordinal % PARTITIONS
            group = Admission(self._run, f"g{ordinal}", ordinal, partition, 1, "train", 0)
            record = written_run.trajectory(group, 0)
            self.value(encode(record, self.framing), partition, record)
        assert self._producer.flush(DEADLINE) == 0

    def value(self, value: bytes, partition: int, record: Trajectory | None = None) -> None:
        """Write any bytes; those of a trajectory have to arrive in the table."""

        def delivered(error: KafkaError | None, message: Message) -> None:
            assert error is None, error
            if record is not None:
                self.written[message.partition(), message.offset()] = record

        self._producer.produce(
            self.topic, value, key=b"k", partition=partition, on_delivery=delivered
        )
        self._producer.poll(0)


@pytest.fixture(scope="module")
def sunk(kafka: Cluster, registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Sunk:
    """The whole story, once: sink, kill, write on, start again, wait until all is there."""
    name = f"connect-{uuid.uuid4().hex[:8]}"
    address = kafka.bootstrap_servers
    section = KafkaSection(
        bootstrap_servers=address,
        connect_timeout_seconds=60,
        registry=RegistrySection(url=registry.url),
    )
    directory = tmp_path_factory.mktemp("connect")
    lake = Lake(directory)
    lake.create()
    worker = ConnectWorker(directory, address, name)
    archived = plain_run(address, f"{name}-plain")
    make_topic(address, f"{name}.trajectories", PARTITIONS)
    make_topic(address, f"{name}-control", 1)
    writer = TrajectoryWriter(cluster_settings(section), name)
    sink = {**QUICK, **lake.options, "iceberg.control.topic": f"{name}-control"}
    try:
        worker.start()
        writer.trajectories(BATCH)
        foreign = foreign_values(writer)
        for number, value in enumerate(foreign.values()):
            writer.value(value, number % PARTITIONS)
        worker.put(
            f"{name}-trajectories",
            connector(
                "trajectories",
                topics=writer.topic,
                **{
                    "value.converter.apicurio.registry.url": registry.url.replace(
                        "/apis/ccompat/v7", "/apis/registry/v2"
                    ),
                    "errors.deadletterqueue.topic.name": f"{name}-letters",
                    **sink,
                },
            ),
        )
        worker.put(
            f"{name}-archive",
            connector("archive", topics=",".join({topic for topic, _, _ in archived}), **sink),
        )

        def sinking() -> bool:
            worker.states(f"{name}-trajectories")
            writer.trajectories(BATCH)
            return lake.count(TRAJECTORIES) >= BATCH

        until(sinking, worker.telling, DEADLINE)
        worker.kill()
        killed_at = lake.count(TRAJECTORIES)
        writer.trajectories(BATCH)
        worker.start()

        def complete() -> bool:
            states = worker.states(f"{name}-trajectories") + worker.states(f"{name}-archive")
            return (
                states == ["RUNNING"] * 2
                and lake.count(TRAJECTORIES) >= len(writer.written)
                and lake.count(ARCHIVE) >= len(archived)
                and consumed(address, f"connect-{name}-trajectories", writer.written)
            )

        until(complete, worker.telling, DEADLINE)
        letters = list(raw_messages(address, f"{name}-letters"))
    finally:
        worker.kill()
    return Sunk(lake, writer.written, foreign, letters, archived, killed_at)


def foreign_values(writer: TrajectoryWriter) -> dict[str, bytes]:
    """What other programs might write there, by what it is."""
    run = writer.topic.partition(".")[0]
    record = written_run.trajectory(Admission(run, "g", 0, 0, 1, "train", 0), 0)
    whole = encode(record, writer.framing)
    return {
        "text": b"no record",
        "an id that the registry does not have": UNKNOWN_ID + whole[5:],
        "a trajectory of a producer without a registry": encode(record),
        "a trajectory that was cut off": whole[:-30],
        "another record of dora's": encode(
            DeadLetter(run, "foreign", "is no trajectory", "test", 0), writer.framing
        ),
    }


def plain_run(address: str, run: str) -> dict[tuple[str, int, int], Record]:
    """A run without a registry; its trajectories and ledger, by topic, partition and offset."""
    settings = cluster_settings(KafkaSection(bootstrap_servers=address))
    topics = written_run.RunWriter(settings, run, "model").write().topics
    return {
        (message.topic(), message.partition(), message.offset()): decode(message.value())
        for message in raw_messages(address, topics.trajectories, topics.steps)
    }


def consumed(address: str, group: str, written: dict[Place, Trajectory]) -> bool:
    """Whether the sink's offsets lie behind the last trajectory of every partition."""
    admin = AdminClient({"bootstrap.servers": address})
    asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
    committed = {p.partition: p.offset for p in asked[group].result(30).topic_partitions}
    ends = {p: max(o for q, o in written if q == p) + 1 for p in range(PARTITIONS)}
    return all(committed.get(partition, -1) >= end for partition, end in ends.items())


def test_a_worker_that_is_killed_while_it_sinks_loses_and_repeats_nothing(sunk: Sunk) -> None:
    assert BATCH <= sunk.killed_at < len(sunk.written)
    rows = sunk.lake.rows(TRAJECTORIES).to_pylist()
    places = sorted((row["kafka_partition"], row["kafka_offset"]) for row in rows)
    assert places == sorted(sunk.written)


def test_rows_hold_what_the_records_hold(sunk: Sunk) -> None:
    for row in sunk.lake.rows(TRAJECTORIES).to_pylist():
        record = sunk.written[row["kafka_partition"], row["kafka_offset"]]
        assert unpack_tokens(row["token_ids"]).tolist() == unpack_tokens(record.token_ids).tolist()
        assert row["logprobs"] == record.logprobs
        assert row["mask"] == record.mask
        assert row["trajectory_id"] == record.trajectory_id
        assert row["policy_version"] == record.policy_version
        assert row["reward"] == record.reward
        assert dict(row["reward_parts"]) == record.reward_parts
        assert row["error"] is None
        assert [(run["version"], run["tokens"]) for run in row["version_runs"]] == [
            (run.version, run.tokens) for run in record.version_runs
        ]
        assert tuple(row["sampling"]["stop_token_ids"]) == record.sampling.stop_token_ids


def test_rows_are_partitioned_by_run_and_version(sunk: Sunk) -> None:
    table = sunk.lake.table(TRAJECTORIES)
    assert [field.name for field in table.spec().fields] == ["run", "policy_version"]
    of_version = [r for r in sunk.written.values() if r.policy_version == 1]
    assert table.scan(row_filter="policy_version == 1").to_arrow().num_rows == len(of_version)


def test_what_is_no_trajectory_is_set_aside_with_the_reason_and_the_rest_is_sunk(
    sunk: Sunk,
) -> None:
    reasons: dict[bytes, dict[str, bytes]] = {}
    for letter in sunk.letters:
        reasons[letter.value()] = dict(letter.headers())
    assert set(reasons) == set(sunk.foreign.values())

    def stage(kind: str) -> str:
        return reasons[sunk.foreign[kind]]["__connect.errors.stage"].decode()

    assert stage("another record of dora's") == "TRANSFORMATION"
    assert {stage(kind) for kind in sunk.foreign if kind != "another record of dora's"} == {
        "VALUE_CONVERTER"
    }
    for headers in reasons.values():
        assert headers["__connect.errors.exception.message"]
        assert headers["__connect.errors.topic"].endswith(b".trajectories")
        place = (
            int(headers["__connect.errors.partition"]),
            int(headers["__connect.errors.offset"]),
        )
        assert place not in sunk.written


def test_records_without_a_registry_are_archived_as_they_are(sunk: Sunk) -> None:
    rows = sunk.lake.rows(ARCHIVE).to_pylist()
    found = [(row["kafka_topic"], row["kafka_partition"], row["kafka_offset"]) for row in rows]
    assert sorted(found) == sorted(sunk.archived)
    for place, row in zip(found, rows, strict=True):
        assert decode(row["record"]) == sunk.archived[place]


def test_the_jars_are_of_the_same_releases_as_broker_and_registry() -> None:
    def version(pom: Path, name: str) -> str:
        match = re.search(f"<{name}.version>([^<]+)<", pom.read_text())
        assert match is not None
        return match.group(1)

    connect = ROOT / "ops" / "connect" / "pom.xml"
    for other, names in {"kafka": ("kafka", "log4j"), "registry": ("apicurio",)}.items():
        for name in names:
            assert version(connect, name) == version(ROOT / "ops" / other / "pom.xml", name)
