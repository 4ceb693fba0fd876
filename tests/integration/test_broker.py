"""The local broker: started, found again, stopped without loss, and clear about what it lacks."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from dora.broker.directory import BrokerDirectory, BrokerState, escaped_property, new_cluster_id
from dora.broker.jars import JARS_VARIABLE, cache_directory, fetch_jars, find_java, java_command
from dora.broker.local import broker_log, broker_process, running_broker, start_broker, stop_broker
from dora.broker.process import port_free
from dora.cli.main import cli
from dora.errors import BrokerError, UsageError

DEADLINE = 60.0
RECORDS = [f"record {number}".encode() for number in range(1000)]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A directory for a broker (one with a space and an umlaut), which is stopped at the end."""
    path = tmp_path / "a bröker"
    yield path
    # Without logs none was ever started.
    if (path / "logs").exists():
        stop_broker(path, force=True)


@pytest.fixture
def some_jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Jars that nobody may get to run: for refusals that come before Java starts."""
    jars = tmp_path / "jars"
    jars.mkdir()
    (jars / "kafka_2.13-4.3.1.jar").touch()
    monkeypatch.setenv(JARS_VARIABLE, str(jars))
    return jars


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory on the PATH, empty."""
    path = tmp_path / "bin"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.delenv(JARS_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def dora(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def create_topic(address: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": address})
    for future in admin.create_topics([NewTopic(topic, 1, 1)]).values():
        future.result(DEADLINE)


def produce(address: str, topic: str) -> None:
    failures: list[object] = []
    producer = Producer({"bootstrap.servers": address, "acks": "all", "linger.ms": 5})
    for record in RECORDS:
        producer.produce(
            topic, record, on_delivery=lambda error, _: failures.append(error) if error else None
        )
    assert producer.flush(DEADLINE) == 0
    assert not failures


def consume(address: str, topic: str) -> list[bytes]:
    consumer = Consumer(
        {"bootstrap.servers": address, "group.id": "test", "enable.auto.commit": False}
    )
    try:
        _, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=DEADLINE)
        consumer.assign([TopicPartition(topic, 0, 0)])
        values: list[bytes] = []
        until = time.monotonic() + DEADLINE
        while len(values) < end and time.monotonic() < until:
            for message in consumer.consume(500, 0.2):
                assert message.error() is None
                values.append(message.value())
        return values
    finally:
        consumer.close()


def test_what_was_acknowledged_survives_a_stop_and_a_kill(directory: Path) -> None:
    first = start_broker(directory)
    assert start_broker(directory) == first == running_broker(directory)
    create_topic(first.bootstrap_servers, "kept")
    produce(first.bootstrap_servers, "kept")

    assert stop_broker(directory)
    assert broker_process(directory) is None
    assert running_broker(directory) is None
    assert not stop_broker(directory)
    # Kafka marks data that it wrote down completely; without the mark a start recovers the log.
    assert (directory / "data" / ".kafka_cleanshutdown").exists()
    assert "App info kafka.server for 1 unregistered" in broker_log(directory, 5)[-1]

    second = start_broker(directory)
    assert second.pid != first.pid
    # Clients find it again without being told.
    assert second.bootstrap_servers == first.bootstrap_servers
    assert second.cluster_id == first.cluster_id
    assert consume(second.bootstrap_servers, "kept") == RECORDS

    os.kill(second.pid, signal.SIGKILL)
    until = time.monotonic() + DEADLINE
    while running_broker(directory) is not None:
        assert time.monotonic() < until
    third = start_broker(directory)
    assert third.bootstrap_servers == first.bootstrap_servers
    assert consume(third.bootstrap_servers, "kept") == RECORDS

    with pytest.raises(BrokerError, match="runs already") as refusal:
        start_broker(directory, port=1)
    assert "dora broker stop" in str(refusal.value)


def test_two_starts_at_once_give_one_broker_that_outlives_them(directory: Path) -> None:
    command = [sys.executable, "-m", "dora", "broker", "start", "--json", "--dir", str(directory)]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [json.loads(start.communicate(timeout=DEADLINE * 2)[0]) for start in starts]
    assert said[0] == said[1]
    assert said[0]["running"] is True

    status = dora("broker", "status", "--json", "--dir", str(directory))
    assert status.exit_code == 0
    assert json.loads(status.stdout) == said[0]
    admin = AdminClient({"bootstrap.servers": said[0]["bootstrap_servers"]})
    assert admin.list_topics(timeout=DEADLINE).cluster_id == said[0]["cluster_id"]
    # A mistyped name must not make a topic.
    missing = admin.list_topics("never-created", timeout=DEADLINE).topics["never-created"]
    assert missing.error is not None
    assert "never-created" not in admin.list_topics(timeout=DEADLINE).topics

    assert dora("broker", "stop", "--dir", str(directory)).exit_code == 0
    status = dora("broker", "status", "--dir", str(directory))
    assert status.exit_code == 1
    assert "dora broker start" in status.stdout


def test_a_start_that_dies_shows_what_kafka_said(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jars = fetch_jars()
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    dying = 'case "$*" in *kafka.Kafka*) echo "no memory for you"; exit 3;; esac'
    script(java, f'{dying}\nexec "{java_command()}" "$@"')
    monkeypatch.setenv("JAVA_HOME", str(java.parents[1]))
    monkeypatch.setenv(JARS_VARIABLE, str(jars))
    with pytest.raises(BrokerError, match="ended while it started") as failure:
        start_broker(directory)
    assert "no memory for you" in str(failure.value)
    assert str(directory / "logs") in str(failure.value)
    assert broker_log(directory)[-1] == "no memory for you"

    # Data that Kafka itself refuses: the error is in its log, not on its console.
    monkeypatch.delenv("JAVA_HOME")
    (directory / "data" / "meta.properties").write_text(
        (directory / "data" / "meta.properties").read_text().replace("version=1", "version=7")
    )
    with pytest.raises(BrokerError, match="ended while it started") as failure:
        start_broker(directory)
    assert "version" in str(failure.value)
    assert running_broker(directory) is None


def test_a_port_in_use_is_refused(directory: Path, some_jars: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(BrokerError, match=f"port {port} on 127.0.0.1 is in use") as refusal:
            start_broker(directory, port=port)
        assert "--port" in str(refusal.value)
        assert not port_free(port)
    assert not (directory / "data").exists()


def test_without_java_the_message_says_how_to_get_it(directory: Path, programs: Path) -> None:
    with pytest.raises(BrokerError, match="needs Java, and there is none") as refusal:
        start_broker(directory)
    assert "openjdk-17" in str(refusal.value)
    assert not directory.exists()


@pytest.mark.parametrize("version", ['openjdk version "11.0.2" 2019-01-15', 'java version "1.8.0"'])
def test_an_old_java_is_refused_with_its_version(programs: Path, version: str) -> None:
    script(programs / "java", f"echo '{version}' >&2")
    with pytest.raises(BrokerError, match=r"needs Java 17 or newer, but .*java is Java (11|8)"):
        java_command()


def test_a_java_that_does_not_work_is_refused_with_its_words(programs: Path) -> None:
    script(programs / "java", "echo 'Unable to locate a Java Runtime' >&2; exit 1")
    with pytest.raises(BrokerError, match=r"does not work: .* Unable to locate a Java Runtime"):
        java_command()


def test_java_home_is_used_before_the_path(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(programs / "java", "echo 'openjdk version \"17.0.1\"' >&2")
    home = tmp_path / "jdk"
    (home / "bin").mkdir(parents=True)
    script(home / "bin" / "java", "echo 'openjdk version \"21-ea\"' >&2")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert find_java().version == "21-ea"
    script(home / "bin" / "java", "echo 'openjdk version \"11\"' >&2")
    assert find_java().path == str(programs / "java")


def test_without_maven_the_message_says_how_to_get_it(programs: Path) -> None:
    script(programs / "java", "echo 'openjdk version \"17.0.1\"' >&2")
    with pytest.raises(BrokerError, match=r"needs Maven \(`mvn`\)") as refusal:
        fetch_jars()
    assert "apt install maven" in str(refusal.value)


def test_a_failed_download_says_why_and_leaves_nothing(programs: Path) -> None:
    script(programs / "java", "echo 'openjdk version \"17.0.1\"' >&2")
    script(
        programs / "mvn",
        'for word in "$@"; do case "$word" in -DoutputDirectory=*)\n'
        ': > "${word#*=}/kafka-clients.jar";; esac; done\n'
        "echo '[ERROR] Could not transfer artifact: Connection refused'; exit 1",
    )
    with pytest.raises(BrokerError, match="Could not transfer artifact: Connection refused"):
        fetch_jars()
    assert [path for path in cache_directory().iterdir() if path.is_dir()] == []


def test_jars_are_fetched_once_and_whole(programs: Path) -> None:
    script(programs / "java", "echo 'openjdk version \"17.0.1\"' >&2")
    script(
        programs / "mvn",
        'for word in "$@"; do case "$word" in -DoutputDirectory=*)\n'
        ': > "${word#*=}/kafka_2.13-4.3.1.jar";; esac; done',
    )
    jars = fetch_jars()
    assert [path.name for path in jars.iterdir()] == ["kafka_2.13-4.3.1.jar"]
    (programs / "mvn").unlink()
    assert fetch_jars() == jars


def test_a_foreign_directory_is_refused_and_left_alone(directory: Path) -> None:
    directory.mkdir()
    (directory / "thesis.tex").write_text("precious")
    with pytest.raises(BrokerError, match=r"not a broker's directory: it holds thesis\.tex"):
        start_broker(directory)
    assert [path.name for path in directory.iterdir()] == ["thesis.tex"]


def test_data_without_a_state_file_is_refused_and_left_alone(
    directory: Path, some_jars: Path
) -> None:
    (directory / "data").mkdir(parents=True)
    (directory / "data" / "precious").touch()
    with pytest.raises(BrokerError, match=r"no broker\.json"):
        start_broker(directory)
    assert (directory / "data" / "precious").exists()


def test_a_file_in_place_of_the_directory_is_refused(directory: Path) -> None:
    directory.write_text("")
    with pytest.raises(BrokerError, match="is not a directory"):
        start_broker(directory)


def test_a_path_that_kafka_would_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match="comma"):
        start_broker(tmp_path / "a,b")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kafka_version": "4"}', '{"cluster_id": 1}'])
def test_a_damaged_state_file_is_refused(directory: Path, text: str) -> None:
    directory.mkdir()
    (directory / "broker.json").write_text(text)
    for command in (start_broker, stop_broker, running_broker):
        with pytest.raises(BrokerError, match=r"broker\.json is damaged"):
            command(directory)
    assert (directory / "broker.json").read_text() == text


def recorded(directory: Path, meta: str | None) -> BrokerState:
    """A directory as a stopped broker leaves it, with this `meta.properties`."""
    place = BrokerDirectory(directory)
    place.data.mkdir(parents=True)
    state = BrokerState(cluster_id=new_cluster_id(), kafka_version="4.3.1", formatted=True)
    place.write_state(state)
    (place.data / "run.steps-0").mkdir()
    if meta is not None:
        (place.data / "meta.properties").write_text(meta.format(cluster=state.cluster_id))
    return state


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (None, r"corrupt: a broker ran here, and .*meta\.properties is missing"),
        ("", r"corrupt: .*meta\.properties has no version and no cluster\.id and no node\.id"),
        ("\x00\x01garbage", r"corrupt: .*has no version"),
        ("version=1\nnode.id=1\ncluster.id=AAAA\n", "belongs to the cluster AAAA"),
        ("version=1\nnode.id=3\ncluster.id={cluster}\n", "belongs to the node 3"),
    ],
)
def test_foreign_or_corrupt_data_is_refused_and_left_alone(
    directory: Path, some_jars: Path, meta: str | None, message: str
) -> None:
    recorded(directory, meta)
    with pytest.raises(BrokerError, match=message) as refusal:
        start_broker(directory)
    assert refusal.value.hint is not None
    assert "backup" in refusal.value.hint
    assert (directory / "data" / "run.steps-0").is_dir()


def test_another_program_with_the_recorded_process_id_is_not_the_broker(directory: Path) -> None:
    own = psutil.Process()
    state = recorded(directory, None)
    BrokerDirectory(directory).write_state(
        replace(state, pid=own.pid, process_started=own.create_time(), port=9, started_at=0.0)
    )
    assert running_broker(directory) is None
    assert not stop_broker(directory)


def test_a_heap_that_is_too_small_is_refused(directory: Path) -> None:
    with pytest.raises(UsageError, match="at least 128 MB"):
        start_broker(directory, heap_mb=16)


def test_jars_that_were_given_must_hold_kafka(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JARS_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(BrokerError, match="is not a directory"):
        fetch_jars()
    monkeypatch.setenv(JARS_VARIABLE, str(tmp_path))
    with pytest.raises(BrokerError, match="holds no Kafka server"):
        fetch_jars()


def test_errors_reach_the_command_line_as_one_message(directory: Path) -> None:
    result = dora("broker", "logs", "--dir", str(directory))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: there is no broker's log in")
    assert dora("broker", "start", "--port", "99999").exit_code == 2


def test_a_path_survives_the_properties_file() -> None:
    assert escaped_property("/jürgen/a b\\c/😀") == "/j\\u00fcrgen/a b\\\\c/\\ud83d\\ude00"
