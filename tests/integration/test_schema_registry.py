"""Records under the ids of a real schema registry (Apicurio), and a registry that is away, refuses,
forbids, or knows other schemas."""

import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme
from confluent_kafka import Producer
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from dora.broker.process import free_port
from dora.bus import (
    ClusterSettings,
    LogReader,
    LogWriter,
    Message,
    TopicAdmin,
    TopicSpec,
    Unreadable,
    cluster_settings,
)
from dora.bus.schema_registry import COMPATIBILITY, SchemaRegistry
from dora.config import KafkaSection
from dora.config.kafka import RegistrySection
from dora.errors import ConfigError, DoraError, RegistryError, RegistryRefusal
from dora.schemas.codec import encode
from dora.schemas.registry import FULL_NAMES, RECORD_TYPES, current_text
from tests.brokers import Cluster
from tests.factories import admission, policy, trajectory
from tests.http_server import Handler, served
from tests.raw_log import raw_messages
from tests.registry_front import Front, registry_front
from tests.schema_registry import Registry

DEADLINE = 60.0
GOOD = trajectory(admission(1, 0))


@pytest.fixture
def front(registry: Registry, run_name: str) -> Iterator[Front]:
    with registry_front(registry.url, run_name) as found:
        yield found


def reached(
    front: Front | str, *, seconds: float = DEADLINE, later: float = DEADLINE, **keys: object
) -> SchemaRegistry:
    """The registry as a process sees it."""
    url = front if isinstance(front, str) else front.url
    section = RegistrySection.model_validate({"url": url, **keys})
    return SchemaRegistry(section, connect_timeout=seconds, request_timeout=later)


def client(front: Front) -> SchemaRegistryClient:
    """Somebody else's view of it."""
    return SchemaRegistryClient({"url": front.url})


def spoiled(record: str, **field: object) -> Schema:
    """The schema of a record with one more field."""
    text = json.loads(current_text(record))
    text["fields"].append(field)
    return Schema(json.dumps(text), "AVRO")


def refused(kind: type[DoraError], call: Callable[[], object], *parts: str) -> DoraError:
    with pytest.raises(DoraError) as caught:
        call()
    assert type(caught.value) is kind
    said = " ".join(str(caught.value).split())
    for part in parts:
        assert part in said, f"{part!r} is not in: {said}"
    return caught.value


def test_every_schema_is_registered_and_checked_for_compatibility(front: Front) -> None:
    framing = reached(front).prepare()
    theirs = client(front)
    assert sorted(theirs.get_subjects()) == sorted(FULL_NAMES)
    for subject, name in FULL_NAMES.items():
        assert theirs.get_compatibility(subject) == COMPATIBILITY
        latest = theirs.get_latest_version(subject)
        prefix = framing.prefixes[RECORD_TYPES[name]]
        assert prefix == b"\0" + latest.schema_id.to_bytes(4, "big")
        assert latest.schema.schema_str == current_text(name)
    # Another process finds the same ids and changes nothing.
    front.asked.clear()
    assert reached(front).prepare().prefixes == framing.prefixes
    changes = [each for each in front.asked if each.startswith("PUT") or "/versions" in each]
    assert changes == []


def test_a_past_version_stays_and_the_current_one_is_added(front: Front) -> None:
    history = Path(__file__).parents[2] / "dora/schemas/avro/history/chunk.1.avsc"
    past = client(front).register_schema("dora.v1.Chunk", Schema(history.read_text(), "AVRO"))
    used = reached(front)
    number = int.from_bytes(used.prepare().prefixes[RECORD_TYPES["chunk"]][1:], "big")
    assert number != past
    assert client(front).get_versions("dora.v1.Chunk") == [1, 2]


def test_an_incompatible_schema_under_the_subject_is_refused_with_the_registrys_reason(
    front: Front,
) -> None:
    client(front).register_schema("dora.v1.Step", spoiled("step", name="cost", type="int"))
    error = refused(
        RegistryRefusal,
        reached(front).prepare,
        "refused registering dora.v1.Step: another schema is registered there",
        "cost",
        "HTTP status 409",
        "these subjects are dora's own",
    )
    assert error.permanent


def test_a_user_who_may_not_write_uses_what_is_registered(front: Front) -> None:
    before = reached(front).prepare().prefixes
    front.read_only = True
    assert reached(front).prepare().prefixes == before
    assert reached(front, register_schemas=False).prepare().prefixes == before


def test_a_user_who_may_not_write_is_told_what_is_missing(front: Front) -> None:
    for subject in FULL_NAMES:
        client(front).set_compatibility(subject, COMPATIBILITY)
    front.read_only = True
    parts = ("does not allow registering dora.v1.Admission", "denied", "dora topics create CONFIG")
    refused(RegistryRefusal, reached(front).prepare, *parts)
    front.read_only = False
    parts = ("does not have this version's schema of dora.v1.Admission", "register_schemas")
    refused(RegistryRefusal, reached(front, register_schemas=False).prepare, *parts)
    assert client(front).get_subjects() == []


def test_a_weaker_compatibility_that_may_not_be_changed_is_refused(front: Front) -> None:
    reached(front).prepare()
    client(front).set_compatibility("dora.v1.Policy", "BACKWARD")
    front.read_only = True
    parts = ("compatibility of dora.v1.Policy", "is BACKWARD, not FULL_TRANSITIVE", "denied")
    refused(RegistryRefusal, reached(front).prepare, *parts)
    refused(RegistryRefusal, reached(front, register_schemas=False).prepare, *parts[:2])
    front.read_only = False
    reached(front).prepare()
    assert client(front).get_compatibility("dora.v1.Policy") == COMPATIBILITY


def test_the_same_schema_written_differently_is_taken_where_nothing_may_be_registered(
    front: Front,
) -> None:
    for subject, name in FULL_NAMES.items():
        client(front).set_compatibility(subject, COMPATIBILITY)
        client(front).register_schema(subject, Schema(f" {current_text(name)}\n", "AVRO"))
    front.read_only = True
    latest = client(front).get_latest_version("dora.v1.Step")
    for used in (reached(front), reached(front, register_schemas=False)):
        prefix = used.prepare().prefixes[RECORD_TYPES["step"]]
        assert prefix == b"\0" + latest.schema_id.to_bytes(4, "big")


def test_a_registry_that_is_away_is_named_with_what_to_check() -> None:
    url = f"http://127.0.0.1:{free_port(set())}"
    error = refused(
        RegistryError,
        reached(url, seconds=1.0).prepare,
        f"the schema registry at {url} did not answer while connecting for",
        "Connection refused",
        "kafka.registry.url",
    )
    assert not error.permanent


def test_a_registry_that_hangs_or_has_no_time_is_given_up_after_a_while() -> None:
    over = threading.Event()

    class Troubled(Handler):
        def do_GET(self) -> None:
            if self.path.startswith("/hangs"):
                over.wait(DEADLINE)
            self.answer(503, b'{"message": "no time"}')

    with served(Troubled) as url:
        parts = ("did not answer while connecting for", "no time (HTTP status 503)")
        refused(RegistryError, reached(url, seconds=0.5).prepare, *parts)
        refused(RegistryError, reached(f"{url}/hangs", seconds=0.5).prepare, parts[0], "timed out")
        over.set()


def test_a_registry_that_starts_late_is_waited_for(front: Front) -> None:
    front.stop()
    used = reached(front)
    with pytest.raises(RegistryError):
        reached(front, seconds=0.3).ping()
    front.start()
    assert used.prepare().prefixes


def test_another_server_at_the_address_is_no_registry(registry: Registry) -> None:
    root = registry.url.partition("/apis/")[0]
    refused(
        RegistryRefusal,
        reached(f"{root}/apis/elsewhere").prepare,
        "does not answer as a schema registry",
        "HTTP status 404",
        "/apis/ccompat/v7",
    )


@pytest.mark.parametrize("content", [b"<html>welcome</html>", b'{"status": "up"}', b"[]", b""])
def test_a_server_that_answers_something_else_is_no_registry_and_not_waited_for(
    content: bytes,
) -> None:
    class Elsewhere(Handler):
        def do_GET(self) -> None:
            self.answer(200, content)

    with served(Elsewhere) as url:
        refused(
            RegistryRefusal,
            reached(url).prepare,
            f"{url} does not answer as a schema registry",
            "/apis/ccompat/v7",
        )


def test_a_wrong_password_is_refused_without_being_told(front: Front) -> None:
    front.password = "ann:right"
    keys = {"properties": {"basic.auth.user.info": "ann:wrong-secret"}}
    parts = ("refused the credentials (ann)", "HTTP status 401")
    error = refused(RegistryRefusal, reached(front, **keys).prepare, *parts)
    refused(RegistryRefusal, reached(front, **keys).ping, *parts)
    assert "wrong-secret" not in str(error) + repr(reached(front, **keys).__dict__)
    refused(RegistryRefusal, reached(front).prepare, "refused the credentials (no user name)")
    right = {"properties": {"basic.auth.user.info": "ann:right"}}
    assert reached(front, **right).prepare().prefixes


def test_tls_needs_the_right_authority(registry: Registry, run_name: str, tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    other.cert_pem.write_to_path(str(tmp_path / "other.pem"))
    with registry_front(registry.url, run_name, context) as front:

        def with_authority(path: Path) -> SchemaRegistry:
            return reached(front, properties={"ssl.ca.location": str(path)})

        assert with_authority(tmp_path / "ca.pem").prepare().prefixes
        parts = ("no TLS connection", "certificate", "ssl.ca.location")
        refused(RegistryError, with_authority(tmp_path / "other.pem").prepare, *parts)
        parts = ("ssl.ca.location names", "none.pem, which cannot be read")
        refused(ConfigError, with_authority(tmp_path / "none.pem").prepare, *parts)
        (tmp_path / "no.pem").write_text("no certificate")
        refused(ConfigError, with_authority(tmp_path / "no.pem").prepare, "is not accepted")


def test_properties_that_are_unknown_or_doras_own_are_refused(front: Front) -> None:
    keys = {"properties": {"basic.auth.usr.info": "ann:secret"}}
    error = refused(ConfigError, reached(front, **keys).prepare, "basic.auth.usr.info")
    assert "secret" not in str(error)
    for name in ("url", "retries.wait.ms"):
        with pytest.raises(ConfigError, match=rf"must not set {name}\s.*kafka\.registry\.url"):
            reached(front, properties={name: "1"})


@pytest.fixture
def topic(run_name: str, settings: ClusterSettings) -> str:
    name = f"{run_name}.trajectories"
    with TopicAdmin(settings) as admin:
        admin.create([TopicSpec(name, 1, {})])
    return name


@pytest.fixture
def over(kafka: Cluster, front: Front) -> ClusterSettings:
    """A process's settings with the registry."""
    return settings_over(kafka, front)


def settings_over(kafka: Cluster, front: Front, later: float = DEADLINE) -> ClusterSettings:
    section = {
        "bootstrap_servers": kafka.bootstrap_servers,
        "connect_timeout_seconds": DEADLINE,
        "request_timeout_seconds": later,
        "registry": {"url": front.url},
    }
    return cluster_settings(KafkaSection.model_validate(section))


def put(kafka: Cluster, topic: str, *values: bytes) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for value in values:
        producer.produce(topic, value, key="k", partition=0)
    assert producer.flush(DEADLINE) == 0


def read(settings: ClusterSettings, topic: str, begin: int = 0) -> list[Message]:
    with LogReader(settings, client_id="test") as reader:
        reader.assign({(topic, 0): begin})
        return list(reader.read_to_end(DEADLINE))


def test_records_go_through_kafka_and_other_peoples_tools_read_them(
    kafka: Cluster, front: Front, over: ClusterSettings, topic: str
) -> None:
    with LogWriter(over, client_id="test") as writer:
        writer.send(topic, GOOD, key="g1/0", partition=0)
    put(kafka, topic, encode(GOOD))
    both = read(settings_over(kafka, front), topic)
    assert [message.value for message in both] == [GOOD, GOOD]

    value = next(raw_messages(kafka.bootstrap_servers, topic)).value()
    deserialized = AvroDeserializer(client(front))(
        value, SerializationContext(topic, MessageField.VALUE)
    )
    assert deserialized["trajectory_id"] == GOOD.trajectory_id
    assert deserialized["token_ids"] == GOOD.token_ids
    assert deserialized["sampling"]["temperature"] == GOOD.sampling.temperature


def test_without_the_registry_doras_own_records_are_an_error_and_others_unreadable(
    kafka: Cluster, over: ClusterSettings, topic: str, settings: ClusterSettings
) -> None:
    put(kafka, topic, b"\0\0\0\0\x07\x08")
    with LogWriter(over, client_id="test") as writer:
        writer.send(topic, GOOD, partition=0)
    with LogReader(settings, client_id="test") as reader:
        reader.assign({(topic, 0): 0})
        messages = reader.read_to_end(DEADLINE)
        value = next(messages).value
        assert isinstance(value, Unreadable) and value.code == "no_registry"
        assert "id 7" in value.reason and "kafka.registry.url or --registry" in value.reason
        parts = (f"{topic}[0] offset 1 is written with id", "DORA_KAFKA__REGISTRY__URL")
        refused(ConfigError, lambda: next(messages), *parts)


def test_foreign_ids_are_unreadable_and_the_rest_is_read(
    kafka: Cluster, front: Front, over: ClusterSettings, topic: str
) -> None:
    foreign = client(front).register_schema("orders", Schema('{"type":"record","name":"Order",'
        '"fields":[{"name":"price","type":"int"}]}', "AVRO"))  # fmt: skip
    with LogWriter(over, client_id="test") as writer:
        writer.send(topic, GOOD, partition=0)
        writer.flush(DEADLINE)
        put(
            kafka, topic,
            b"\0" + foreign.to_bytes(4, "big") + b"\x08",
            b"\0" + (2_000_000_000).to_bytes(4, "big") + b"x",
            b"\0\0\0",
            b"\0\xff\xff\xff\xffx",
        )  # fmt: skip
        writer.send(topic, GOOD, partition=0)
    values = [message.value for message in read(settings_over(kafka, front), topic)]
    assert values[0] == values[-1] == GOOD and len(values) == 6
    said = [
        f"{value.code}: {value.reason}" for value in values[1:-1] if isinstance(value, Unreadable)
    ]
    assert re.search(rf"unknown_schema: schema {foreign} of .* is an Avro schema, not", said[0])
    assert "unknown_schema" in said[1] and "has no schema with id 2000000000" in said[1]
    assert said[2].startswith("truncated") and "no id of a schema registry" in said[3]


def test_a_newer_doras_records_are_read_with_the_schema_from_the_registry(
    kafka: Cluster, front: Front, over: ClusterSettings, topic: str
) -> None:
    assert over.registry is not None
    over.registry.prepare()
    newer = spoiled("policy", name="remark", type="string", default="")
    number = client(front).register_schema("dora.v1.Policy", newer)
    record = policy(3)
    body = encode(record)[10:] + b"\x08note"
    put(kafka, topic, b"\0" + number.to_bytes(4, "big") + body)
    assert [message.value for message in read(over, topic)] == [record]


def test_a_registry_that_goes_away_stops_nobody_who_knows_the_ids(
    kafka: Cluster, front: Front, over: ClusterSettings, topic: str
) -> None:
    with LogWriter(over, client_id="test") as writer:
        writer.send(topic, GOOD, partition=0)
        writer.flush(DEADLINE)
        front.stop()
        writer.send(topic, GOOD, partition=0)
        writer.flush(DEADLINE)
        with LogWriter(over, client_id="another") as another:
            another.send(topic, GOOD, partition=0)
    assert [message.value for message in read(over, topic)] == [GOOD] * 3


def test_an_unknown_id_waits_for_a_registry_that_is_away_and_nothing_is_lost(
    kafka: Cluster, front: Front, over: ClusterSettings, topic: str
) -> None:
    with LogWriter(over, client_id="test") as writer:
        for _ in range(3):
            writer.send(topic, GOOD, partition=0)
    put(kafka, topic, encode(GOOD))
    front.stop()
    fresh = settings_over(kafka, front)
    with LogReader(fresh, client_id="test") as reader:
        reader.assign({(topic, 0): 0})
        # What has arrived waits, and so does its place.
        until = time.monotonic() + DEADLINE
        while not reader._fetched:
            assert time.monotonic() < until
            assert reader.poll(timeout=0.1) == []
        assert reader.poll(timeout=0.2) == [] and reader.positions() == {(topic, 0): 0}
        front.start()
        found: list[Message] = []
        while len(found) < 4:
            assert time.monotonic() < until
            found += reader.poll(timeout=0.1)
        assert [message.value for message in found] == [GOOD] * 4
        assert [message.offset for message in found] == [0, 1, 2, 3]
        assert reader.positions() == {(topic, 0): 4}


def test_a_registry_that_stays_away_is_an_error_not_an_unreadable_record(
    kafka: Cluster, front: Front, over: ClusterSettings, topic: str
) -> None:
    with LogWriter(over, client_id="test") as writer:
        writer.send(topic, GOOD, partition=0)
    impatient = settings_over(kafka, front, later=1.0)
    assert impatient.registry is not None
    impatient.registry.ping()
    front.stop()
    refused(RegistryError, lambda: read(impatient, topic), "did not answer while asking for schema")
    front.start()
    assert [message.value for message in read(impatient, topic)] == [GOOD]
