"""A real schema registry for the whole test session: Apicurio with its Confluent-compatible API.

What a test registers stays there. Whoever needs an empty one, or one that fails, puts a front
before it (`tests/registry_front.py`).
"""

import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dora.bus.broker_process import free_port
from dora.bus.jars import java_command
from dora.errors import BrokerError

REGISTRY_VARIABLE = "DORA_TEST_REGISTRY"
DIRECTORY = Path(__file__).resolve().parents[1] / ".venv" / "registry"
START_SECONDS = 180.0
STOP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Registry:
    """A registry that tests may fill."""

    url: str
    """Root of the Confluent-compatible API."""

    def __str__(self) -> str:
        return self.url


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """The one given by DORA_TEST_REGISTRY, else one that is started."""
    given = os.environ.get(REGISTRY_VARIABLE)
    if given:
        yield Registry(given)
        return
    with started_registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


@contextmanager
def started_registry(directory: Path) -> Iterator[Registry]:
    """Apicurio with its memory as storage; its log lies in `directory`."""
    jars = sorted(DIRECTORY.glob("apicurio-registry-app-*-runner.jar"))
    if not jars:
        pytest.fail(
            f"no schema registry in {DIRECTORY}: run `make .venv/registry` (it needs Maven), or "
            f"set {REGISTRY_VARIABLE} to the URL of one that tests may fill",
            pytrace=False,
        )
    try:
        java = java_command()
    except BrokerError as error:
        pytest.fail(f"the schema registry needs Java: {error}", pytrace=False)
    port = free_port(set())
    command = [java, "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-jar", *jars]
    log = directory / "registry.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | {"QUARKUS_HTTP_HOST": "127.0.0.1", "QUARKUS_HTTP_PORT": str(port)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    found = Registry(f"http://127.0.0.1:{port}/apis/ccompat/v7")
    try:
        _await(f"{found.url}/subjects", process, log)
        yield found
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
