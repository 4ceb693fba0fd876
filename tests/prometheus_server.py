"""A real Prometheus that scrapes a run of a test, and the expressions that the project ships."""

import json
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dora.broker.process import free_port
from tests import needs
from tests.services import await_answer, ended, started

OPS = Path(__file__).resolve().parents[1] / "ops"
DASHBOARD = OPS / "grafana" / "dora.json"
SCRAPING = OPS / "prometheus" / "prometheus.yml"
ALERTS = OPS / "prometheus" / "alerts.yml"
INSTALL = (
    "`make test` installs Prometheus where it may (ops/test-tools.sh), otherwise: "
    "apt-get install --no-install-recommends prometheus"
)
_COMPARISON = re.compile(r"\s*(?:>=|<=|==|>|<)\s*[\d.]+\s*$")


def tool(name: str) -> str:
    """Path of a program of Prometheus."""
    return needs.program(name, install=INSTALL)


def dashboard_queries() -> list[str]:
    """Every expression of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def alert_conditions() -> list[str]:
    """What the alerts compare, without the comparisons: expressions that always have a value."""
    rules = [r for group in yaml.safe_load(ALERTS.read_text())["groups"] for r in group["rules"]]
    conditions = []
    for rule in rules:
        for part in rule["expr"].split(" or "):
            bare = _COMPARISON.sub("", part)
            assert bare != part, f"{rule['alert']} compares nothing: {part}"
            conditions.append(bare)
    return conditions


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A server that scrapes."""

    address: str

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of the answer of its HTTP API."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series."""
        found = self.get("query", query=expression)["result"]
        return [(each["metric"], float(each["value"][1])) for each in found]


@contextmanager
def prometheus(directory: Path, runs: Path) -> Iterator[Prometheus]:
    """Prometheus with the configuration that the project ships, looking for runs in `runs`; it
    scrapes every second."""
    program = tool("prometheus")
    config = yaml.safe_load(SCRAPING.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ALERTS)]
    for found in config["scrape_configs"][0]["file_sd_configs"]:
        name = Path(found["files"][0]).name
        found |= {"files": [str(runs / ".prometheus" / name)], "refresh_interval": "1s"}
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port(set())}"
    log = directory / "prometheus.log"
    service = started(
        [
            program,
            f"--config.file={path}",
            f"--storage.tsdb.path={directory / 'tsdb'}",
            f"--web.listen-address={address}",
        ],
        log,
    )
    try:
        await_answer(f"http://{address}/-/ready", service, log)
        yield Prometheus(address)
    finally:
        ended(service)
