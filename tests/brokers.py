"""One Kafka for the whole test session, and names that keep tests apart on it."""

import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dora.broker.local import start_broker, stop_broker
from dora.broker.process import free_port
from dora.bus import ClusterSettings, cluster_settings
from dora.config import KafkaSection
from dora.errors import BrokerError

BOOTSTRAP_VARIABLE = "DORA_TEST_BOOTSTRAP"
COMPOSE_FILE = Path(__file__).resolve().parents[1] / "ops" / "compose.yaml"
COMPOSE_SECONDS = 240.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Kafka cluster that tests may fill."""

    bootstrap_servers: str

    def __str__(self) -> str:
        return self.bootstrap_servers


class DockerError(Exception):
    """Docker cannot run Kafka here."""


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real Kafka: the one given by DORA_TEST_BOOTSTRAP, else from jars, else from Docker."""
    given = os.environ.get(BOOTSTRAP_VARIABLE)
    if given:
        yield Cluster(given)
        return
    directory = tmp_path_factory.mktemp("kafka") / "broker"
    try:
        info = start_broker(directory)
    except BrokerError as error:
        reason = error
    else:
        try:
            yield Cluster(info.bootstrap_servers)
        finally:
            stop_broker(directory, force=True)
        return
    try:
        with docker_kafka() as address:
            yield Cluster(address)
    except DockerError as error:
        pytest.fail(
            f"these tests need Kafka. From jars: {reason}\nFrom Docker: {error}\n"
            f"Or set {BOOTSTRAP_VARIABLE} to the host:port of a cluster that tests may fill.",
            pytrace=False,
        )


@pytest.fixture
def run_name(request: pytest.FixtureRequest) -> str:
    """A run's name that no other test has."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower()).strip("-")
    return f"{words[:30].strip('-')}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def settings(kafka: Cluster) -> ClusterSettings:
    """How clients reach the session's Kafka."""
    return cluster_settings(KafkaSection(bootstrap_servers=kafka.bootstrap_servers))


@contextmanager
def docker_kafka() -> Iterator[str]:
    """Address of a Kafka from `ops/compose.yaml`, removed with its data at the end."""
    docker = shutil.which("docker")
    if docker is None:
        raise DockerError("`docker` is not on the PATH")
    port = free_port(set())
    project = f"dora-test-{uuid.uuid4().hex[:8]}"
    compose = [docker, "compose", "-f", str(COMPOSE_FILE), "-p", project]
    environment = os.environ | {"DORA_KAFKA_PORT": str(port)}

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*compose, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=COMPOSE_SECONDS,
            check=False,
        )

    try:
        started = call("up", "--detach", "--wait")
        if started.returncode != 0:
            raise DockerError(started.stderr.strip()[-500:])
        yield f"localhost:{port}"
    finally:
        call("down", "--volumes")
