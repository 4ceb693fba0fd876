"""The compose files and the image: what Compose takes, and what dora understands."""

import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dora.config import Config
from dora.config.loading import load_config
from tests.manifests import ROOT, local_kafka, schema, understood

OPS = ROOT / "ops"
FILE = yaml.safe_load((OPS / "compose.yaml").read_text())
GPU = yaml.safe_load((OPS / "compose.gpu.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
PARTS = ("topics", "coordinator", "worker", "trainer")
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def filled(text: str) -> str:
    """With the defaults of variables."""
    return _VARIABLE.sub(lambda match: match.group(2), text)


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """What is mounted, by where."""
    found = {}
    for text in service["volumes"]:
        source, target = filled(text).split(":")[:2]
        found[target] = source
    return found


def configured(service: dict[str, Any]) -> Config:
    given = {name: str(value) for name, value in service["environment"].items() if value}
    return load_config(OPS / "run.toml", environment=given)


@pytest.mark.parametrize("file", [FILE, GPU])
def test_compose_takes_the_file(file: dict[str, Any]) -> None:
    jsonschema.Draft7Validator(schema("compose-spec")).validate(file)


def test_the_check_refuses_what_is_wrong() -> None:
    wrong = {"services": {"kafka": {**SERVICES["kafka"], "enviroment": {}}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(schema("compose-spec")).validate(wrong)


def test_kafka_alone_is_there_unless_more_is_asked_for() -> None:
    assert [name for name, each in SERVICES.items() if not each.get("profiles")] == ["kafka"]
    assert set(GPU["services"]) <= set(SERVICES)


@pytest.mark.parametrize("name", PARTS)
def test_dora_understands_its_command_and_configuration(name: str) -> None:
    service = SERVICES[name]
    first, *words = [filled(word) for word in service["command"]]
    assert first == "dora" and service["profiles"] == ["run"]
    mounted = mounts(service)
    path = understood(words).params["config_path"]
    assert (OPS / mounted[str(path.parent)] / path.name).resolve() == OPS / "run.toml"
    config = configured(service)
    assert mounted[str(config.run.directory)] in FILE["volumes"]
    listeners = SERVICES["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    assert f"INTERNAL://{config.kafka.bootstrap_servers}" in listeners
    asked = service.get("healthcheck", {}).get("test", ["nothing"])[-1]
    assert (f":{config.metrics.port}/ready" in asked) == (name != "topics")
    # one broker keeps one copy, of records of this size
    assert config.kafka.replication_factor == 1
    limit = SERVICES["kafka"]["environment"]["KAFKA_MESSAGE_MAX_BYTES"]
    assert config.kafka.max_message_bytes <= limit


def test_kafka_has_the_settings_of_the_local_one() -> None:
    given = SERVICES["kafka"]["environment"]
    local = {f"KAFKA_{n.replace('.', '_').upper()}": value for n, value in local_kafka().items()}
    shared = given.keys() & local.keys()
    assert len(shared) > 10
    for name in shared:
        own = "LISTENER" in name or name == "KAFKA_LOG_DIRS"
        assert own or str(given[name]) == local[name], name


def test_versions_are_those_of_the_tests() -> None:
    for service, pom in (("kafka", "kafka"), ("registry", "registry")):
        image = SERVICES[service]["image"]
        text = (OPS / pom / "pom.xml").read_text()
        assert f".version>{image.split(':')[1]}<" in text, image


def test_prometheus_and_grafana_find_their_files() -> None:
    prometheus = SERVICES["prometheus"]
    (flag,) = [word for word in prometheus["command"] if word.startswith("--config.file=")]
    file = Path(flag.split("=")[1])
    mounted = mounts(prometheus)
    inside = OPS / mounted[str(file.parent)] / file.name
    (pattern,) = yaml.safe_load(inside.read_text())["scrape_configs"][0]["file_sd_configs"][0][
        "files"
    ]
    # Prometheus takes such a path from the directory of its configuration on
    assert os.path.normpath(file.parent / pattern) == "/etc/dora/runs/.prometheus/*.json"
    assert mounted["/etc/dora/runs"] == mounts(SERVICES["trainer"])["/runs"] == "runs"
    grafana = mounts(SERVICES["grafana"])
    for target, source in grafana.items():
        assert (OPS / source).exists(), target
    (provider,) = yaml.safe_load(
        (OPS / "grafana" / "provisioning" / "dashboards" / "dora.yml").read_text()
    )["providers"]
    assert any(target.startswith(provider["options"]["path"] + "/") for target in grafana)
    (source,) = yaml.safe_load(
        (OPS / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text()
    )["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_the_image_copies_what_is_there_and_not_ignored() -> None:
    kept = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    text = (OPS / "Dockerfile").read_text()
    copied = {
        source
        for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE)
        for source in line.split()[:-1]
    }
    assert copied == kept
    assert all((ROOT / source).exists() for source in copied)
    # Kubernetes runs it as this user
    assert "USER 10001" in text
