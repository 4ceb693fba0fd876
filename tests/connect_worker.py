"""A real worker of Kafka Connect with the project's configuration, and the lake that it fills.

Only addresses, names and intervals differ from the files in `ops/connect/`: what those say is what
runs. The worker is a process that can be killed at any time and started again.
"""

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError

from dora.broker.process import free_port
from tests.services import STOP_SECONDS, Service, await_answer, java, started

ROOT = Path(__file__).resolve().parents[1]
OPS = ROOT / "ops" / "connect"
JARS = ROOT / ".venv" / "connect"
CATALOG = "lake"
ANSWER_SECONDS = 90.0
"""Connect's own limit for a request, during a rebalance for example."""


def connector(name: str, **changes: str) -> dict[str, str]:
    """The configuration in `ops/connect/<name>.json` with other values for some of its keys."""
    config: dict[str, str] = json.loads((OPS / f"{name}.json").read_text())
    unknown = sorted(set(changes) - set(config))
    assert not unknown, f"{name}.json has no {unknown}"
    return config | changes


def worker_properties(changes: Mapping[str, str]) -> str:
    """`ops/connect/worker.properties` with other values for some of its keys."""
    lines = (OPS / "worker.properties").read_text().splitlines()
    keys = {line.partition("=")[0] for line in lines if line and not line.startswith("#")}
    unknown = sorted(set(changes) - keys)
    assert not unknown, f"worker.properties has no {unknown}"
    kept = [line for line in lines if line.partition("=")[0] not in changes]
    return "\n".join([*kept, *(f"{key}={value}" for key, value in changes.items()), ""])


@dataclass(frozen=True, slots=True)
class Lake:
    """Iceberg tables in a directory, with their catalog in SQLite."""

    directory: Path

    @property
    def options(self) -> dict[str, str]:
        """Where it is, for a connector."""
        return {
            "iceberg.catalog.uri": f"jdbc:sqlite:{self.directory / 'lake.db'}?busy_timeout=30000",
            "iceberg.catalog.warehouse": self.directory.as_uri(),
        }

    def create(self) -> None:
        """Make the catalog and the tables' namespace: sinks that did so at once would collide."""
        with self._catalog() as catalog:
            catalog.create_namespace("dora")

    def table(self, name: str) -> Any:
        """A table as pyiceberg sees it; None if there is none yet."""
        try:
            with self._catalog() as catalog:
                return catalog.load_table(name)
        except NoSuchTableError:
            return None

    def rows(self, name: str) -> pa.Table:
        """All rows of a table that is there."""
        return self.table(name).scan().to_arrow()

    def count(self, name: str) -> int:
        """Its rows; 0 without a table."""
        table = self.table(name)
        return 0 if table is None else int(table.scan().count())

    def _catalog(self) -> contextlib.closing[SqlCatalog]:
        uri = f"sqlite:///{self.directory / 'lake.db'}?timeout=60"
        return contextlib.closing(SqlCatalog(CATALOG, uri=uri, warehouse=self.directory.as_uri()))


class ConnectWorker:
    """One worker of a distributed Connect; it may be started again after `kill`."""

    def __init__(self, directory: Path, bootstrap_servers: str, name: str) -> None:
        self._directory = directory
        self._url = f"http://127.0.0.1:{free_port(set())}"
        self._service: Service | None = None
        self._properties = directory / "worker.properties"
        self._properties.write_text(
            worker_properties(
                {
                    "bootstrap.servers": bootstrap_servers,
                    "group.id": name,
                    "config.storage.topic": f"{name}-configs",
                    "offset.storage.topic": f"{name}-offsets",
                    "status.storage.topic": f"{name}-status",
                    "listeners": self._url,
                    "offset.flush.interval.ms": "500",
                    "session.timeout.ms": "6000",
                    "heartbeat.interval.ms": "2000",
                    "consumer.session.timeout.ms": "6000",
                    "plugin.path": str(JARS / "plugins"),
                }
            )
        )

    @property
    def log(self) -> Path:
        """What the worker says."""
        return self._directory / "connect.log"

    def start(self) -> None:
        """Start it and wait until it answers."""
        if not (JARS / "worker").is_dir():
            pytest.fail(
                f"no Kafka Connect in {JARS}: run `make .venv/connect` (it needs Maven)",
                pytrace=False,
            )
        self._service = started(
            [
                *java("Kafka Connect"),
                "-Xmx512m",
                f"-Dlog4j2.configurationFile={(OPS / 'log4j2.properties').as_uri()}",
                "-cp",
                JARS / "worker" / "*",
                "org.apache.kafka.connect.cli.ConnectDistributed",
                self._properties,
            ],
            self.log,
            cwd=self._directory,
        )
        await_answer(f"{self._url}/connectors", self._service, self.log)

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        if self._service is not None:
            self._service.kill()
            self._service.wait(STOP_SECONDS)
            self._service = None

    def put(self, name: str, config: Mapping[str, str]) -> None:
        """Create a connector, or change its configuration."""
        until = time.monotonic() + ANSWER_SECONDS
        while True:
            try:
                self._call("PUT", f"/connectors/{name}/config", config)
            except ConnectRefusal as refusal:
                # 409: the workers are about to agree on who does what.
                if refusal.status != 409 or time.monotonic() >= until:
                    raise
                time.sleep(0.2)
            else:
                return

    def states(self, name: str) -> list[str]:
        """States of a connector's tasks; AssertionError with the trace of one that failed."""
        try:
            status = self._call("GET", f"/connectors/{name}/status")
        except ConnectRefusal as refusal:
            if refusal.status == 404:
                return []
            raise
        for part in (status["connector"], *status["tasks"]):
            assert part["state"] != "FAILED", part.get("trace")
        return [task["state"] for task in status["tasks"]]

    def telling(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-5000:]

    def _call(self, method: str, path: str, body: Mapping[str, str] | None = None) -> Any:
        request = urllib.request.Request(
            f"{self._url}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise ConnectRefusal(error.code, error.read().decode()) from error


class ConnectRefusal(Exception):
    """The worker answered with an error."""

    def __init__(self, status: int, answer: str) -> None:
        super().__init__(f"{status}: {answer}")
        self.status = status


def make_topic(bootstrap_servers: str, name: str, partitions: int) -> None:
    """Create a topic."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    for future in admin.create_topics([NewTopic(name, partitions)]).values():
        future.result(30)
