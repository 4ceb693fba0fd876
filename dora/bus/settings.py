"""How clients reach the cluster, and the librdkafka properties that dora sets itself.

A user's properties cannot change what the guarantees rest on (idempotence, isolation, offsets kept
by dora); they can change everything else. Secrets never show in a `repr`.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dora.bus.schema_registry import SchemaRegistry
from dora.config import KafkaSection
from dora.errors import ConfigError

Isolation = Literal["read_committed", "read_uncommitted"]

LOGGER = logging.getLogger("dora.kafka")
"""What librdkafka logs. Without a handler of the application it goes nowhere: what matters is
raised as an error too."""
LOGGER.addHandler(logging.NullHandler())

_REPEAT_SECONDS = 30.0
_SECRET_WORDS = ("password", "secret", "token", "key", "jaas", "oauthbearer.config", "user.info")
_SHORTEST_SECRET = 4
"""Shorter ones would blank out half of the message, and give themselves away by that."""


class _RepeatFilter(logging.Filter):
    """Lets a kind of message pass once in a while: an absent broker is reported at each attempt."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.getMessage()[:60]
        if record.created - self._passed.get(kind, float("-inf")) < _REPEAT_SECONDS:
            return False
        if len(self._passed) > 1000:
            self._passed.clear()
        self._passed[kind] = record.created
        return True


LOGGER.addFilter(_RepeatFilter())

OWN_PROPERTIES = frozenset(
    {
        "acks",
        "auto.offset.reset",
        "bootstrap.servers",
        "client.id",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.gapless.guarantee",
        "enable.idempotence",
        "enable.partition.eof",
        "group.id",
        "isolation.level",
        "max.in.flight",
        "max.in.flight.requests.per.connection",
        "message.max.bytes",
        "request.required.acks",
        "transaction.timeout.ms",
        "transactional.id",
    }
)
"""Properties that a user may not set: dora's guarantees rest on them, or another key sets them."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Address and properties of a cluster. Times in seconds, sizes in bytes.

    With `registry` records are written in Confluent's wire format.
    """

    bootstrap_servers: str
    properties: dict[str, str] = field(default_factory=dict, repr=False)
    connect_timeout: float = 10.0
    request_timeout: float = 120.0
    max_message_bytes: int = 8 * 2**20
    registry: SchemaRegistry | None = field(default=None, repr=False, compare=False)


def cluster_settings(section: KafkaSection) -> ClusterSettings:
    """Settings of the configured cluster; ConfigError without an address or with a property that
    is dora's own."""
    if not section.bootstrap_servers:
        raise ConfigError(
            "kafka.bootstrap_servers is not set",
            hint="give host:port of a broker in the file, with -b, or start one: dora broker start",
        )
    forbidden = sorted(OWN_PROPERTIES & set(section.properties))
    if forbidden:
        raise ConfigError(
            f"kafka.properties must not set {', '.join(forbidden)}",
            hint="exactly-once rests on dora's own values; address, largest record and timeouts "
            "have keys of their own in [kafka]",
        )
    return ClusterSettings(
        bootstrap_servers=section.bootstrap_servers,
        properties={k: v.get_secret_value() for k, v in section.properties.items()},
        connect_timeout=section.connect_timeout_seconds,
        request_timeout=section.request_timeout_seconds,
        max_message_bytes=section.max_message_bytes,
        registry=None
        if section.registry is None
        else SchemaRegistry(
            section.registry,
            connect_timeout=section.connect_timeout_seconds,
            request_timeout=section.request_timeout_seconds,
        ),
    )


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def client_properties(settings: ClusterSettings, client_id: str) -> dict[str, Any]:
    """Properties of every client."""
    return {
        "bootstrap.servers": settings.bootstrap_servers,
        "client.id": client_id,
        "logger": LOGGER,
        "socket.keepalive.enable": True,
        "socket.connection.setup.timeout.ms": max(1000, _milliseconds(settings.connect_timeout)),
        # A broker that restarts should be found again within a second.
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 1000,
        "retry.backoff.max.ms": 1000,
        "allow.auto.create.topics": False,
        # How long a topic may stay unknown before records for it fail.
        "topic.metadata.propagation.max.ms": 10_000,
    }


def consumer_properties(
    settings: ClusterSettings, client_id: str, isolation: Isolation
) -> dict[str, Any]:
    """Properties of a reader that keeps its own offsets.

    `auto.offset.reset=error`: an offset that retention deleted must be an error, never a silent
    jump. `group.id` is demanded by librdkafka; nothing is committed under it.
    """
    largest_fetch = max(50 * 2**20, settings.max_message_bytes + 2**20)
    return {
        **client_properties(settings, client_id),
        "check.crcs": True,
        "fetch.wait.max.ms": 250,
        "fetch.max.bytes": largest_fetch,
        "receive.message.max.bytes": largest_fetch + 2**20,
        "queued.max.messages.kbytes": max(65_536, 2 * settings.max_message_bytes // 1024),
        # By default a reader whose queue was full fetches nothing for a whole second.
        "fetch.queue.backoff.ms": 10,
        **settings.properties,
        "group.id": f"{client_id}.unused",
        "isolation.level": isolation,
        "auto.offset.reset": "error",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
    }


def producer_properties(settings: ClusterSettings, client_id: str) -> dict[str, Any]:
    """Properties of an idempotent writer.

    Deliveries are retried inside librdkafka for `request_timeout`. Callbacks are made for failed
    records only: a Python call per record would cost four times the sending itself.
    """
    return {
        **client_properties(settings, client_id),
        "linger.ms": 5,
        "compression.type": "lz4",
        "queue.buffering.max.messages": 1_000_000,
        "queue.buffering.max.kbytes": max(262_144, 4 * settings.max_message_bytes // 1024),
        "partitioner": "murmur2_random",
        "delivery.timeout.ms": _milliseconds(settings.request_timeout),
        **settings.properties,
        "delivery.report.only.error": True,
        "enable.idempotence": True,
        "acks": "all",
        "message.max.bytes": largest_record(settings),
    }


def transactional_properties(
    settings: ClusterSettings, client_id: str, transactional_id: str, transaction_timeout: float
) -> dict[str, Any]:
    """Properties of a transactional writer: no delivery may outlast its transaction."""
    properties = producer_properties(settings, client_id)
    timeout = _milliseconds(transaction_timeout)
    return {
        **properties,
        "transactional.id": transactional_id,
        "transaction.timeout.ms": timeout,
        "delivery.timeout.ms": min(int(properties["delivery.timeout.ms"]), timeout),
    }


def largest_record(settings: ClusterSettings) -> int:
    """Largest record that the producer accepts: the broker counts the batch's header too."""
    return max(1000, settings.max_message_bytes - 128)


def is_secret(name: str) -> bool:
    """Whether the value of a property may be a secret, or hold one."""
    if name.endswith((".location", ".url")):
        return False
    return any(word in name for word in _SECRET_WORDS)


def redacted(text: str, properties: Mapping[str, Any]) -> str:
    """`text` with the values of secret properties blanked out."""
    for name, value in properties.items():
        if is_secret(name) and isinstance(value, str) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return text
