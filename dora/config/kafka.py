"""The sections `kafka` and `kafka.registry`: the cluster, its topics and its schema registry."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from dora.config.section import Positive, Seconds, Section


class RegistrySection(Section):
    """A schema registry with Confluent's API; records are then written in its wire format."""

    url: str
    """Root of the API, `http://` or `https://`; several, separated by commas, are tried in turn."""
    properties: dict[str, SecretStr] = {}
    """Properties of confluent-kafka's registry client: `basic.auth.user.info` (`user:password`),
    `ssl.ca.location`, `ssl.certificate.location`, `bearer.auth.token` and similar."""
    register_schemas: bool = True
    """Register missing schemas and set their compatibility. With false they must be registered
    already: they are looked up, and a missing one is refused."""

    @field_validator("url")
    @classmethod
    def _addresses(cls, url: str) -> str:
        for each in url.split(","):
            # The text may hold a password: it is not repeated.
            try:
                parts = urlsplit(each.strip())
                host = parts.hostname
                _ = parts.port
            except ValueError as error:
                raise ValueError("kafka.registry.url is no URL") from error
            if parts.scheme not in ("http", "https") or not host:
                raise ValueError("kafka.registry.url must be http://HOST:PORT or https://HOST:PORT")
            if parts.username is not None:
                raise ValueError(
                    "kafka.registry.url must not hold credentials: give them as "
                    'kafka.registry.properties."basic.auth.user.info"'
                )
        return url


class KafkaSection(Section):
    """The Kafka cluster and the shape of the run's topics."""

    bootstrap_servers: str | None = None
    """`host:port,...` of a cluster; without it `dora run` uses the local broker."""
    properties: dict[str, SecretStr] = {}
    """Any librdkafka property, passed to every client (TLS, SASL, OAuth)."""
    registry: RegistrySection | None = None
    """A schema registry; without it records are in Avro's single-object encoding."""
    lanes: Positive = 1
    """Partitions of each version's slot in the chunks and trajectories topics."""
    dispatch_partitions: Annotated[int, Field(ge=2)] = 9
    """Partitions of the dispatch topic: one for admissions, the rest shared by workers by hash."""
    replication_factor: Positive = 1
    """Replicas of every topic; 3 on a real cluster."""
    retention_hours: Annotated[float, Field(gt=0)] | None = None
    """How long trajectories and chunks are kept; without it for ever."""
    max_message_bytes: Annotated[int, Field(ge=1_024)] = 8 * 2**20
    """Largest record in bytes; the topics are created with it."""
    connect_timeout_seconds: Seconds = 10.0
    """How long to wait for the first answer of the cluster."""
    request_timeout_seconds: Seconds = 120.0
    """How long an unanswered request or delivery is retried before the process gives up."""
    transaction_timeout_seconds: Seconds = 60.0
    """After this time the broker aborts the transaction of a silent coordinator or trainer."""
