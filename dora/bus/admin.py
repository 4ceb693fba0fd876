"""What all administration of a cluster shares: the client, its first answer and its errors."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from dora.bus.access import Right
from dora.bus.failures import Failures, await_answer, explain, kafka_error, make_client
from dora.bus.settings import (
    ClusterSettings,
    client_properties,
    consumer_properties,
    producer_properties,
    transactional_properties,
)
from dora.closeable import Closeable
from dora.errors import DeadlineError

_OVERTIME_SECONDS = 30.0

Result = TypeVar("Result")


class Admin(Closeable):
    """Base of the clients that administer a cluster.

    Every method raises BusError if the cluster does not answer within `connect_timeout` seconds or
    refuses. Creating one raises ConfigError for a property that readers or writers would refuse, so
    that this is known before anything is made.
    """

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._failures = Failures()
        properties = {**client_properties(settings, "dora-admin"), **settings.properties}
        self._admin: AdminClient = make_client(
            AdminClient, {**properties, "error_cb": self._failures}
        )
        check_properties(settings)
        self._answered = False

    def ping(self) -> None:
        """BusError, naming the address, unless the cluster answers within `connect_timeout`."""
        await_answer(
            lambda timeout: self._admin.list_topics(timeout=timeout),
            lambda: self._admin.poll(0),
            self._failures,
            self._settings,
            "connecting",
        )
        self._answered = True

    def cluster_id(self) -> str:
        """Id of the cluster."""
        return str(self._metadata().cluster_id)

    def close(self) -> None:
        """Let go of the connections."""
        self._admin.poll(0)

    def _metadata(self) -> Any:
        if not self._answered:
            self.ping()
        try:
            return self._admin.list_topics(timeout=self._settings.connect_timeout)
        except KafkaException as exception:
            self._admin.poll(0)
            raise explain(
                kafka_error(exception), self._settings, "listing topics", self._failures
            ) from exception

    def _answer(self, future: "Future[Result]", doing: str) -> Result:
        """The result; librdkafka keeps its own deadline unless it is stuck."""
        seconds = self._settings.request_timeout + _OVERTIME_SECONDS
        try:
            return future.result(seconds)
        except TimeoutError:
            raise DeadlineError(
                f"Kafka at {self._settings.bootstrap_servers} did not answer to {doing} for "
                f"{seconds:g} s",
                hint="look at the broker's log",
            ) from None

    def _result(
        self, future: "Future[Result]", doing: str, needs: Right | Sequence[Right] = ()
    ) -> Result:
        try:
            return self._answer(future, doing)
        except KafkaException as exception:
            self._admin.poll(0)
            raise explain(
                kafka_error(exception), self._settings, doing, self._failures, needs=needs
            ) from exception


def check_properties(settings: ClusterSettings) -> None:
    """ConfigError for a property that a reader or writer with `settings` would refuse; nothing is
    asked of the cluster."""
    if not settings.properties:
        return
    name, timeout = "properties", settings.request_timeout
    make_client(Consumer, consumer_properties(settings, name, "read_committed")).close()
    make_client(Producer, producer_properties(settings, name))
    make_client(Producer, transactional_properties(settings, name, name, timeout))


class ClusterProbe:
    """Asks a broker that may still be starting which cluster it belongs to."""

    def __init__(self, address: str) -> None:
        self._client = AdminClient({"bootstrap.servers": address, "log_level": 0})

    def cluster_id(self, timeout: float) -> str | None:
        """The cluster's id; None without an answer within `timeout` seconds."""
        try:
            return self._client.list_topics(timeout=timeout).cluster_id
        except KafkaException:
            return None
