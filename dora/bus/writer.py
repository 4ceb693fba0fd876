"""Writing records.

A record that was sent is in the log exactly once, in the order of sending within its partition;
after a delivery failed, every further call raises. Deliveries are retried for `request_timeout`
seconds while a broker is away.
"""

import itertools
import time
import uuid
from typing import Any
from urllib.parse import quote

from confluent_kafka import KafkaError, KafkaException, Producer

from dora.bus.access import Right
from dora.bus.failures import Failures, await_answer, called, explain, kafka_error, make_client
from dora.bus.settings import ClusterSettings, largest_record, producer_properties
from dora.closeable import Closeable
from dora.errors import BusError, DeadlineError
from dora.schemas.codec import encode
from dora.schemas.records import Record
from dora.schemas.registry import RECORD_NAMES

_QUEUE_FULL_WAIT_SECONDS = 0.05
_FLUSH_TURN_SECONDS = 0.1
_CLOSE_SECONDS = 10.0

Headers = list[tuple[str, str | bytes | None]]


class HeaderMaker:
    """CloudEvents 1.0 headers (Kafka protocol binding, binary content mode) for one writer.

    `ce_id` is unique within `ce_source`: a random start and a count. The source is a URI reference,
    whatever the writer is called. `traceparent` is that of W3C Trace Context.
    """

    def __init__(self, client_id: str) -> None:
        self._client = quote(client_id, safe="")
        self._start = uuid.uuid4().hex[:16]
        self._count = itertools.count()
        self._fixed: dict[tuple[type[Any], str], Headers] = {}

    def headers(self, record: Record, trace: str | None) -> Headers:
        """Headers of one record."""
        kind = type(record)
        fixed = self._fixed.get((kind, record.run))
        if fixed is None:
            fixed = [
                ("ce_specversion", b"1.0"),
                ("ce_type", f"dora.{RECORD_NAMES[kind]}.v1".encode()),
                ("ce_source", f"/dora/{record.run}/{self._client}".encode()),
                ("content-type", b"avro/binary"),
            ]
            self._fixed[kind, record.run] = fixed
        identity = ("ce_id", f"{self._start}-{next(self._count)}".encode())
        if trace is None:
            return [*fixed, identity]
        return [*fixed, identity, ("traceparent", trace.encode())]


class Deliveries:
    """Hands records to a producer and keeps the first failed delivery.

    Shared by `LogWriter` and the transactional one. `doing` in messages is "writing TOPIC".
    """

    def __init__(
        self, settings: ClusterSettings, client_id: str, properties: dict[str, Any]
    ) -> None:
        self.settings = settings
        self.failures = Failures()
        self.failed: BusError | None = None
        self._failed_size = 0
        self._topics: set[str] = set()  # that were written to
        self._headers = HeaderMaker(client_id)
        # Before the first record every schema has its id; a registry that refuses ends it here.
        self._framing = None if settings.registry is None else settings.registry.prepare()
        self.producer: Producer = make_client(
            Producer, {**properties, "error_cb": self.failures, "on_delivery": self._on_delivery}
        )

    def serve(self, timeout: float = 0.0) -> None:
        """Run the callbacks, waiting up to `timeout` seconds for the first.

        The client raises a fatal error from its poll; it is kept, and raised by `raise_failed`.
        """
        try:
            called(lambda: self.producer.poll(timeout))
        except KafkaException as exception:
            self.failures(kafka_error(exception))

    def flush(self, timeout: float) -> int:
        """Wait for outstanding deliveries; the number of those left after `timeout` seconds.

        By polls: the client's own flush goes on with callbacks after its fatal error, which then
        may get lost.
        """
        until = time.monotonic() + timeout
        while (left := len(self.producer)) and self.failures.fatal is None:
            wait = until - time.monotonic()
            if wait <= 0:
                break
            self.serve(min(wait, _FLUSH_TURN_SECONDS))
        return left

    def connect(self) -> None:
        """BusError if the cluster does not answer within `connect_timeout`."""
        await_answer(
            lambda timeout: self.producer.list_topics(timeout=timeout),
            self.serve,
            self.failures,
            self.settings,
            "connecting",
        )

    def send(
        self,
        topic: str,
        record: Record,
        key: str | None,
        partition: int | None,
        trace: str | None,
    ) -> None:
        """Queue a record; waits while the queue is full, BusError after `request_timeout`."""
        value = encode(record, self._framing)
        where: dict[str, Any] = {} if partition is None else {"partition": partition}
        headers = self._headers.headers(record, trace)
        self._topics.add(topic)
        deadline: float | None = None
        while True:
            try:
                self.producer.produce(topic, value, key, headers=headers, **where)
                return
            except BufferError as full:
                now = time.monotonic()
                deadline = deadline or now + self.settings.request_timeout
                if now >= deadline:
                    raise BusError(
                        f"the queue of records for Kafka at {self.settings.bootstrap_servers} has "
                        f"been full for {self.settings.request_timeout:g} s while writing {topic}"
                        f" ({self.failures.reason() or 'no error reported'})",
                        hint="the broker is away, or slower than what is written to it",
                    ) from full
                self.serve(_QUEUE_FULL_WAIT_SECONDS)
                self.raise_failed()
            except KafkaException as exception:
                self.serve()
                raise self._failure(kafka_error(exception), topic, key, len(value)) from exception

    def raise_failed(self) -> None:
        """Raise the first failed delivery, if there is one."""
        if self.failed is not None:
            raise self.failed
        if self.failures.fatal is not None:
            needs = [Right("Topic", topic, "Write") for topic in sorted(self._topics)]
            raise explain(self.failures.fatal, self.settings, "writing", self.failures, needs=needs)

    def _on_delivery(self, error: KafkaError | None, message: Any) -> None:
        # Records that a failure or an abort throws out of the queue are its consequence.
        if error is None or error.code() in (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT):
            return
        size = len(message.value() or b"")
        # A batch is refused as a whole: the largest of its records is the one that is too large.
        if self.failed is None or (
            error.code() == KafkaError.MSG_SIZE_TOO_LARGE and size > self._failed_size
        ):
            key = message.key()
            name = None if key is None else key.decode("utf-8", "replace")
            self.failed = self._failure(error, message.topic(), name, size)
            self._failed_size = size

    def _failure(self, error: KafkaError, topic: str, key: str | None, size: int) -> BusError:
        name = f"a record of {topic}" + ("" if key is None else f" with key {key}")
        if error.code() in (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE):
            return BusError(
                f"{name} takes {size} bytes; Kafka at {self.settings.bootstrap_servers} is used "
                f"with records of at most {largest_record(self.settings)}: {error.str()}",
                hint="raise kafka.max_message_bytes, and max.message.bytes of the topic if it "
                "exists already (and the cluster's limit, if it is lower)",
            )
        doing = f"writing {name} ({size} bytes)"
        needs = Right("Topic", topic, "Write")
        return explain(error, self.settings, doing, self.failures, needs=needs)


class LogWriter(Closeable):
    """Idempotent writer without transactions, for chunks, trajectories and status."""

    def __init__(self, settings: ClusterSettings, *, client_id: str) -> None:
        self._deliveries = Deliveries(settings, client_id, producer_properties(settings, client_id))
        self._closed = False

    def connect(self) -> None:
        """Optional: BusError now, not after `request_timeout`, if the cluster does not answer."""
        self._deliveries.connect()

    def send(
        self,
        topic: str,
        record: Record,
        *,
        key: str | None = None,
        partition: int | None = None,
        trace: str | None = None,
    ) -> None:
        """Queue a record for its partition (by hash of the key if none is given).

        Raises BusError if it is too large, or if an earlier delivery failed. Failures of deliveries
        are noticed by `poll`, `flush` and `send` itself.
        """
        self._deliveries.raise_failed()
        self._deliveries.send(topic, record, key, partition, trace)

    def poll(self) -> None:
        """Let librdkafka report; BusError if a delivery failed. Call it between sends."""
        self._deliveries.serve()
        self._deliveries.raise_failed()

    def flush(self, deadline: float) -> None:
        """Wait until everything sent is acknowledged by all in-sync replicas.

        BusError if a delivery failed, DeadlineError after `deadline` seconds.
        """
        left = self._deliveries.flush(deadline)
        self._deliveries.raise_failed()
        if left:
            reason = self._deliveries.failures.reason()
            raise DeadlineError(
                f"{left} records were not acknowledged by Kafka at "
                f"{self._deliveries.settings.bootstrap_servers} within {deadline:g} s"
                + (f" ({reason})" if reason else ""),
                hint="the broker is slow or away; they are sent as long as this process lives",
            )

    def close(self, deadline: float = _CLOSE_SECONDS) -> None:
        """Flush and close the connections; raises like `flush`."""
        if self._closed:
            return
        self._closed = True
        try:
            self.flush(deadline)
        finally:
            self._deliveries.producer.purge()
            self._deliveries.flush(1.0)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            self._deliveries.flush(_CLOSE_SECONDS)
