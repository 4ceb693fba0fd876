"""Transactions: records in several topics of which all count or none.

When the block of `transaction()` is left normally the commit is in the log; when it is left by an
exception none of its records is, unless the error says that the outcome is unknown. Only one
process at a time writes under a `transactional_id`: the newest one; an older one gets FencedError
and can change nothing any more (KIP-98).

Kafka itself may leave a transaction unfinished in a partition although it is over: when a broker
restarts just while its markers are to be written, it takes the partition for deleted and skips it.
The next commit under the same id would bring those records to life. So a writer that takes an id
over, or has aborted, first makes sure that nothing lies between the last stable offset and the end
of the partitions that the id writes to, and aborts what does (see `_end_unfinished`).

How errors are treated follows librdkafka's rules for transactions: after a fatal error the writer
is unusable; an abortable one aborts, and the caller starts over from the log; a retriable one is
called again until the deadline. A commit that timed out is never aborted, because it may be under
way on the broker: it is called again.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from dora.bus.access import Right
from dora.bus.failures import called, explain, kafka_error, make_client
from dora.bus.offsets import Partition
from dora.bus.reader import LogReader
from dora.bus.settings import ClusterSettings, client_properties, transactional_properties
from dora.bus.writer import Deliveries
from dora.closeable import Closeable
from dora.errors import AccessError, BusError
from dora.schemas.records import DeadLetter, Record

log = logging.getLogger(__name__)

_CALL_SECONDS = 5.0
_OVERTIME_SECONDS = 15.0


class TransactionAbortedError(BusError):
    """Kafka refused the transaction; nothing of it was written and the writer is usable again.

    The caller reads the log and decides anew. After a record that the broker refused, librdkafka
    may have lost count of its sequence numbers; then the next transaction is aborted too, and the
    one after that works.
    """


class UnknownOutcomeError(BusError):
    """A commit was not answered in time: the log alone says whether it happened.

    The writer is unusable; a new one for the same id settles the matter before it starts.
    """


class _OnlyToAbort(Exception):
    """Leaves a transaction that is made to be aborted."""


class Transaction:
    """What can be done inside `TransactionalWriter.transaction()`."""

    def __init__(self, writer: "TransactionalWriter") -> None:
        self._writer = writer

    def send(
        self,
        topic: str,
        record: Record,
        *,
        key: str | None = None,
        partition: int | None = None,
        trace: str | None = None,
    ) -> None:
        """Add a record; BusError if it is too large or the transaction cannot go on."""
        self._writer._send(topic, record, key, partition, trace)

    def send_offsets(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """Commit a consumer group's offsets (next to read) with the transaction."""
        self._writer._send_offsets(group, offsets)

    def flush(self, timeout: float = 30.0) -> None:
        """Bring what was sent to the brokers now, not committed yet; a commit does so by itself."""
        self._writer._deliveries.flush(timeout)


class TransactionalWriter(Closeable):
    """The one writer under `transactional_id`; making it fences the process that had the id and
    aborts what that one left open in `partitions`, which are all that the id writes to.

    BusError if the cluster does not answer within `connect_timeout`, or refuses. Times in seconds.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        transactional_id: str,
        *,
        client_id: str,
        transaction_timeout: float,
        partitions: Collection[Partition] = (),
    ) -> None:
        self._settings = settings
        self._id = transactional_id
        self._client_id = client_id
        self._own = [Right("TransactionalId", transactional_id, "Write")]
        # after its own timeout the transaction is lost anyway
        self._overtime = min(_OVERTIME_SECONDS, transaction_timeout)
        self._groups: dict[str, Any] = {}
        self._broken: BusError | None = None
        self._written: set[Partition] = set()  # by the transaction under way
        self._suspect: set[Partition] = set(partitions)  # may hold something unfinished
        self._deliveries = Deliveries(
            settings,
            client_id,
            transactional_properties(settings, client_id, transactional_id, transaction_timeout),
        )
        self._producer = self._deliveries.producer
        self._deliveries.connect()
        self._retry(self._producer.init_transactions, f"taking over {transactional_id}")
        self._end_unfinished()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """One transaction: committed at the end of the block, aborted if an exception leaves it.

        Raises FencedError if another process took the id over, TransactionAbortedError if nothing
        was written and the caller may try again, UnknownOutcomeError if only the log can tell.
        """
        self._end_unfinished()
        with self._transaction() as transaction:
            yield transaction

    @contextmanager
    def _transaction(self) -> Iterator[Transaction]:
        if self._broken is not None:
            raise self._broken
        self._deliveries.failed = None
        self._written.clear()
        try:
            self._producer.begin_transaction()
        except KafkaException as exception:
            raise self._fail(kafka_error(exception), f"beginning as {self._id}") from exception
        try:
            yield Transaction(self)
        except BaseException as error:
            if self._broken is None:
                self._abort_after(error)
            raise
        self._commit()

    def _end_unfinished(self) -> None:
        """Abort records under this id that no marker follows, in the partitions that may hold any.

        An abort of this id's writes a marker that ends everything of the id before it. BusError if
        they stay: then they are another producer's.
        """
        if not self._suspect or self._broken is not None:
            return
        suspect = sorted(self._suspect)
        with LogReader(
            self._settings, isolation="read_uncommitted", client_id=self._client_id
        ) as r:
            ends = r.end_offsets(suspect)
        deadline = time.monotonic() + self._settings.request_timeout
        with LogReader(self._settings, client_id=self._client_id) as stable:
            while True:
                reached = stable.end_offsets(suspect)
                open_ = [place for place in suspect if reached[place] < ends[place]]
                if not open_:
                    break
                if time.monotonic() > deadline:
                    topic, number = open_[0]
                    self._broken = BusError(
                        f"{topic}[{number}] holds a transaction from offset {reached[open_[0]]} on "
                        f"that is not finished and that {self._id} cannot end",
                        hint="Another producer left it. Find it with kafka-transactions.sh "
                        "find-hanging and end it with kafka-transactions.sh abort.",
                    )
                    raise self._broken
                self._abort_in(open_, reached)
        self._suspect.clear()

    def _abort_in(self, places: Iterable[Partition], since: Mapping[Partition, int]) -> None:
        for topic, number in places:
            log.warning(
                "%s[%d] holds an unfinished transaction from offset %d on: aborting as %s",
                topic, number, since[topic, number], self._id,
            )  # fmt: skip
        with suppress(_OnlyToAbort), self._transaction() as transaction:
            for topic, number in places:
                void = DeadLetter("", "void", "aborted with what lay before it", self._client_id, 0)
                transaction.send(topic, void, key=self._id, partition=number)
            transaction.flush()
            raise _OnlyToAbort

    def close(self) -> None:
        """Let go of the connections. A transaction left open is aborted by the next holder."""
        self._producer.purge()
        self._deliveries.flush(1.0)
        if self._broken is None:
            self._broken = BusError(f"the writer of {self._id} is closed")

    def _send(
        self,
        topic: str,
        record: Record,
        key: str | None,
        partition: int | None,
        trace: str | None,
    ) -> None:
        if self._broken is not None:
            raise self._broken
        self._deliveries.serve()
        try:
            self._deliveries.raise_failed()
            self._deliveries.send(topic, record, key, partition, trace)
            if partition is not None:
                self._written.add((topic, partition))
        except BusError as error:
            if self._deliveries.failures.fatal is not None:
                self._broken = error
            elif error is self._deliveries.failed and not isinstance(error, AccessError):
                raise TransactionAbortedError(
                    f"nothing was written: {error.message}", hint=error.hint
                ) from error
            raise

    def _send_offsets(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        if group not in self._groups:
            self._groups[group] = self._group_metadata(group)
        places = [KafkaPartition(topic, number, at) for (topic, number), at in offsets.items()]
        doing = f"committing offsets of group {group}"
        metadata = self._groups[group]
        self._retry(
            lambda timeout: self._within(
                lambda: self._producer.send_offsets_to_transaction(places, metadata, timeout),
                timeout + self._overtime,
                doing,
            ),
            doing,
            [
                Right("Group", group, "Read"),
                *(Right("Topic", name, "Read") for name in sorted({t for t, _ in offsets})),
            ],
        )

    def _within(self, call: Callable[[], object], seconds: float, doing: str) -> None:
        """Run `call` in a thread of its own and give it up after `seconds`.

        librdkafka ignores the timeout of this call while the group's coordinator is away, and may
        never return (librdkafka issues 5456 and 5511). The writer is unusable then; nothing of the
        transaction is committed, and the next holder of the id aborts it.
        """
        errors: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - handed over to the caller
                errors.append(error)

        thread = threading.Thread(target=run, name="send-offsets", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            self._broken = BusError(
                f"Kafka at {self._settings.bootstrap_servers} did not answer to {doing} for "
                f"{seconds:g} s; nothing of this transaction took effect",
                hint="start the process again: it goes on where the log ends",
            )
            raise self._broken
        if errors:
            raise errors[0]

    def _group_metadata(self, group: str) -> Any:
        # Only a consumer can make a group's metadata; it need not join the group, nor connect.
        consumer = make_client(
            Consumer,
            {
                **client_properties(self._settings, self._client_id),
                **self._settings.properties,
                "group.id": group,
            },
        )
        try:
            return consumer.consumer_group_metadata()
        finally:
            consumer.close()

    def _commit(self) -> None:
        doing = f"committing as {self._id}"
        deadline = time.monotonic() + self._settings.request_timeout
        while True:
            try:
                called(lambda: self._producer.commit_transaction(_CALL_SECONDS))
                return
            except KafkaException as exception:
                error = kafka_error(exception)
                if error.txn_requires_abort():
                    topics = sorted({topic for topic, _ in self._written})
                    writes = [Right("Topic", topic, "Write") for topic in topics]
                    cause = self._aborted(error, doing, writes)
                    self._abort_after(cause)
                    raise cause from exception
                if error.fatal() or not _may_be_repeated(error):
                    raise self._fail(error, doing) from exception
                if time.monotonic() >= deadline:
                    self._broken = UnknownOutcomeError(
                        f"Kafka at {self._settings.bootstrap_servers} did not answer to "
                        f"{doing} for {self._settings.request_timeout:g} s: {error.str()}",
                        hint="start the process again: it reads from the log what was committed",
                    )
                    raise self._broken from exception

    def _abort_after(self, error: BaseException) -> None:
        if isinstance(error, AccessError):
            # Kafka knows of no transaction where it refused the first thing in it (KIP-890).
            with suppress(BusError):
                self._abort()
        else:
            self._abort()

    def _abort(self) -> None:
        self._suspect |= self._written
        self._retry(self._producer.abort_transaction, f"aborting as {self._id}")
        # Served now, so that failures of the aborted records do not surface in the next block.
        self._deliveries.serve()

    def _retry(
        self, call: Callable[[float], object], doing: str, needs: Sequence[Right] = ()
    ) -> None:
        """Call until it works; raises and marks the writer unusable when it cannot.

        An error that demands an abort is raised as TransactionAbortedError: the block that it
        leaves aborts.
        """
        deadline = time.monotonic() + self._settings.request_timeout
        while True:
            try:
                called(lambda: call(_CALL_SECONDS))
                return
            except KafkaException as exception:
                error = kafka_error(exception)
                self._deliveries.serve()
                if error.txn_requires_abort():
                    raise self._aborted(error, doing, needs) from exception
                if (
                    error.fatal()
                    or not _may_be_repeated(error)
                    or time.monotonic() >= deadline
                    or self._deliveries.failures.hopeless is not None
                ):
                    raise self._fail(error, doing, needs) from exception

    def _aborted(self, error: KafkaError, doing: str, needs: Sequence[Right] = ()) -> BusError:
        """What the caller gets: nothing was written, and it may try again unless it has no right
        to."""
        cause = self._deliveries.failed or explain(
            error, self._settings, doing, self._deliveries.failures, needs=[*needs, *self._own]
        )
        if isinstance(cause, AccessError):
            return cause
        return TransactionAbortedError(f"nothing was written: {cause.message}", hint=cause.hint)

    def _fail(self, error: KafkaError, doing: str, needs: Sequence[Right] = ()) -> BusError:
        self._deliveries.serve()
        self._broken = explain(
            error, self._settings, doing, self._deliveries.failures, needs=[*needs, *self._own]
        )
        return self._broken


def _may_be_repeated(error: KafkaError) -> bool:
    return error.retriable() or error.code() in (
        KafkaError._TIMED_OUT,
        KafkaError._CONFLICT,
        KafkaError._IN_PROGRESS,
    )
