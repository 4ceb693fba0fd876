"""Transactions that Kafka left without an end when a broker died at the wrong moment."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from confluent_kafka import Producer

from dora.broker.local import running_broker, start_broker, stop_broker
from dora.bus import ClusterSettings, LogReader, TransactionalWriter, cluster_settings
from dora.bus.settings import transactional_properties
from dora.bus.topic_plan import TopicSpec
from dora.bus.topics import TopicAdmin
from dora.config import KafkaSection
from dora.errors import BusError
from dora.schemas.codec import encode
from dora.schemas.records import Admission
from tests.processes import until

TOPIC, PLACE = "unfinished.dispatch", ("unfinished.dispatch", 0)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    start_broker(tmp_path / "broker", heap_mb=256)
    yield tmp_path / "broker"
    stop_broker(tmp_path / "broker", force=True)


def settings_of(home: Path) -> ClusterSettings:
    broker = running_broker(home)
    assert broker is not None
    return cluster_settings(KafkaSection(bootstrap_servers=broker.bootstrap_servers))


def ends(settings: ClusterSettings) -> tuple[int, int]:
    """Last stable offset and end of the partition."""
    with LogReader(settings, client_id="t") as stable:
        reached = stable.end_offsets([PLACE])[PLACE]
    with LogReader(settings, isolation="read_uncommitted", client_id="t") as whole:
        return reached, whole.end_offsets([PLACE])[PLACE]


def admission(ordinal: int) -> Admission:
    return Admission("unfinished", f"g{ordinal}", ordinal, 0, 2, "train", 0)


def committed(settings: ClusterSettings) -> list[int]:
    with LogReader(settings, client_id="t") as reader:
        reader.assign({PLACE: 0})
        return [m.value.ordinal for m in reader.read_to_end(20) if isinstance(m.value, Admission)]


def leave_open(settings: ClusterSettings, identity: str, timeout: float) -> Producer:
    """A holder of the id that dies with a record of its transaction in the log."""
    producer = Producer(transactional_properties(settings, "t", identity, timeout))
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(TOPIC, encode(admission(7)), key="g7", partition=0)
    assert producer.flush(30) == 0
    return producer


def test_what_a_transaction_left_when_its_broker_died_never_comes_to_life(home: Path) -> None:
    """The broker dies with an open transaction. When it is back it aborts that, since its time is
    up, but while it is not yet trusted with its partitions again; so it writes no markers (unless
    starting takes so long that it is trusted first)."""
    settings = settings_of(home)
    with TopicAdmin(settings) as admin:
        admin.create([TopicSpec(TOPIC, 1, {})])
    open_ = leave_open(settings, "unfinished.coordinator", 2.0)
    broker = running_broker(home)
    assert broker is not None
    os.kill(broker.pid, signal.SIGKILL)
    until(lambda: running_broker(home) is None, "the broker to be gone")
    open_.purge()
    del open_
    start_broker(home, port=int(settings.bootstrap_servers.rpartition(":")[2]), heap_mb=256)

    with TransactionalWriter(
        settings, "unfinished.coordinator", client_id="t", transaction_timeout=30,
        partitions=[PLACE],
    ) as writer:  # fmt: skip
        stable, end = ends(settings)
        assert stable == end, "nothing is left open"
        with writer.transaction() as transaction:
            transaction.send(TOPIC, admission(0), key="g0", partition=0)
    assert committed(settings) == [0]


def test_an_abort_is_made_sure_of_before_the_next_transaction(settings, run_name: str) -> None:
    topic = f"{run_name}.dispatch"
    with TopicAdmin(settings) as admin:
        admin.create([TopicSpec(topic, 1, {})])
    with TransactionalWriter(
        settings, f"{run_name}.c", client_id="t", transaction_timeout=30
    ) as writer:
        with suppress(ZeroDivisionError), writer.transaction() as transaction:
            transaction.send(topic, admission(1), key="g1", partition=0)
            transaction.flush()
            raise ZeroDivisionError
        with writer.transaction() as transaction:
            transaction.send(topic, admission(2), key="g2", partition=0)
    with LogReader(settings, client_id="t") as reader:
        reader.assign({(topic, 0): 0})
        found = [m.value for m in reader.read_to_end(20)]
    assert [a.ordinal for a in found if isinstance(a, Admission)] == [2]


def test_another_producers_open_transaction_is_waited_for_and_named(
    settings: ClusterSettings, run_name: str
) -> None:
    topic = f"{run_name}.dispatch"
    with TopicAdmin(settings) as admin:
        admin.create([TopicSpec(topic, 1, {})])
    impatient = cluster_settings(
        KafkaSection(bootstrap_servers=settings.bootstrap_servers, request_timeout_seconds=2.0)
    )
    with (
        TransactionalWriter(
            settings, f"{run_name}.other", client_id="o", transaction_timeout=60
        ) as other,
        other.transaction() as transaction,
    ):
        transaction.send(topic, admission(1), key="g1", partition=0)
        transaction.flush()
        with pytest.raises(BusError, match=r"from offset 0 on that is not finished"):
            TransactionalWriter(
                impatient, f"{run_name}.c", client_id="t", transaction_timeout=30,
                partitions=[(topic, 0)],
            )  # fmt: skip
