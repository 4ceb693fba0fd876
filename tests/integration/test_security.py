"""Meeting a secured cluster the wrong way, and being refused by it: one message, soon, with what to
do; and no secret in anything that dora says."""

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dora.bus import (
    ClusterSettings,
    LogReader,
    LogWriter,
    RunTopics,
    TopicAdmin,
    TransactionalWriter,
    cluster_settings,
)
from dora.bus.access import Grant, Operation, Right
from dora.bus.acls import AclAdmin
from dora.bus.tls_probe import tls_problem
from dora.bus.topics import TopicSpec
from dora.config import KafkaSection
from dora.errors import AccessError, BusError
from dora.schemas.records import DeadLetter
from tests.secured_broker import DEADLINE, SecuredBroker, settings_of
from tests.small_run import dora, refused
from tests.waiting import until

PASSWORD = "canary-correct-271828"
WRONG = "canary-wrong-161803"
CONNECT = 10.0


@pytest.fixture
def user(secured: SecuredBroker) -> str:
    """A user without any right."""
    name = f"user-{uuid.uuid4().hex[:8]}"
    secured.add_users({name: PASSWORD})
    return name


Meeting = Callable[[SecuredBroker, str], dict[str, str]]


def tls(broker: SecuredBroker, user: str, **changes: str) -> dict[str, str]:
    names = {key.replace("_", "."): value for key, value in changes.items()}
    return broker.properties(user, PASSWORD) | names


def own(broker: SecuredBroker, name: str) -> dict[str, str]:
    """Properties of a client that shows the certificate `name`."""
    return {
        "security.protocol": "SSL",
        "ssl.ca.location": str(broker.ca),
        "ssl.certificate.location": str(broker.directory / f"{name}.pem"),
        "ssl.key.location": str(broker.directory / f"{name}.pem"),
    }


WRONG_WAYS: dict[str, tuple[str, Meeting, int, tuple[str, ...]]] = {
    "expired certificate": (
        "EXPIRED", tls, 1, ("no TLS connection", "the broker's certificate has expired"),
    ),
    "other host": (
        "MISNAMED", tls, 1,
        ("no TLS connection", "the broker's certificate is for another host than localhost"),
    ),
    "unknown authority": (
        "SECURE", lambda b, u: tls(b, u, ssl_ca_location=str(b.wrong_ca)), 1,
        ("no TLS connection", "no authority in ssl.ca.location has signed the broker's"),
    ),
    "no such authority": (
        "SECURE", lambda b, u: tls(b, u, ssl_ca_location=str(b.directory / "gone.pem")), 2,
        ("ssl.ca.location names", "gone.pem, which cannot be read"),
    ),
    "wrong password": (
        "SECURE", lambda b, u: b.properties(u, WRONG), 1,
        ("refused the credentials of User:user-", "invalid credentials", "sasl.password"),
    ),
    "unknown user": (
        "SECURE", lambda b, u: b.properties("nobody", PASSWORD), 1,
        ("refused the credentials of User:nobody",),
    ),
    "other mechanism": (
        "SECURE", lambda b, u: tls(b, u, sasl_mechanism="PLAIN"), 1,
        ("refused the credentials", "supported mechanisms: SCRAM-SHA-512"),
    ),
    "no such mechanism": (
        "SECURE", lambda b, u: tls(b, u, sasl_mechanism="SCRAM-SHA-3"), 2,
        ("a Kafka property is not accepted", "SCRAM-SHA-3"),
    ),
    "no security at all": (
        "SECURE", lambda b, u: {}, 1, ("speaks TLS, and this client does not", "SASL_SSL"),
    ),
    "passwords without TLS": (
        "SECURE", lambda b, u: tls(b, u, security_protocol="SASL_PLAINTEXT"), 1,
        ("speaks TLS, and this client does not", "set security.protocol to SASL_SSL"),
    ),
    "no certificate of its own": (
        "MUTUAL", lambda b, u: {"security.protocol": "SSL", "ssl.ca.location": str(b.ca)}, 1,
        ("the cluster wants a certificate of this client, which has none",),
    ),
    "own certificate expired": (
        "MUTUAL", lambda b, u: own(b, "expired"), 1,
        ("this client's certificate has expired",),
    ),
    "own certificate of a stranger": (
        "MUTUAL", lambda b, u: own(b, "foreign"), 1,
        ("the cluster refuses this client's certificate",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WRONG_WAYS)
def test_meeting_the_cluster_the_wrong_way_ends_soon_with_the_reason(
    secured: SecuredBroker, user: str, tmp_path: Path, way: str
) -> None:
    listener, meeting, code, parts = WRONG_WAYS[way]
    file = tmp_path / "client.properties"
    file.write_text("".join(f"{k}={v}\n" for k, v in meeting(secured, user).items()))
    began = time.monotonic()
    ended = dora("status", "demo", "-b", secured.address(listener), "--kafka-config", str(file))
    took = time.monotonic() - began
    refused(ended, code, *parts)
    assert "canary" not in ended.output
    # librdkafka's own retrying lasts as long as the connect timeout, and a look at why is short
    assert took < CONNECT + 10, f"{took:.1f} s"


def inline(broker: SecuredBroker, name: str) -> dict[str, str]:
    """The same, with the certificate and its key in the properties themselves."""
    text = (broker.directory / f"{name}.pem").read_text()
    key, begin, certificate = text.partition("-----BEGIN CERTIFICATE")
    return {
        "security.protocol": "SSL",
        "ssl.ca.location": str(broker.ca),
        "ssl.certificate.pem": begin + certificate,
        "ssl.key.pem": key,
    }


@pytest.mark.parametrize("told", [own, inline])
def test_a_client_is_known_by_its_certificate(
    secured: SecuredBroker, told: Callable[[SecuredBroker, str], dict[str, str]]
) -> None:
    address, properties = secured.address("MUTUAL"), told(secured, "mutual")
    with TopicAdmin(ClusterSettings(address, properties)) as admin:
        assert admin.cluster_id() == secured.state.cluster_id
    assert tls_problem(address, properties) is None


def test_a_client_whose_certificate_cannot_be_shown_hears_what_the_cluster_said(
    secured: SecuredBroker,
) -> None:
    properties = inline(secured, "expired")
    settings = ClusterSettings(secured.address("MUTUAL"), properties, connect_timeout=6.0)
    with pytest.raises(AccessError, match=r"no TLS connection.*alert") as caught:
        TopicAdmin(settings).ping()
    assert "BEGIN" not in str(caught.value)


@pytest.mark.parametrize("word", ["false", "False", "f", "0"])
def test_a_certificate_is_no_problem_where_none_is_checked(
    secured: SecuredBroker, word: str
) -> None:
    properties = {"security.protocol": "SSL", "enable.ssl.certificate.verification": word}
    assert tls_problem(secured.address("EXPIRED"), properties) is None


def test_authorities_may_lie_in_a_directory(secured: SecuredBroker, tmp_path: Path) -> None:
    properties = {"security.protocol": "SSL", "ssl.ca.location": str(tmp_path)}
    problem = tls_problem(secured.address(), properties)
    assert problem is not None
    assert "no authority in ssl.ca.location has signed" in problem


def test_tls_without_a_name_where_the_cluster_wants_one_is_asked_about(
    secured: SecuredBroker,
) -> None:
    properties = {"security.protocol": "SSL", "ssl.ca.location": str(secured.ca)}
    settings = ClusterSettings(secured.address(), properties, connect_timeout=2.0)
    with pytest.raises(
        BusError, match=r"did not answer while connecting for 2 s.*SASL_SSL is silent too"
    ):
        TopicAdmin(settings).ping()


@pytest.fixture
def asked(secured: SecuredBroker, user: str) -> Iterator["Asked"]:
    """A run's topics that the user may not use."""
    made = Asked(secured, user)
    with TopicAdmin(made.root) as admin:
        admin.create([TopicSpec(name, 1, {}) for name in made.topics.all])
        with LogWriter(made.root, client_id="test") as writer:
            writer.send(made.topics.steps, made.record, partition=0)
        yield made
        admin.delete(made.topics.run)


class Asked:
    """A user, what it has been granted, and what it does."""

    def __init__(self, broker: SecuredBroker, user: str) -> None:
        self.broker, self.user = broker, user
        self.topics = RunTopics(f"asked-{user}")
        self.record = DeadLetter(self.topics.run, "code", "reason", "test", 0)
        self.settings = settings_of(broker, user, PASSWORD, request_timeout_seconds=30)
        self.root = cluster_settings(KafkaSection(bootstrap_servers=broker.open))

    def may(self, operation: Operation, topic: str) -> Right:
        """Grant a right on a topic; it counts when this returns."""
        right = Right("Topic", topic, operation)
        self.grant(right)
        return right

    def grant(self, right: Right) -> None:
        with self.broker.admin() as admin:
            admin.grant([Grant("test", f"User:{self.user}", right)])
        if right.resource != "TransactionalId":
            with AclAdmin(self.settings) as mine:
                until(lambda: not mine.lacking([right]), f"{right} to count", DEADLINE)

    def read(self, topic: str) -> None:
        with LogReader(self.settings, client_id="test") as reader:
            reader.assign({(topic, 0): 0})
            assert list(reader.read_to_end(30))

    def write(self, topic: str) -> None:
        with LogWriter(self.settings, client_id="test") as writer:
            writer.send(topic, self.record, key="test")

    def commit(self, topic: str, offsets: dict[tuple[str, int], int] | None = None) -> None:
        with (
            TransactionalWriter(
                self.settings, self.topics.run, client_id="test", transaction_timeout=30
            ) as writer,
            writer.transaction() as transaction,
        ):
            transaction.send(topic, self.record, partition=0)
            if offsets:
                transaction.send_offsets(self.topics.run, offsets)

    def lacks(self, action: Callable[[], object], right: str) -> None:
        """The action is refused in these words."""
        with pytest.raises(AccessError) as caught:
            action()
        assert f"User:{self.user} lacks {right}" in caught.value.message
        assert "dora topics acls RUN" in (caught.value.hint or "")
        assert PASSWORD not in str(caught.value)
        assert caught.value.permanent


def test_reading_without_the_right_names_user_operation_and_topic(asked: Asked) -> None:
    steps = asked.topics.steps
    asked.lacks(lambda: asked.read(steps), f"Describe on Topic {steps}")
    asked.may("Describe", steps)
    asked.lacks(lambda: asked.read(steps), f"Read on Topic {steps}")
    asked.may("Read", steps)
    asked.read(steps)


def test_a_run_that_may_not_be_seen_is_not_said_to_be_missing(asked: Asked) -> None:
    with TopicAdmin(asked.settings) as admin:
        asked.lacks(lambda: _raise(admin.unknown_run(asked.topics.run)), "Describe on Topic ")
        asked.may("Describe", asked.topics.steps)
        asked.lacks(lambda: admin.describe(asked.topics.run), "Describe on Topic ")


def test_writing_without_the_right_names_user_operation_and_topic(asked: Asked) -> None:
    chunks, workers = asked.topics.chunks, asked.topics.workers
    asked.may("Describe", chunks)
    asked.lacks(lambda: asked.write(chunks), f"Write on Topic {chunks}")  # to no topic at all
    asked.may("Write", workers)
    asked.write(workers)
    asked.lacks(lambda: asked.write(chunks), f"Write on Topic {chunks}")
    asked.lacks(lambda: asked.write(asked.topics.steps), f"Write on Topic {asked.topics.steps}")


def test_a_transaction_without_the_rights_names_what_is_lacking_and_is_not_repeated(
    asked: Asked,
) -> None:
    run, workers = asked.topics.run, asked.topics.workers
    asked.lacks(lambda: asked.commit(workers), f"Write on TransactionalId {run}")
    transactional = Right("TransactionalId", run, "Write")
    asked.grant(transactional)
    asked.may("Describe", workers)

    def known() -> bool:
        with pytest.raises(AccessError) as caught:
            asked.commit(workers)
        return "TransactionalId" not in caught.value.message

    until(known, "the transactional id to be granted", DEADLINE)
    asked.lacks(lambda: asked.commit(workers), f"Write on Topic {workers}")
    asked.may("Write", workers)
    asked.commit(workers)
    offsets = {(workers, 0): 1}
    asked.lacks(lambda: asked.commit(workers, offsets), f"Read on Group {run}")
    asked.grant(Right("Group", run, "Read"))
    asked.lacks(lambda: asked.commit(workers, offsets), f"Read on Topic {workers}")
    asked.may("Read", workers)
    asked.commit(workers, offsets)


def test_creating_and_deleting_without_the_right_names_it(asked: Asked) -> None:
    new = f"{asked.topics.run}.new"
    with TopicAdmin(asked.settings) as admin:
        asked.lacks(lambda: admin.create([TopicSpec(new, 1, {})]), f"Describe on Topic {new}")
        asked.may("Describe", new)
        asked.lacks(lambda: admin.create([TopicSpec(new, 1, {})]), f"Create on Topic {new}")
        asked.may("Describe", asked.topics.steps)
        asked.lacks(lambda: admin.delete(asked.topics.run), "Delete on Topic ")


def _raise(error: Exception) -> None:
    raise error


SECRET = "canary-27182818"
"""In every secret that is given below."""

TELLING: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "-X without a value": (("-X", SECRET), {}, "not of the form KEY=VALUE"),
    "misspelt property": (
        ("-X", f"sasl.pasword={SECRET}"), {}, 'No such configuration property: "sasl.pasword"',
    ),
    "a key that is none": (
        ("-X", "security.protocol=SSL", "-X", f"ssl.key.pem={SECRET}"),
        {}, "ssl.key.pem failed: not in PEM format",
    ),
    "OAuth that is none": (
        ("-X", "sasl.mechanism=OAUTHBEARER", "-X", f"sasl.oauthbearer.config={SECRET}",
         "-X", "enable.sasl.oauthbearer.unsecure.jwt=true", "-X", "security.protocol=SASL_SSL"),
        {}, "",
    ),
    "misspelt variable": (
        (), {"DORA_KAFKA__PROPERTY__SASL_PASSWORD": SECRET}, "unknown key",
    ),
    "everything logged": (
        ("-X", "debug=all", "-X", f"sasl.password={SECRET}", "-X", "sasl.username=user",
         "-X", "security.protocol=SASL_SSL", "-X", "sasl.mechanism=SCRAM-SHA-512",
         "-X", f"ssl.key.password={SECRET}"),
        {}, "certificate",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", TELLING)
def test_no_message_and_no_log_tells_a_secret(
    secured: SecuredBroker, caplog: pytest.LogCaptureFixture, tmp_path: Path, way: str
) -> None:
    options, environment, part = TELLING[way]
    caplog.set_level("DEBUG", "dora.kafka")
    ended = dora("status", "demo", "-b", secured.address(), *options, env=environment)
    assert ended.exit_code in (1, 2)
    assert part in ended.stderr
    assert SECRET not in ended.output
    assert SECRET not in caplog.text
    assert SECRET not in repr(ended.exception)


@pytest.mark.parametrize(
    "text",
    [
        "[kafka]\nsasl_password = '{}'\n",
        "[kafka.properties]\nsasl.password = ['{}']\n",
        "[kafka.properties]\nsasl.password = {}\n",
        "[kafka]\npropertys = {{ 'sasl.password' = '{}' }}\n",
    ],
)
def test_a_wrong_configuration_tells_no_secret(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nname = 'demo'\n" + text.format(SECRET))
    ended = dora("coordinator", str(file), "-b", "localhost:1")
    refused(ended, 2)
    assert SECRET not in ended.output


def test_a_damaged_file_of_properties_tells_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text(f"security.protocol=SASL_SSL\nsasl.password {SECRET}\n")
    ended = dora("status", "demo", "-b", "localhost:1", "--kafka-config", str(file))
    refused(ended, 2, "line 2: not of the form key=value")
    assert SECRET not in ended.output
