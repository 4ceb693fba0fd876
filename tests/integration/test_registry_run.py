"""A whole run whose records are named by a real schema registry, which is away for a while in its
middle, and the commands that read it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import Result
from confluent_kafka import Producer
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

from dora.bus import BEGINNING, END, ClusterSettings, LogReader, RunTopics, cluster_settings
from dora.config import KafkaSection
from dora.schemas.registry import FULL_NAMES
from tests.brokers import Cluster
from tests.configurations import EMULATED
from tests.raw_log import raw_messages
from tests.registry_front import Front, registry_front
from tests.schema_registry import Registry
from tests.small_run import dora, refused

DEADLINE = 280.0
NAME = f"named-{os.getpid()}"
STEPS = 10
CONFIG = (
    EMULATED
    + """
[trainer.emulated]
step_seconds = 0.5
[kafka]
connect_timeout_seconds = 30
[kafka.registry]
url = "{url}"
[kafka.registry.properties]
basic.auth.user.info = "ann:right"
"""
)


@dataclass(frozen=True, slots=True)
class NamedRun:
    """A run that is complete."""

    output: str
    address: str
    front: Front
    directory: Path

    def look(self, command: str, *options: str, registry: bool = True) -> Result:
        """A command that reads the log, with the registry in the environment or without it."""
        environment = {
            "DORA_KAFKA__REGISTRY__PROPERTIES__BASIC_AUTH_USER_INFO": "ann:right",
            "DORA_KAFKA__REGISTRY__URL": self.front.url,
        }
        return dora(
            command, NAME, "-b", self.address, *options, env=environment if registry else {}
        )


def disturb(kafka: Cluster, front: Front, foreign: int) -> None:
    """Take the registry away from the running run, and put records with foreign ids into its
    trajectories; then bring it back."""
    section = {
        "bootstrap_servers": kafka.bootstrap_servers,
        "registry": {"url": front.url, "properties": {"basic.auth.user.info": "ann:right"}},
        "connect_timeout_seconds": 60,
    }
    settings = cluster_settings(KafkaSection.model_validate(section))
    assert settings.registry is not None
    settings.registry.prepare()
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    # Whoever writes has written once a trajectory is there.
    await_record(settings, {(f"{NAME}.trajectories", number): BEGINNING for number in range(3)})
    front.stop()
    await_record(settings, {(f"{NAME}.steps", 0): END})
    for partition in range(3):
        for value in (b"\0" + foreign.to_bytes(4, "big") + b"\x04hi", b"\0\x70\0\0\0x"):
            producer.produce(f"{NAME}.trajectories", value, partition=partition)
    assert producer.flush(DEADLINE) == 0
    front.start()


def await_record(settings: ClusterSettings, places: Mapping[tuple[str, int], int]) -> None:
    with LogReader(settings, client_id="test") as reader:
        reader.assign(places)
        until = time.monotonic() + DEADLINE
        while not reader.poll(timeout=0.1):
            assert time.monotonic() < until, f"nothing came to {places}"


@pytest.fixture(scope="module")
def named(
    kafka: Cluster, registry: Registry, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NamedRun]:
    directory = tmp_path_factory.mktemp("named")
    with registry_front(registry.url, NAME) as front:
        foreign = SchemaRegistryClient({"url": front.url}).register_schema(
            "orders", Schema('"string"', "AVRO")
        )
        front.password = "ann:right"
        config = directory / "run.toml"
        config.write_text(CONFIG.format(run=NAME, directory="runs", steps=STEPS, url=front.url))
        made = dora("topics", "create", str(config), "-b", kafka.bootstrap_servers)
        assert made.exit_code == 0, made.output
        with subprocess.Popen(
            [sys.executable, "-m", "dora", "run", "run.toml", "--plain", "-b", str(kafka)],
            cwd=directory,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                disturb(kafka, front, foreign)
                output, _ = process.communicate(timeout=DEADLINE)
            finally:
                process.terminate()
        assert process.returncode == 0, output
        yield NamedRun(output, kafka.bootstrap_servers, front, directory)


def test_the_run_is_complete_and_the_audit_clean(named: NamedRun) -> None:
    assert f"schema registry at {named.front.url}" in named.output
    assert "audit: no violation; " in named.output
    audit = named.look("audit", "--json")
    assert audit.exit_code == 0, audit.output
    found = json.loads(audit.stdout)
    assert (found["steps"], set(found["violations"].values())) == (STEPS, {0})
    status = json.loads(named.look("status", "--json").stdout)
    assert status["step"] == STEPS


def test_every_record_is_in_confluents_wire_format(named: NamedRun) -> None:
    client = SchemaRegistryClient({"url": named.front.url, "basic.auth.user.info": "ann:right"})
    ours = {client.get_latest_version(subject).schema_id for subject in FULL_NAMES}
    found: set[int] = set()
    for message in raw_messages(named.address, *RunTopics(NAME).all):
        value = message.value()
        assert value is not None and value[0] == 0, (message.topic(), value)
        found.add(int.from_bytes(value[1:5], "big"))
    assert len(found & ours) >= 8 and len(found - ours) == 2


def test_foreign_ids_are_dead_letters_with_their_reason(named: NamedRun) -> None:
    tail = named.look("tail", "-t", "dead-letters", "-o", "beginning", "--exit", "--json")
    assert tail.exit_code == 0, tail.output
    letters = [json.loads(line) for line in tail.stdout.splitlines()]
    said = " ".join(json.dumps(letter) for letter in letters)
    assert len(letters) >= 2
    assert "not one of dora.v1.Admission" in said and "no schema with id 1879048192" in said


@pytest.mark.parametrize(
    ("command", "options"),
    [("audit", ()), ("status", ()), ("report", ("-o", "r.html")), ("inspect", ()),
     ("tail", ("-o", "beginning", "--exit"))],
)  # fmt: skip
def test_without_the_registry_nothing_is_shown_for_true(
    named: NamedRun, command: str, options: tuple[str, ...]
) -> None:
    result = named.look(command, *options, registry=False)
    refused(result, 2, "schema registry (Confluent's wire format)", "--registry")


def test_the_registry_is_an_option_too_and_a_wrong_password_is_named(named: NamedRun) -> None:
    result = named.look("audit", "--registry", named.front.url, registry=False)
    refused(result, 1, "refused the credentials (no user name)")
    result = dora(
        "audit", NAME, "-b", named.address, "--registry", named.front.url,
        env={"DORA_KAFKA__REGISTRY__PROPERTIES__BASIC_AUTH_USER_INFO": "ann:right"},
    )  # fmt: skip
    assert result.exit_code == 0, result.output


def test_the_password_is_nowhere(named: NamedRun) -> None:
    files = [path for path in (named.directory / "runs").rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert b"ann:right" not in path.read_bytes(), path
    assert "ann:right" not in named.output
    steps = named.look("tail", "-t", "steps", "-o", "beginning", "--exit", "--json")
    assert "ann:right" not in steps.stdout and "dora_version" in steps.stdout
