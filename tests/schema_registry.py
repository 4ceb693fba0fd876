"""A real schema registry for the whole test session: Apicurio with its Confluent-compatible API.

What a test registers stays there. Whoever needs an empty one, or one that fails, puts a front
before it (`tests/registry_front.py`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dora.broker.process import free_port
from tests.services import await_answer, ended, java, started

REGISTRY_VARIABLE = "DORA_TEST_REGISTRY"
DIRECTORY = Path(__file__).resolve().parents[1] / ".venv" / "registry"


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
    port = free_port(set())
    log = directory / "registry.log"
    service = started(
        [*java("the schema registry"), "-Xmx256m", "-jar", *jars],
        log,
        env=os.environ | {"QUARKUS_HTTP_HOST": "127.0.0.1", "QUARKUS_HTTP_PORT": str(port)},
    )
    found = Registry(f"http://127.0.0.1:{port}/apis/ccompat/v7")
    try:
        await_answer(f"{found.url}/subjects", service, log)
        yield found
    finally:
        ended(service)
