"""A Kafka with TLS, SASL/SCRAM and ACLs, whose certificates are made here.

One broker has a listener for each way to meet it, right or wrong:

    PLAINTEXT   the tests' own door; whoever comes in there is the super user
    SECURE      SASL_SSL, the one that a run uses
    MUTUAL      SSL, clients prove who they are with a certificate
    EXPIRED     SASL_SSL with a certificate that is past its time
    MISNAMED    SASL_SSL with another host's certificate

Nobody but the super user may do anything unless an ACL says so. Kafka's authorizer logs every
decision to `authorizer.log`.
"""

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from confluent_kafka.admin import (
    AclBindingFilter,
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography.hazmat.primitives import serialization

from dora.broker.directory import BrokerDirectory
from dora.broker.jars import fetch_jars, find_java, ops_directory
from dora.broker.launch import Launch
from dora.broker.local import stop_broker
from dora.broker.process import free_port
from dora.bus import ClusterSettings, cluster_settings
from dora.bus.access import Grant, Right
from dora.bus.acls import AclAdmin, binding
from dora.config import KafkaSection

LISTENERS = {"SECURE": "SASL_SSL", "MUTUAL": "SSL", "EXPIRED": "SASL_SSL", "MISNAMED": "SASL_SSL"}
MECHANISM = "SCRAM-SHA-512"
DEADLINE = 30.0
START_SECONDS = 90.0

_DECISION = re.compile(
    r"Principal = (\S+) is (Allowed|Denied) operation = (\w+) from host = \S+ "
    r"on resource = (\w+):LITERAL:(\S+) for request = (\w+)"
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What the broker's authorizer said to a request."""

    principal: str
    allowed: bool
    operation: str
    resource: str
    name: str
    request: str


@dataclass(frozen=True, slots=True)
class SecuredLaunch(Launch):
    """A start of the local broker with listeners besides its own, and with ACLs."""

    listeners: dict[str, int] = field(default_factory=dict)

    def _write_properties(self, state) -> None:  # type: ignore[no-untyped-def]
        Launch._write_properties(self, state)
        place = self.place
        text = place.properties.read_text()
        names = "".join(f",{name}://127.0.0.1:{port}" for name, port in self.listeners.items())
        protocols = "".join(f",{name}:{kind}" for name, kind in LISTENERS.items())
        for line, more in (
            ("listeners=", names),
            ("advertised.listeners=", names.replace("127.0.0.1", "localhost")),
            ("listener.security.protocol.map=", protocols),
        ):
            text = re.sub(rf"(?m)^{re.escape(line)}.*$", lambda found: found[0] + more, text)  # noqa: B023
        root = place.root.parent
        text += (
            "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer\n"
            "super.users=User:ANONYMOUS\n"
            f"sasl.enabled.mechanisms={MECHANISM}\n"
            "ssl.keystore.type=PEM\nssl.truststore.type=PEM\n"
            f"ssl.truststore.location={root / 'ca.pem'}\n"
            # so that tests can open many connections
            "connection.failed.authentication.delay.ms=0\n"
        )
        scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        for name in LISTENERS:
            prefix = f"listener.name.{name.lower()}"
            text += f"{prefix}.ssl.keystore.location={root / (name.lower() + '.pem')}\n"
            text += f"{prefix}.{MECHANISM.lower()}.sasl.jaas.config={scram}\n"
        text += "listener.name.mutual.ssl.client.auth=required\n"
        place.properties.write_text(text)

    def _java(self, part: Path | None) -> list[str]:
        log4j = self.place.root.parent / "log4j2.properties"
        option = "-Dlog4j2.configurationFile="
        return [
            f"{option}{log4j.as_uri()}" if word.startswith(option) else word
            for word in Launch._java(self, part)
        ]


class SecuredBroker:
    """The running broker: its addresses, its users, its ACLs and what its authorizer decided."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.authority = trustme.CA()
        self.stranger = trustme.CA()
        """An authority that nobody here trusts."""
        self.ca = directory / "ca.pem"
        self.authority.cert_pem.write_to_path(str(self.ca))
        self.wrong_ca = directory / "stranger.pem"
        self.stranger.cert_pem.write_to_path(str(self.wrong_ca))
        past = datetime.now(UTC) - timedelta(days=2)
        for name, host, until in (
            ("secure", "localhost", None),
            ("mutual", "localhost", None),
            ("misnamed", "kafka.example.com", None),
            ("expired", "localhost", past),
        ):
            self.certificate(name, host, not_after=until)
        self.certificate("foreign", "localhost", authority=self.stranger)
        (directory / "log4j2.properties").write_text(_log4j(directory))
        taken: set[int] = set()
        self.ports: dict[str, int] = {}
        for name in LISTENERS:
            self.ports[name] = free_port(taken)
            taken.add(self.ports[name])
        place = BrokerDirectory(directory / "broker")
        place.root.mkdir()
        launch = SecuredLaunch(
            place, find_java(), fetch_jars(), 512, time.monotonic() + START_SECONDS, self.ports
        )
        with place.locked(START_SECONDS):
            self.state = launch.run(place.read_state(), None)
        self.open = f"127.0.0.1:{self.state.port}"
        self._admin = AdminClient({"bootstrap.servers": self.open})
        self._acls = AclAdmin(cluster_settings(KafkaSection(bootstrap_servers=self.open)))
        self._read = 0

    @property
    def place(self) -> Path:
        """The broker's own directory."""
        return self.directory / "broker"

    def address(self, listener: str = "SECURE") -> str:
        """Host and port of a listener."""
        return f"localhost:{self.ports[listener]}"

    def certificate(
        self,
        name: str,
        host: str,
        *,
        not_after: datetime | None = None,
        authority: trustme.CA | None = None,
    ) -> Path:
        """`<name>.pem` with a key (PKCS #8, as Java wants it) and its certificate for `host`."""
        before = None if not_after is None else not_after - timedelta(days=1)
        made = (authority or self.authority).issue_cert(
            host, common_name=host, not_after=not_after, not_before=before
        )
        key = serialization.load_pem_private_key(made.private_key_pem.bytes(), None)
        encoded = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        path = self.directory / f"{name}.pem"
        path.write_bytes(encoded + b"".join(blob.bytes() for blob in made.cert_chain_pems))
        return path

    def add_users(self, passwords: dict[str, str]) -> None:
        """SCRAM users; returns once they can log in."""
        futures = self._admin.alter_user_scram_credentials(
            [
                UserScramCredentialUpsertion(
                    user,
                    ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096),
                    password.encode(),
                )
                for user, password in passwords.items()
            ]
        )
        for future in futures.values():
            future.result(DEADLINE)

    def properties(self, user: str, password: str) -> dict[str, str]:
        """librdkafka properties of a SCRAM user."""
        return {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self.ca),
            "sasl.mechanism": MECHANISM,
            "sasl.username": user,
            "sasl.password": password,
        }

    def admin(self) -> AclAdmin:
        """Gives and takes rights, as the super user."""
        return self._acls

    def revoke(self, grant: Grant) -> None:
        """Take back a right that was granted."""
        allowed = binding(grant)
        same = AclBindingFilter(
            allowed.restype,
            allowed.name,
            allowed.resource_pattern_type,
            allowed.principal,
            allowed.host,
            allowed.operation,
            allowed.permission_type,
        )
        for future in self._admin.delete_acls([same]).values():
            assert future.result(DEADLINE)

    def decisions(self) -> list[Decision]:
        """What the authorizer has decided since the last call."""
        text = (self.directory / "authorizer.log").read_text()
        new, self._read = text[self._read :], len(text)
        return [
            Decision(user, verdict == "Allowed", operation, resource, name, request)
            for user, verdict, operation, resource, name, request in _DECISION.findall(new)
        ]

    def stop(self) -> None:
        """Stop it."""
        stop_broker(self.place, force=True)


def _log4j(directory: Path) -> str:
    """Kafka's log and, in a file of its own, every decision of its authorizer."""
    return (ops_directory() / "log4j2.properties").read_text() + (
        "\nappender.decisions.type = File\n"
        "appender.decisions.name = decisions\n"
        f"appender.decisions.fileName = {directory / 'authorizer.log'}\n"
        "appender.decisions.layout.type = PatternLayout\n"
        "appender.decisions.layout.pattern = %m%n\n"
        "logger.authorizer.name = kafka.authorizer.logger\n"
        "logger.authorizer.level = debug\n"
        "logger.authorizer.additivity = false\n"
        "logger.authorizer.appenderRef.decisions.ref = decisions\n"
    )


def settings_of(
    broker: SecuredBroker, user: str, password: str, *, listener: str = "SECURE", **changes: object
) -> ClusterSettings:
    """How a user meets the broker."""
    section = KafkaSection.model_validate(
        {
            "bootstrap_servers": broker.address(listener),
            "properties": broker.properties(user, password),
            **changes,
        }
    )
    return cluster_settings(section)


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    """The session's secured broker."""
    broker = SecuredBroker(tmp_path_factory.mktemp("secured") / "kafka")
    try:
        yield broker
    finally:
        broker.stop()


def names(rights: Iterable[Right]) -> set[tuple[str, str, str]]:
    """Operation, resource and name, in the words of the authorizer's log."""
    return {(_upper(right.operation), right.resource, right.name) for right in rights}


def _upper(operation: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", operation).upper()
