"""The bus against a real broker: what dora's guarantees rest on.

librdkafka's mock cluster hands aborted records to `read_committed` readers, so that only Apache
Kafka itself can show these properties.
"""

import contextlib
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from dora.bus import (
    BEGINNING,
    END,
    ClusterSettings,
    LogReader,
    LogWriter,
    TopicAdmin,
    TopicSpec,
    Transaction,
    TransactionAbortedError,
    TransactionalWriter,
    Unreadable,
)
from dora.errors import BusError, ConfigError, DeadlineError, FencedError, TopicError
from dora.schemas.records import Admission, DeadLetter

DEADLINE = 30.0


def admission(ordinal: int) -> Admission:
    return Admission(
        run="r",
        group_id=f"g{ordinal}",
        ordinal=ordinal,
        policy_version=0,
        group_size=1,
        purpose="train",
        created_ms=1,
    )


@pytest.fixture
def new_topic(settings: ClusterSettings) -> Callable[..., str]:
    """Creates topics with names of their own."""

    def create(partitions: int = 1, **configs: str) -> str:
        name = f"bus-{uuid.uuid4().hex[:8]}"
        config = {key.replace("_", "."): value for key, value in configs.items()}
        TopicAdmin(settings).create([TopicSpec(name, partitions, config)])
        return name

    return create


@pytest.fixture
def writer(settings: ClusterSettings) -> Iterator[LogWriter]:
    """A plain writer."""
    with LogWriter(settings, client_id="writer") as made:
        yield made


@pytest.fixture
def reader(settings: ClusterSettings) -> Iterator[LogReader]:
    """A `read_committed` reader."""
    with LogReader(settings, client_id="reader") as made:
        yield made


@pytest.fixture
def transactional(settings: ClusterSettings) -> Iterator[Callable[..., TransactionalWriter]]:
    """Makes transactional writers, and closes them."""
    with contextlib.ExitStack() as stack:

        def make(identity: str, timeout: float = 30.0) -> TransactionalWriter:
            return stack.enter_context(
                TransactionalWriter(settings, identity, client_id="tx", transaction_timeout=timeout)
            )

        yield make


class ChangedMind(Exception):
    """Raised in a block to abort its transaction."""


def in_transaction(tx: TransactionalWriter, body: Callable[[Transaction], None]) -> None:
    with tx.transaction() as block:
        body(block)


def aborted(tx: TransactionalWriter, body: Callable[[Transaction], None]) -> None:
    """Do `body` in a transaction, make sure that it has reached the log, and abort."""

    def change_mind(block: Transaction) -> None:
        body(block)
        assert tx._deliveries.flush(DEADLINE) == 0
        raise ChangedMind

    with pytest.raises(ChangedMind):
        in_transaction(tx, change_mind)


def write(writer: LogWriter, topic: str, ordinals: range, partition: int = 0) -> None:
    for ordinal in ordinals:
        writer.send(topic, admission(ordinal), partition=partition)
    writer.flush(DEADLINE)


def ordinals(reader: LogReader) -> list[int]:
    found = []
    for message in reader.read_to_end(DEADLINE):
        assert isinstance(message.value, Admission)
        found.append(message.value.ordinal)
    return found


def poll_until(reader: LogReader, count: int) -> list[int]:
    """The ordinals of the next `count` messages."""
    found: list[int] = []
    deadline = time.monotonic() + DEADLINE
    while len(found) < count:
        assert time.monotonic() < deadline, f"only {len(found)} of {count} messages came"
        for message in reader.poll(timeout=1.0):
            assert isinstance(message.value, Admission)
            found.append(message.value.ordinal)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_partition_is_read_in_order_with_exact_offsets(
    new_topic: Callable[..., str], writer: LogWriter, reader: LogReader
) -> None:
    topic = new_topic(partitions=2)
    for ordinal in range(1000):
        writer.send(topic, admission(ordinal), partition=ordinal % 2)
    writer.flush(DEADLINE)
    reader.assign({(topic, 0): BEGINNING, (topic, 1): 0})
    messages = list(reader.read_to_end(DEADLINE))
    for partition in (0, 1):
        own = [m for m in messages if m.partition == partition]
        assert [m.offset for m in own] == list(range(500))
        assert [m.value.ordinal for m in own if isinstance(m.value, Admission)] == list(
            range(partition, 1000, 2)
        )
    assert reader.positions() == {(topic, 0): 500, (topic, 1): 500}


def test_a_message_carries_key_cloudevents_headers_and_trace(
    new_topic: Callable[..., str], writer: LogWriter, reader: LogReader
) -> None:
    topic = new_topic()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    writer.send(topic, admission(0), key="schlüssel", trace=trace)
    writer.send(topic, admission(1))
    writer.flush(DEADLINE)
    reader.assign({(topic, 0): 0})
    first, second = reader.read_to_end(DEADLINE)
    assert first.key == "schlüssel"
    assert second.key is None
    assert first.headers["ce_specversion"] == b"1.0"
    assert first.headers["ce_type"] == b"dora.admission.v1"
    assert first.headers["ce_source"] == b"/dora/r/writer"
    assert first.headers["traceparent"] == trace.encode()
    assert "traceparent" not in second.headers
    assert first.headers["ce_id"] != second.headers["ce_id"]
    assert abs(first.timestamp_ms / 1000 - time.time()) < 60


def test_reading_goes_on_from_any_offset(
    new_topic: Callable[..., str], writer: LogWriter, reader: LogReader
) -> None:
    topic = new_topic()
    write(writer, topic, range(10))
    reader.assign({(topic, 0): 7})
    assert ordinals(reader) == [7, 8, 9]


def test_a_partition_can_be_moved_back_and_others_added(
    new_topic: Callable[..., str], writer: LogWriter, reader: LogReader
) -> None:
    topic = new_topic(partitions=2)
    write(writer, topic, range(5), partition=0)
    write(writer, topic, range(10, 13), partition=1)
    reader.assign({(topic, 0): BEGINNING})
    assert ordinals(reader) == [0, 1, 2, 3, 4]
    reader.assign({(topic, 1): BEGINNING})
    assert ordinals(reader) == [10, 11, 12]
    reader.assign({(topic, 0): 3})
    assert reader.positions()[topic, 0] == 3
    assert ordinals(reader) == [3, 4]


def test_the_end_is_that_at_the_time_of_assigning(
    new_topic: Callable[..., str], writer: LogWriter, reader: LogReader
) -> None:
    topic = new_topic()
    write(writer, topic, range(3))
    reader.assign({(topic, 0): END})
    write(writer, topic, range(3, 5))
    assert poll_until(reader, 2) == [3, 4]


def test_poll_returns_as_soon_as_something_is_there(
    new_topic: Callable[..., str], writer: LogWriter, reader: LogReader
) -> None:
    topic = new_topic()
    write(writer, topic, range(3))
    reader.assign({(topic, 0): 0})
    begin = time.monotonic()
    assert len(reader.poll(max_messages=500, timeout=20.0)) >= 1
    assert time.monotonic() - begin < 10.0


def test_poll_returns_no_more_than_it_is_asked_for(
    new_topic: Callable[..., str], writer: LogWriter, reader: LogReader
) -> None:
    topic = new_topic()
    write(writer, topic, range(10))
    reader.assign({(topic, 0): 0})
    first = reader.poll(max_messages=4, timeout=DEADLINE)
    assert 1 <= len(first) <= 4
    assert poll_until(reader, 10 - len(first)) == list(range(len(first), 10))


def test_what_is_written_while_reading_to_the_end_is_left_for_the_next_poll(
    new_topic: Callable[..., str], writer: LogWriter, reader: LogReader
) -> None:
    topic = new_topic(partitions=2)
    write(writer, topic, range(5), partition=0)
    write(writer, topic, range(100, 105), partition=1)
    reader.assign({(topic, 0): 0, (topic, 1): 0})
    found: dict[int, list[int]] = {0: [], 1: []}
    written = False
    for message in reader.read_to_end(DEADLINE):
        if not written:
            write(writer, topic, range(5, 8), partition=0)
            write(writer, topic, range(105, 108), partition=1)
            written = True
        assert isinstance(message.value, Admission)
        found[message.partition].append(message.value.ordinal)
    assert found == {0: list(range(5)), 1: list(range(100, 105))}
    assert reader.positions() == {(topic, 0): 5, (topic, 1): 5}
    assert sorted(poll_until(reader, 6)) == [5, 6, 7, 105, 106, 107]


def test_leaving_read_to_end_early_loses_nothing(
    new_topic: Callable[..., str], writer: LogWriter, reader: LogReader
) -> None:
    topic = new_topic()
    write(writer, topic, range(50))
    reader.assign({(topic, 0): 0})
    for message in reader.read_to_end(DEADLINE):
        if message.offset == 20:
            break
    assert reader.positions() == {(topic, 0): 21}
    assert ordinals(reader) == list(range(21, 50))


def test_messages_with_other_keys_are_passed_over_undecoded_and_positions_move_past_them(
    new_topic: Callable[..., str], settings: ClusterSettings, writer: LogWriter
) -> None:
    topic = new_topic()
    raw = Producer({"bootstrap.servers": settings.bootstrap_servers})
    for ordinal in range(200):
        writer.send(topic, admission(ordinal), key=f"g{ordinal % 10}", partition=0)
    writer.send(topic, admission(200), partition=0)  # without a key
    writer.flush(DEADLINE)
    raw.produce(topic, b"no record", key=b"other", partition=0)
    raw.produce(topic, b"no record", key=b"g3", partition=0)
    raw.produce(topic, b"no record", key=b"other", partition=0)
    assert raw.flush(DEADLINE) == 0
    asked: list[str | None] = []

    def wanted(key: str | None) -> bool:
        asked.append(key)
        return key in ("g3", None)

    with LogReader(settings, client_id="reader", wanted=wanted) as reader:
        reader.assign({(topic, 0): 0})
        found = list(reader.read_to_end(DEADLINE))
        assert [m.offset for m in found] == [*range(3, 200, 10), 200, 202]
        assert isinstance(found[-1].value, Unreadable)  # a wanted key is never dropped
        assert reader.positions() == {(topic, 0): 204}
        assert len(asked) == 204
        write(writer, topic, range(300, 301))
        assert poll_until(reader, 1) == [300]
        assert list(reader.read_to_end(DEADLINE)) == []


def test_polling_without_a_wanted_key_returns_nothing_in_time_and_moves_on(
    new_topic: Callable[..., str], settings: ClusterSettings, writer: LogWriter
) -> None:
    topic = new_topic()
    write(writer, topic, range(2000))
    with LogReader(settings, client_id="reader", wanted=lambda key: key == "none") as reader:
        reader.assign({(topic, 0): 0})
        begin = time.monotonic()
        while reader.positions()[topic, 0] < 2000:
            assert reader.poll(timeout=0.2) == []
            assert time.monotonic() - begin < DEADLINE


def test_a_committed_transaction_is_read_and_an_aborted_one_is_not(
    new_topic: Callable[..., str],
    reader: LogReader,
    transactional: Callable[..., TransactionalWriter],
) -> None:
    first, second = new_topic(), new_topic()
    tx = transactional(f"{first}.tx")
    with tx.transaction() as block:
        block.send(first, admission(0), partition=0)
        block.send(second, admission(1), partition=0)
    aborted(tx, lambda block: block.send(first, admission(2), partition=0))
    with tx.transaction() as block:
        block.send(first, admission(3), partition=0)
    reader.assign({(first, 0): 0, (second, 0): 0})
    assert sorted(ordinals(reader)) == [0, 1, 3]


def test_the_position_passes_aborted_records_and_markers_at_the_end(
    new_topic: Callable[..., str],
    reader: LogReader,
    transactional: Callable[..., TransactionalWriter],
) -> None:
    topic = new_topic()
    tx = transactional(f"{topic}.tx")
    with tx.transaction() as block:
        block.send(topic, admission(0), partition=0)

    def three(block: Transaction) -> None:
        for ordinal in (1, 2, 3):
            block.send(topic, admission(ordinal), partition=0)

    aborted(tx, three)
    # Offsets: record 0, marker 1, aborted 2 to 4, marker 5.
    reader.assign({(topic, 0): 0})
    assert reader.end_offsets([(topic, 0)]) == {(topic, 0): 6}
    assert ordinals(reader) == [0]
    assert reader.positions() == {(topic, 0): 6}
    assert ordinals(reader) == []


def test_an_open_transaction_ends_what_is_read_without_holding_the_reader_up(
    new_topic: Callable[..., str],
    reader: LogReader,
    transactional: Callable[..., TransactionalWriter],
) -> None:
    topic = new_topic()
    tx = transactional(f"{topic}.tx")
    with tx.transaction() as block:
        block.send(topic, admission(0), partition=0)
    reader.assign({(topic, 0): 0})
    with tx.transaction() as block:
        block.send(topic, admission(1), partition=0)
        assert tx._deliveries.flush(DEADLINE) == 0
        assert reader.end_offsets([(topic, 0)]) == {(topic, 0): 2}
        assert ordinals(reader) == [0]
    assert poll_until(reader, 1) == [1]


def test_an_uncommitted_reader_sees_open_transactions(
    new_topic: Callable[..., str],
    settings: ClusterSettings,
    transactional: Callable[..., TransactionalWriter],
) -> None:
    topic = new_topic()
    tx = transactional(f"{topic}.tx")
    with (
        LogReader(settings, isolation="read_uncommitted", client_id="eager") as eager,
        tx.transaction() as block,
    ):
        block.send(topic, admission(0), partition=0)
        assert tx._deliveries.flush(DEADLINE) == 0
        eager.assign({(topic, 0): 0})
        assert ordinals(eager) == [0]


def test_a_second_writer_fences_the_first_and_aborts_what_it_left_open(
    new_topic: Callable[..., str],
    reader: LogReader,
    transactional: Callable[..., TransactionalWriter],
) -> None:
    topic = new_topic()
    first = transactional(f"{topic}.tx")

    def taken_over(block: Transaction) -> None:
        block.send(topic, admission(0), partition=0)
        assert first._deliveries.flush(DEADLINE) == 0
        second = transactional(f"{topic}.tx")
        with second.transaction() as newer:
            newer.send(topic, admission(1), partition=0)

    with pytest.raises(FencedError, match="another process took over"):
        in_transaction(first, taken_over)
    with pytest.raises(FencedError):
        in_transaction(first, lambda block: block.send(topic, admission(2), partition=0))
    reader.assign({(topic, 0): 0})
    assert ordinals(reader) == [1]


def test_a_fenced_writer_fails_with_that_reason_even_if_its_block_fails_too(
    new_topic: Callable[..., str], transactional: Callable[..., TransactionalWriter]
) -> None:
    topic = new_topic()
    first = transactional(f"{topic}.tx")

    def taken_over(block: Transaction) -> None:
        block.send(topic, admission(0), partition=0)
        assert first._deliveries.flush(DEADLINE) == 0
        transactional(f"{topic}.tx")
        raise ChangedMind

    with pytest.raises(FencedError):
        in_transaction(first, taken_over)


def test_offsets_of_a_group_are_committed_with_the_transaction(
    new_topic: Callable[..., str],
    settings: ClusterSettings,
    transactional: Callable[..., TransactionalWriter],
) -> None:
    topic = new_topic(partitions=2)
    group = f"{topic}.trainer"
    tx = transactional(f"{topic}.tx")
    with tx.transaction() as block:
        block.send(topic, admission(0), partition=0)
        block.send_offsets(group, {(topic, 0): 7, (topic, 1): 9})
    aborted(tx, lambda block: block.send_offsets(group, {(topic, 0): 100}))
    assert committed(settings, group, topic) == {0: 7, 1: 9}


def committed(settings: ClusterSettings, group: str, topic: str) -> dict[int, int]:
    consumer = Consumer({"bootstrap.servers": settings.bootstrap_servers, "group.id": group})
    try:
        places = consumer.committed([TopicPartition(topic, p) for p in (0, 1)], timeout=DEADLINE)
        return {place.partition: place.offset for place in places}
    finally:
        consumer.close()


def test_an_empty_transaction_is_fine(transactional: Callable[..., TransactionalWriter]) -> None:
    tx = transactional(f"empty-{uuid.uuid4().hex[:8]}")
    with tx.transaction():
        pass


def test_a_record_too_large_is_refused_before_it_is_sent(
    new_topic: Callable[..., str], writer: LogWriter
) -> None:
    topic = new_topic()
    big = DeadLetter("r", "c", "x", "p", 1, payload=bytes(9 * 2**20))
    with pytest.raises(BusError, match=r"with key k takes 94\d+ bytes.*at most 8388480") as caught:
        writer.send(topic, big, key="k")
    assert topic in str(caught.value)
    assert "kafka.max_message_bytes" in str(caught.value)
    writer.send(topic, admission(0))
    writer.flush(DEADLINE)


def test_a_record_too_large_for_the_topic_is_reported_with_its_key(
    new_topic: Callable[..., str], settings: ClusterSettings
) -> None:
    topic = new_topic(max_message_bytes="2000")
    writer = LogWriter(settings, client_id="writer")
    writer.send(topic, DeadLetter("r", "c", noise(5000), "p", 1), key="k")
    with pytest.raises(BusError, match=f"{topic} with key k takes 50\\d+ bytes"):
        writer.flush(DEADLINE)
    with pytest.raises(BusError, match=topic):
        writer.send(topic, admission(0))
    with pytest.raises(BusError, match=topic):
        writer.close()


def noise(size: int) -> str:
    """Text that does not compress to much less."""
    return "".join(random.Random(0).choices([chr(c) for c in range(33, 127)], k=size))


def test_a_transaction_with_a_record_too_large_for_the_topic_writes_nothing_and_can_be_repeated(
    new_topic: Callable[..., str],
    reader: LogReader,
    transactional: Callable[..., TransactionalWriter],
) -> None:
    topic = new_topic(max_message_bytes="2000")
    tx = transactional(f"{topic}.tx")

    def too_large(block: Transaction) -> None:
        block.send(topic, admission(0), partition=0)
        block.send(topic, DeadLetter("r", "c", noise(5000), "p", 1), partition=0)

    with pytest.raises(TransactionAbortedError, match=r"takes 50\d+ bytes"):
        in_transaction(tx, too_large)
    # librdkafka may have lost count of its sequence numbers: then the broker refuses once more.
    for _ in range(3):
        with contextlib.suppress(TransactionAbortedError):
            in_transaction(tx, lambda block: block.send(topic, admission(1), partition=0))
            break
    reader.assign({(topic, 0): 0})
    assert ordinals(reader) == [1]


def test_bytes_that_are_no_record_are_returned_with_the_reason(
    new_topic: Callable[..., str],
    settings: ClusterSettings,
    writer: LogWriter,
    reader: LogReader,
) -> None:
    topic = new_topic()
    foreign = Producer({"bootstrap.servers": settings.bootstrap_servers})
    foreign.produce(topic, b"hello", key=b"\xff\xfe", partition=0)
    foreign.produce(topic, None, partition=0)
    foreign.flush(DEADLINE)
    write(writer, topic, range(1))
    reader.assign({(topic, 0): 0})
    text, tombstone, record = reader.read_to_end(DEADLINE)
    assert isinstance(text.value, Unreadable)
    assert (text.value.code, text.value.payload, text.offset) == ("bad_magic", b"hello", 0)
    assert isinstance(tombstone.value, Unreadable)
    assert tombstone.value.payload == b""
    assert record.value == admission(0)


def test_an_offset_that_was_deleted_is_an_error_and_never_skipped(
    new_topic: Callable[..., str],
    settings: ClusterSettings,
    writer: LogWriter,
    reader: LogReader,
) -> None:
    topic = new_topic()
    write(writer, topic, range(10))
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    for future in admin.delete_records([TopicPartition(topic, 0, 6)]).values():
        future.result(DEADLINE)
    reader.assign({(topic, 0): 2})
    with pytest.raises(BusError, match=r"offset 2 of .*\[0\] is not there: the log holds 6 to 9"):
        ordinals(reader)
    assert reader.start_offsets([(topic, 0)]) == {(topic, 0): 6}


def test_a_topic_that_is_missing_is_named(reader: LogReader) -> None:
    with pytest.raises(TopicError, match=r"has no topic nowhere\.steps"):
        reader.assign({("nowhere.steps", 0): BEGINNING})


def test_writing_to_a_topic_that_is_missing_is_an_error_that_names_it(
    settings: ClusterSettings,
) -> None:
    impatient = replace(settings, properties={"topic.metadata.propagation.max.ms": "1000"})
    writer = LogWriter(impatient, client_id="writer")
    writer.send("nowhere.chunks", admission(0))
    with pytest.raises(TopicError, match=r"nowhere\.chunks"):
        writer.flush(DEADLINE)
    with pytest.raises(TopicError, match=r"nowhere\.chunks"):
        writer.close()


def unreachable(timeout: float = 1.0, **properties: str) -> ClusterSettings:
    return ClusterSettings(
        f"127.0.0.1:{free_port()}", properties, connect_timeout=timeout, request_timeout=5.0
    )


def test_a_broker_that_is_not_there_is_reported_within_the_timeout() -> None:
    nowhere = unreachable()
    begin = time.monotonic()
    with pytest.raises(BusError, match=nowhere.bootstrap_servers):
        TopicAdmin(nowhere).ping()
    with (
        LogReader(nowhere, client_id="r") as reader,
        pytest.raises(BusError, match="did not answer"),
    ):
        reader.assign({("x", 0): BEGINNING})
    with pytest.raises(BusError, match=nowhere.bootstrap_servers):
        TransactionalWriter(nowhere, "x", client_id="x", transaction_timeout=10.0)
    assert time.monotonic() - begin < 10.0


def test_tls_to_a_plain_port_is_reported_as_such(settings: ClusterSettings) -> None:
    wrong = ClusterSettings(
        settings.bootstrap_servers, {"security.protocol": "ssl"}, connect_timeout=6.0
    )
    told = r"PLAINTEXT broker listener|in state SSL_HANDSHAKE"
    with pytest.raises(BusError, match=told) as caught:
        TopicAdmin(wrong).ping()
    assert "security.protocol" in str(caught.value)


def test_credentials_that_are_refused_are_reported_without_the_password(
    settings: ClusterSettings,
) -> None:
    properties = {
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "me",
        "sasl.password": "hunter2",
    }
    wrong = ClusterSettings(settings.bootstrap_servers, properties, connect_timeout=2.0)
    with pytest.raises(BusError) as caught:
        TopicAdmin(wrong).ping()
    assert settings.bootstrap_servers in str(caught.value)
    assert "hunter2" not in str(caught.value) + repr(wrong)


def test_a_property_that_does_not_exist_is_named(settings: ClusterSettings) -> None:
    wrong = ClusterSettings(settings.bootstrap_servers, {"sasl.pasword": "x"})
    with pytest.raises(ConfigError, match=r"sasl\.pasword"):
        TopicAdmin(wrong)


def test_read_to_end_gives_up_at_its_deadline_and_says_how_far_it_came(
    new_topic: Callable[..., str], writer: LogWriter, reader: LogReader
) -> None:
    topic = new_topic()
    write(writer, topic, range(2000))
    reader.assign({(topic, 0): 0})
    with pytest.raises(DeadlineError, match="of 2000 in 0 s"):
        list(reader.read_to_end(0.0))
