"""What lies in a run's topics, as other tools see it: CloudEvents, and the AsyncAPI document."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from confluent_kafka import Consumer, KafkaError, TopicPartition

from dora.bus.settings import cluster_settings
from dora.config import KafkaSection
from dora.schemas.codec import decode
from dora.schemas.framing import UndecodableRecord
from dora.schemas.registry import RECORD_NAMES
from tests.brokers import Cluster
from tests.cloud_events import event_of
from tests.written_run import RunWriter, WrittenRun

DEADLINE = 60.0
CHANNELS = yaml.safe_load((Path(__file__).parents[2] / "docs" / "asyncapi.yaml").read_text())[
    "channels"
]


@pytest.fixture(scope="module")
def written(kafka: Cluster) -> WrittenRun:
    settings = cluster_settings(KafkaSection(bootstrap_servers=kafka.bootstrap_servers))
    return RunWriter(settings, f"events-{uuid.uuid4().hex[:8]}", "emulated").write()


Raw = tuple[str, list[tuple[str, bytes]], bytes | None, bytes]


def messages(written: WrittenRun) -> Iterator[Raw]:
    """Topic, headers, key and value of every committed record, without dora's own reader."""
    consumer = Consumer(
        {
            "bootstrap.servers": written.settings.bootstrap_servers,
            "group.id": "unused",
            "isolation.level": "read_committed",
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
        }
    )
    try:
        topics = consumer.list_topics(timeout=DEADLINE).topics
        places = [
            TopicPartition(name, number, 0)
            for name in written.topics.all
            for number in topics[name].partitions
        ]
        consumer.assign(places)
        left = len(places)
        while left:
            message = consumer.poll(DEADLINE)
            assert message is not None, f"{left} partitions did not end"
            error = message.error()
            if error is not None:
                assert error.code() == KafkaError._PARTITION_EOF, error
                left -= 1
                continue
            value = message.value()
            assert value is not None
            yield str(message.topic()), list(message.headers() or ()), message.key(), value
    finally:
        consumer.close()


def test_every_record_is_a_cloud_event_of_a_kind_that_its_topic_is_documented_to_carry(
    written: WrittenRun,
) -> None:
    seen: dict[str, set[str]] = {}
    events: set[tuple[str, str]] = set()
    for topic, headers, key, value in messages(written):
        try:
            expected = decode(value)
        except UndecodableRecord:
            continue  # foreign: not dora's to describe
        attributes, record = event_of(headers, key, value)
        assert record == expected
        name = RECORD_NAMES[type(record)]
        assert attributes["type"] == f"dora.{name}.v1"
        assert attributes["source"].startswith(f"/dora/{record.run}/")
        events.add((attributes["source"], attributes["id"]))
        suffix = topic.rpartition(".")[2]
        assert name in CHANNELS[suffix]["messages"], f"a {name} in {topic}"
        seen.setdefault(suffix, set()).add(name)
    assert len(events) > 50
    assert seen["dispatch"] == {"admission", "command"}
    assert seen["steps"] == {"run_started", "step"}
    assert {"chunks", "trajectories", "policies"} <= seen.keys()
