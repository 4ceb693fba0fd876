"""Reading a run's topics by offset, without a consumer group.

A `LogReader` returns the records of a partition in order, from the assigned offset on, each once,
without a gap (but for keys that are not wanted): an offset that is gone is an error, a value that
cannot be decoded is returned as `Unreadable`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from dora.bus.access import Operation, Right
from dora.bus.failures import (
    Failures,
    await_answer,
    explain,
    is_transient,
    is_unknown_topic,
    kafka_error,
    make_client,
)
from dora.bus.offsets import Partition, ask_offsets
from dora.bus.settings import ClusterSettings, Isolation, consumer_properties
from dora.closeable import Closeable
from dora.errors import BusError, ConfigError, DeadlineError
from dora.schemas.codec import UndecodableCode, UndecodableRecord, decode
from dora.schemas.framing import RegistryFraming, SchemaAwaited
from dora.schemas.records import Record


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A value that cannot be decoded: why (see `UndecodableRecord`), and its bytes."""

    code: UndecodableCode
    reason: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Message:
    """A record where it lies in the log. `timestamp_ms` is the writer's clock."""

    topic: str
    partition: int
    offset: int
    key: str | None
    timestamp_ms: int
    headers: dict[str, bytes]
    value: Record | Unreadable

    @property
    def place(self) -> str:
        """Topic, partition and offset, for people."""
        return f"{self.topic} partition {self.partition} offset {self.offset}"


def message_of(raw: Any, key: str | None, framing: RegistryFraming | None) -> Message:
    """The message that librdkafka handed over, its value decoded.

    SchemaAwaited while the registry has not said what its id means; ConfigError for a record of
    dora's that was written with a schema registry when none is configured.
    """
    data = raw.value() or b""
    value: Record | Unreadable
    try:
        value = decode(data, framing)
    except UndecodableRecord as reason:
        if reason.code == "no_registry" and _is_own(raw):
            raise ConfigError(
                f"{raw.topic()}[{raw.partition()}] offset {raw.offset()} is {reason.reason}",
                hint="every part of the run and every command that reads it needs the registry; "
                "DORA_KAFKA__REGISTRY__URL does it for all of them",
            ) from None
        value = Unreadable(reason.code, reason.reason, data)
    return Message(
        topic=raw.topic(),
        partition=raw.partition(),
        offset=raw.offset(),
        key=key,
        timestamp_ms=raw.timestamp()[1],
        headers={name: content or b"" for name, content in raw.headers() or ()},
        value=value,
    )


def _is_own(raw: Any) -> bool:
    """Whether a record says that dora wrote it (see `HeaderMaker`)."""
    return any(
        name == "ce_type" and (content or b"").startswith(b"dora.")
        for name, content in raw.headers() or ()
    )


__all__ = ["BEGINNING", "END", "LogReader", "Message", "Unreadable"]

BEGINNING = -2
"""Offset that stands for the first one that is still there."""
END = -1
"""Offset that stands for the end at the time of the call."""

_TOPIC_GRACE_SECONDS = 10.0
_BACK_OFFSETS = 256
_IDLE_SECONDS = 0.05


class LogReader(Closeable):
    """Reads assigned partitions from given offsets.

    While a broker or schema registry is away for a while, `poll` returns nothing, a record
    whose schema is not known yet waits with those behind it. BusError when it stays away for
    `request_timeout`, when an assigned offset was deleted, or when the cluster refuses;
    TopicError when the topic does not exist; ConfigError for a record of dora's in the framing
    of a schema registry when none is configured. Not for use from several threads. Messages
    whose key `wanted` denies are passed over without being decoded; positions move past them.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        *,
        isolation: Isolation = "read_committed",
        client_id: str,
        wanted: Callable[[str | None], bool] | None = None,
    ) -> None:
        self._settings = settings
        self._wanted = wanted
        self._failures = Failures()
        properties = consumer_properties(settings, client_id, isolation)
        self._consumer: Consumer = make_client(Consumer, {**properties, "error_cb": self._failures})
        self._positions: dict[Partition, int] = {}
        self._fetched: deque[Any] = deque()
        self._missing_since: dict[Partition, float] = {}
        self._answered = False
        self._framing = None if settings.registry is None else settings.registry.framing

    def assign(self, positions: Mapping[Partition, int]) -> None:
        """Read these partitions from these offsets; ones already assigned move there.

        `BEGINNING` and `END` are turned into offsets now: what is written after this call returns
        is read. BusError if the cluster does not answer within `connect_timeout`; TopicError if it
        has no such topic.
        """
        self._await_first_answer()
        concrete = dict(positions)
        for symbol, place in ((BEGINNING, OFFSET_BEGINNING), (END, OFFSET_END)):
            symbolic = [partition for partition, at in positions.items() if at == symbol]
            concrete.update(self._query(symbolic, place, "Read"))
        wrong = [(partition, at) for partition, at in concrete.items() if at < 0]
        if wrong:
            raise ValueError(f"no offset: {wrong[0][1]} for {wrong[0][0]}")
        moved = [partition for partition in concrete if partition in self._positions]
        if moved:
            self._consumer.incremental_unassign([KafkaPartition(*p) for p in moved])
            self._fetched = deque(
                m for m in self._fetched if (m.topic(), m.partition()) not in moved
            )
        self._consumer.incremental_assign(
            [KafkaPartition(topic, number, at) for (topic, number), at in concrete.items()]
        )
        self._positions.update(concrete)

    def poll(self, max_messages: int = 500, timeout: float = 0.0) -> list[Message]:
        """At most `max_messages`; returns as soon as something is there, or after `timeout`
        seconds with nothing."""
        deadline = time.monotonic() + timeout
        messages: list[Message] = []
        while True:
            if not self._fetched:
                self._fetch(max_messages, max(0.0, deadline - time.monotonic()))
            awaited = False
            while self._fetched and len(messages) < max_messages:
                try:
                    message = self._next_message()
                except SchemaAwaited:
                    awaited = True
                    break
                if message is not None:
                    messages.append(message)
            if messages:
                return messages
            self._check_answering()
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return messages
            if awaited:
                time.sleep(min(_IDLE_SECONDS, remaining))

    def read_to_end(self, deadline: float) -> Iterator[Message]:
        """Everything that lies between the positions and the ends as of this call.

        The end of a partition is its last stable offset for a `read_committed` reader, its high
        watermark otherwise. The offset before it may well be a transaction marker, an aborted
        record or one that compaction removed, so that no message ever arrives there. A partition
        therefore counts as read once one of these has passed its end: the last message,
        librdkafka's own position (it moves over markers as the application polls; it is looked at
        only while nothing fetched waits to be returned, since it counts that as read), or an
        end-of-partition event. Messages beyond the end are kept for the next `poll`.

        DeadlineError after `deadline` seconds, naming the partition that is farthest behind.
        """
        yield from self.read_until(self.end_offsets(self._positions), deadline)

    def read_back(
        self,
        partition: Partition,
        enough: Callable[[Sequence[Message]], bool],
        deadline: float,
        *,
        before: int | None = None,
    ) -> list[Message]:
        """The messages at the end of `partition` (below offset `before`, if given), as many as it
        takes until `enough` holds, or all of them.

        How far back the wanted record lies cannot be told from offsets: aborted transactions and
        compaction leave any number of offsets without a record. The stretch that is read grows
        until `enough` holds or the partition's beginning is reached. Afterwards the partition is
        read on from its end (from `before`).

        DeadlineError after `deadline` seconds without an answer.
        """
        begin = self.start_offsets([partition])[partition]
        end = self.end_offsets([partition])[partition] if before is None else before
        back = _BACK_OFFSETS
        while True:
            at = max(begin, end - back)
            self.assign({partition: min(at, end)})
            found = list(self.read_until({partition: end}, deadline))
            if at == begin or enough(found):
                return found
            back *= 8

    def read_until(self, ends: Mapping[Partition, int], deadline: float) -> Iterator[Message]:
        """Like `read_to_end`, but each partition to an end of its own, which must not lie behind
        the readable one."""
        until = time.monotonic() + deadline
        waiting = {p: end for p, end in ends.items() if self._positions[p] < end}
        paused: list[KafkaPartition] = []
        kept: list[Any] = []
        try:
            while waiting:
                if not self._fetched:
                    self._fetch(1000, _IDLE_SECONDS)
                while self._fetched:
                    raw = self._fetched[0]
                    partition = (raw.topic(), raw.partition())
                    if raw.error() is None and raw.offset() >= ends.get(partition, 0):
                        kept.append(self._fetched.popleft())
                        if waiting.pop(partition, None) is not None:
                            self._pause(partition, paused)
                        continue
                    if partition not in waiting and _is_end(raw):
                        self._fetched.popleft()  # it may lie behind messages that are kept
                        continue
                    try:
                        message = self._next_message()
                    except SchemaAwaited:
                        time.sleep(_IDLE_SECONDS)
                        break
                    if self._positions.get(partition, -1) >= waiting.get(partition, inf):
                        del waiting[partition]
                        self._pause(partition, paused)
                    if message is not None:
                        yield message
                if not self._fetched:
                    self._catch_up_positions(waiting)
                for partition in [p for p, end in waiting.items() if self._positions[p] >= end]:
                    del waiting[partition]
                    self._pause(partition, paused)
                if waiting and time.monotonic() >= until:
                    raise self._late(waiting, deadline)
        finally:
            self._fetched.extendleft(reversed(kept))
            if paused:
                self._consumer.resume(paused)

    def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Offset after the last readable record: the last stable one for `read_committed`."""
        return self._query(partitions, OFFSET_END)

    def start_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """First offset that is still there."""
        return self._query(partitions, OFFSET_BEGINNING)

    def offsets_since(self, partitions: Iterable[Partition], time_ms: int) -> dict[Partition, int]:
        """Offset of the first record with a time stamp of `time_ms` (Unix milliseconds) or later;
        END where there is none."""
        return self._query(partitions, time_ms)

    def positions(self) -> dict[Partition, int]:
        """Offset that each assigned partition is read from next (markers passed included)."""
        if not self._fetched:
            self._catch_up_positions(self._positions)
        return dict(self._positions)

    def close(self) -> None:
        """Close the connections."""
        self._consumer.close()

    def _fetch(self, count: int, timeout: float) -> None:
        """Move what has arrived into `_fetched`, waiting for the first only.

        `consume(n, timeout)` would wait the whole time if fewer than n are there.
        """
        try:
            self._fetched.extend(self._consumer.consume(count, 0))
            if not self._fetched and timeout > 0:
                first = self._consumer.poll(timeout)
                if first is not None:
                    self._fetched.append(first)
                    if count > 1:
                        self._fetched.extend(self._consumer.consume(count - 1, 0))
        except KafkaException as exception:
            error = kafka_error(exception)
            raise explain(error, self._settings, "reading", self._failures) from exception

    def _next_message(self) -> Message | None:
        """The first message fetched, its position noted; None for an event or a key that is not
        wanted.

        SchemaAwaited, and it stays the first, while the registry has not said what its id means.
        """
        raw = self._fetched.popleft()
        error = raw.error()
        topic, partition, offset = raw.topic(), raw.partition(), raw.offset()
        if error is not None:
            self._handle(error, (topic, partition), offset)
            return None
        self._failures.down_since = None
        key = None if raw.key() is None else raw.key().decode("utf-8", "replace")
        if self._wanted is not None and not self._wanted(key):
            self._positions[topic, partition] = offset + 1
            return None
        try:
            message = message_of(raw, key, self._framing)
        except SchemaAwaited:
            self._fetched.appendleft(raw)
            raise
        self._positions[topic, partition] = offset + 1
        return message

    def _handle(self, error: KafkaError, partition: Partition, offset: int) -> None:
        where = f"{partition[0]}[{partition[1]}]"
        if error.code() == KafkaError._PARTITION_EOF:
            self._failures.down_since = None
            if partition in self._positions:
                self._positions[partition] = max(self._positions[partition], offset)
            return
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            wanted = self._positions.get(partition, offset)
            first = self.start_offsets([partition])[partition]
            end = self.end_offsets([partition])[partition]
            raise BusError(
                f"offset {wanted} of {where} is not there: the log holds {first} to {end - 1}",
                hint="retention deleted it, or the topic was made anew: a run that needs it cannot "
                "go on. Set kafka.retention_hours high enough, or leave it out to keep everything",
            )
        if is_unknown_topic(error):
            self._check_topic(partition, error)
            return
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            return  # librdkafka asks for a group although none is used here
        if is_transient(error):
            self._failures(error)
            return
        needs = Right("Topic", partition[0], "Read")
        doing = f"reading {where} at {offset}"
        raise explain(error, self._settings, doing, self._failures, needs=needs)

    def _check_topic(self, partition: Partition, error: KafkaError) -> None:
        """A broker that has just started may not know a topic yet: ask again for a while."""
        since = self._missing_since.setdefault(partition, time.monotonic())
        name, number = partition
        try:
            topic = self._consumer.list_topics(name, timeout=2.0).topics[name]
        except KafkaException:
            return
        if topic.error is None and number in topic.partitions:
            del self._missing_since[partition]
        elif time.monotonic() - since > _TOPIC_GRACE_SECONDS:
            raise explain(error, self._settings, f"reading {name}[{number}]")

    def _check_answering(self) -> None:
        for partition in list(self._missing_since):
            self._check_topic(partition, KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
        down = self._failures.down_since
        if down is None or time.monotonic() - down < self._settings.request_timeout:
            return
        try:
            self._consumer.list_topics(timeout=2.0)
        except KafkaException as exception:
            raise explain(
                kafka_error(exception),
                self._settings,
                f"reading for {time.monotonic() - down:.0f} s",
                self._failures,
            ) from exception
        self._failures.answered()

    def _catch_up_positions(self, partitions: Iterable[Partition]) -> None:
        asked = [KafkaPartition(topic, number) for topic, number in partitions]
        for place in self._consumer.position(asked) if asked else ():
            partition = (place.topic, place.partition)
            if place.offset > self._positions[partition]:
                self._positions[partition] = place.offset

    def _pause(self, partition: Partition, paused: list[KafkaPartition]) -> None:
        # What is written meanwhile need not be held in memory until the others have caught up.
        handle = KafkaPartition(*partition)
        self._consumer.pause([handle])
        paused.append(handle)

    def _late(self, waiting: Mapping[Partition, int], seconds: float) -> DeadlineError:
        partition = max(waiting, key=lambda p: waiting[p] - self._positions[p])
        reason = self._failures.reason()
        return DeadlineError(
            f"reading {partition[0]}[{partition[1]}] from Kafka at "
            f"{self._settings.bootstrap_servers} reached offset {self._positions[partition]} of "
            f"{waiting[partition]} in {seconds:g} s" + (f" ({reason})" if reason else ""),
            hint="the broker is slow or away; try again, or allow more time",
        )

    def _query(
        self, partitions: Iterable[Partition], symbol: int, operation: Operation = "Describe"
    ) -> dict[Partition, int]:
        asked = list(partitions)
        if not asked:
            return {}
        self._await_first_answer()
        return ask_offsets(self._consumer, self._settings, self._failures, asked, symbol, operation)

    def _await_first_answer(self) -> None:
        if not self._answered:
            await_answer(
                lambda timeout: self._consumer.list_topics(timeout=timeout),
                self._serve,
                self._failures,
                self._settings,
                "connecting",
            )
            self._answered = True

    def _serve(self) -> None:
        self._fetched.extend(self._consumer.consume(1, 0))


def _is_end(raw: Any) -> bool:
    """Whether this is no message, but the event that the end of its partition was reached."""
    return raw.error() is not None and raw.error().code() == KafkaError._PARTITION_EOF
