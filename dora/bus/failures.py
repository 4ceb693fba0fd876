"""librdkafka's errors as `dora.errors`.

Each names the cluster's address, what was being done and what to do about it. Errors that
librdkafka retries by itself (a broker that is away for a while) are not raised, but kept for the
message of a deadline that passes later.
"""

import os
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from dora.bus.access import CLUSTER, Resource, Right, principal_of
from dora.bus.settings import ClusterSettings, redacted
from dora.bus.tls_probe import speaks_tls, tls_problem, uses_tls
from dora.errors import AccessError, BusError, ConfigError, FencedError, TopicError

Client = TypeVar("Client")
Answer = TypeVar("Answer")

_FENCED = {
    KafkaError._FENCED,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
}
_REFUSED = {KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED}
_FORBIDDEN = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_RESOURCES: dict[int, Resource] = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "Topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "Group",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "TransactionalId",
}
_NO_IDEMPOTENCE = Right("Cluster", CLUSTER, "IdempotentWrite")
"""What a producer needs that may Write to no topic at all (KIP-679)."""
_UNKNOWN_TOPIC = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_TOPIC_ID,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
}
_UNREACHABLE = {
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TRANSPORT,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._MSG_TIMED_OUT,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.NETWORK_EXCEPTION,
    -137,  # _DESTROY_BROKER: the connection was given up under a request
}
_MOVING = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
}
"""A partition's leadership moves, or was just given: the client must only ask again."""
_SETTLING = {
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.BROKER_NOT_AVAILABLE,
}
_FILES = (
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.crl.location",
    "ssl.key.location",
    "ssl.keystore.location",
    "sasl.kerberos.keytab",
)
_NO_TLS = ("SSL handshake failed", "SSL alert number")


def is_unknown_topic(error: KafkaError) -> bool:
    """Whether the cluster says that it has no such topic or partition."""
    return error.code() in _UNKNOWN_TOPIC


def is_transient(error: KafkaError) -> bool:
    """Whether librdkafka goes on trying by itself after this error."""
    if error.fatal() or is_hopeless(error):
        return False
    return error.code() in _UNREACHABLE | _MOVING or error.retriable()


def is_passing(error: KafkaError) -> bool:
    """Whether the same request may be answered later, with or without librdkafka's own trying."""
    return is_transient(error) or error.code() in _SETTLING


def is_hopeless(error: KafkaError) -> bool:
    """Whether no amount of waiting helps: wrong credentials, certificates or rights.

    Rights on groups are not among them: librdkafka asks for its reader's group on its own account.
    """
    return error.code() in _REFUSED | _FORBIDDEN | {KafkaError._SSL}


def is_forbidden(error: KafkaError) -> bool:
    """Whether the cluster says that this principal may not do that."""
    return error.code() in _FORBIDDEN | {KafkaError.GROUP_AUTHORIZATION_FAILED}


class Failures:
    """What a client reported on its own (its `error_cb`), called from the client's poll."""

    def __init__(self) -> None:
        self.last: KafkaError | None = None
        self.last_connection: KafkaError | None = None
        self.hopeless: KafkaError | None = None
        self.fatal: KafkaError | None = None
        self.down_since: float | None = None

    def __call__(self, error: KafkaError) -> None:
        """Remember an error."""
        self.last = error
        if error.fatal():
            self.fatal = error
        if is_hopeless(error):
            self.hopeless = error
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            if self.down_since is None:
                self.down_since = time.monotonic()
        else:
            self.last_connection = error

    def answered(self) -> None:
        """The cluster answered: what was wrong before is over."""
        self.down_since = None
        self.hopeless = None

    def reason(self) -> str:
        """The last thing that went wrong, in librdkafka's words; empty if nothing did."""
        error = self.fatal or self.hopeless or self.last_connection or self.last
        return error.str() if error is not None else ""


def explain(
    error: KafkaError,
    settings: ClusterSettings,
    doing: str,
    seen: Failures | None = None,
    *,
    needs: Right | Sequence[Right] = (),
) -> BusError:
    """The error to raise for `error`, which happened while `doing` (a gerund with its object).

    `needs` are the rights that this takes. AccessError for what no waiting helps with:
    certificates, credentials and rights.
    """
    if seen is not None and seen.fatal is not None and error.code() not in _FENCED:
        error = seen.fatal
    elif seen is not None and seen.hopeless is not None and error.code() in _UNREACHABLE:
        error = seen.hopeless
    address = settings.bootstrap_servers
    code, text = error.code(), redacted(error.str(), settings.properties)
    if code in _FENCED:
        return FencedError(
            f"another process took over while {doing}",
            hint="this process must stop: the newest holder of the role has it (or this one was "
            "silent for longer than kafka.transaction_timeout_seconds)",
        )
    if code in _REFUSED:
        return AccessError(
            f"Kafka at {address} refused the credentials of {principal_of(settings.properties)}: "
            f"{text}",
            hint="check security.protocol, sasl.mechanism, sasl.username and sasl.password",
        )
    reason = redacted(seen.reason(), settings.properties) if seen is not None else ""
    no_tls = any(words in reason for words in _NO_TLS)
    if code == KafkaError._SSL or (code in _UNREACHABLE and no_tls):
        why = tls_problem(address, settings.properties)
        return _no_tls(settings, why or (reason if no_tls else text))
    if is_forbidden(error):
        return _forbidden(error, settings, doing, (needs,) if isinstance(needs, Right) else needs)
    if code in _UNKNOWN_TOPIC:
        return TopicError(
            f"{doing} failed: Kafka at {address} has no such topic or partition ({text})",
            hint="check the run's name with: dora topics describe RUN",
        )
    if code in _UNREACHABLE:
        silent = seen is not None and seen.last_connection is None
        if silent and settings.properties.get("security.protocol", "").lower() == "ssl":
            reason = "a cluster that wants SASL_SSL is silent too"
        detail = f" ({reason})" if reason and reason != text else ""
        return BusError(
            f"Kafka at {address} did not answer while {doing}: {text}{detail}",
            hint="check that the broker runs and is reachable from here, and security.protocol",
        )
    return BusError(f"{doing} failed at Kafka {address}: {text} ({error.name()})")


def _no_tls(settings: ClusterSettings, why: str) -> AccessError:
    return AccessError(
        f"no TLS connection to Kafka at {settings.bootstrap_servers}: {why}",
        hint="check security.protocol, ssl.ca.location and whether this is the TLS port",
    )


def missing_rights(
    settings: ClusterSettings, rights: Sequence[Right], doing: str, *, certain: bool = True
) -> AccessError:
    """The error that says who may not do what; `rights` holds at least one, of which all are
    missing if that is `certain`, else one or more."""
    principal = principal_of(settings.properties)
    kinds: dict[str, list[str]] = {}
    for right in rights:
        kinds.setdefault(f"{right.operation} on {right.resource}", []).append(right.name)
    lacked = "; ".join(f"{kind} {', '.join(names)}" for kind, names in kinds.items())
    who = shlex.quote(principal) if principal.startswith("User:") else "User:NAME"
    alone = f"kafka-acls.sh --add --allow-principal {who} {rights[0].options}"
    return AccessError(
        f"Kafka at {settings.bootstrap_servers} does not allow {doing}: {principal} lacks "
        + ("" if certain or len(rights) == 1 else "one of these: ")
        + lacked,
        hint="what each role needs, and how to grant it: dora topics acls RUN"
        + (f"; this right alone: {alone}" if len(rights) == 1 else ""),
    )


def _forbidden(
    error: KafkaError, settings: ClusterSettings, doing: str, needs: Sequence[Right]
) -> AccessError:
    resource, text = _RESOURCES.get(error.code()), redacted(error.str(), settings.properties)
    if resource is None:
        possible = list(needs) or [_NO_IDEMPOTENCE]
    else:
        possible = [right for right in needs if right.resource == resource]
    if possible:
        named = [
            right for right in possible if f"{right.name}[" in text or f"{right.name}(" in text
        ]
        return missing_rights(settings, named or possible, doing, certain=bool(named))
    principal = principal_of(settings.properties)
    return AccessError(
        f"Kafka at {settings.bootstrap_servers} does not allow {principal} {doing}: {text}",
        hint="what each role needs, and how to grant it: dora topics acls RUN",
    )


def kafka_error(exception: KafkaException) -> KafkaError:
    """The KafkaError inside an exception."""
    error: KafkaError = exception.args[0]
    return error


def called(call: Callable[[], Answer]) -> Answer:
    """What `call` returns, which may run callbacks; KafkaException if the client fails.

    confluent_kafka raises its fatal error from whatever call reports it. Where a delivery is
    reported in the same call, Python sees that callback run with an error in hand and makes a
    SystemError of it.
    """
    try:
        return call()
    except SystemError as error:
        if isinstance(error.__cause__, KafkaException):
            raise error.__cause__ from None
        raise


def make_client(make: Callable[[dict[str, Any]], Client], properties: dict[str, Any]) -> Client:
    """A client; ConfigError naming the property that librdkafka does not know or accept, or whose
    file is missing."""
    for name, value in properties.items():
        if name in _FILES and value != "probe" and not os.access(value, os.R_OK):
            raise ConfigError(
                f"a Kafka property is not accepted: {name} names {value}, which cannot be read",
                hint="relative paths start where the command runs",
            )
    try:
        return make(properties)
    except KafkaException as exception:
        text = redacted(kafka_error(exception).str(), properties)
        raise ConfigError(
            f"a Kafka property is not accepted: {text}",
            hint="names and values of properties: librdkafka's CONFIGURATION.md",
        ) from None
    except (TypeError, ValueError) as error:
        text = redacted(str(error), properties)
        raise ConfigError(f"a Kafka property is not accepted: {text}") from None


def _refused_connection(settings: ClusterSettings) -> AccessError | None:
    """What librdkafka retries although it never works: TLS on one side only, or certificates."""
    servers, properties = settings.bootstrap_servers, settings.properties
    if uses_tls(properties):
        why = tls_problem(servers, properties)
        return None if why is None else _no_tls(settings, why)
    if not speaks_tls(servers):
        return None
    protocol = properties.get("security.protocol", "PLAINTEXT")
    wanted = "SASL_SSL" if protocol.lower().startswith("sasl") else "SSL or SASL_SSL"
    return AccessError(
        f"Kafka at {servers} speaks TLS, and this client does not (security.protocol={protocol})",
        hint=f"set security.protocol to {wanted}, or use the cluster's other port",
    )


def await_answer(
    probe: Callable[[float], object],
    serve: Callable[[], object],
    failures: Failures,
    settings: ClusterSettings,
    doing: str,
) -> None:
    """Call `probe(timeout)` until the cluster answers; BusError after `connect_timeout` seconds.

    Wrong credentials or certificates end it at once, and so does a port that speaks TLS to a client
    that does not. `serve` runs the client's callbacks.
    """
    deadline = time.monotonic() + settings.connect_timeout
    probed = False
    while True:
        remaining = deadline - time.monotonic()
        try:
            probe(max(0.01, min(0.5, remaining)))
            failures.answered()
            return
        except KafkaException as exception:
            serve()
            cause = kafka_error(exception)
            if failures.hopeless is not None or not is_transient(cause):
                raise explain(cause, settings, doing, failures) from exception
            if not probed:
                probed = True
                if (refusal := _refused_connection(settings)) is not None:
                    raise refusal from exception
            if time.monotonic() >= deadline:
                waited = f"{doing} for {settings.connect_timeout:g} s"
                raise explain(cause, settings, waited, failures) from exception
