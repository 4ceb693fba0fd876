"""The AsyncAPI document: up to date, valid, and about the topics and records that there are."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dora.bus.topic_plan import RunTopics
from dora.schemas.registry import AVRO_DIRECTORY, RECORD_TYPES
from tests.manifests import schema

ROOT = Path(__file__).parents[2]
DOCUMENT = yaml.safe_load((ROOT / "docs" / "asyncapi.yaml").read_text())


def valid(document: Any) -> None:
    jsonschema.Draft7Validator(schema("asyncapi-3.0.0")).validate(document)


def resolved(reference: str) -> Any:
    node = DOCUMENT
    assert reference.startswith("#/")
    for part in reference[2:].split("/"):
        node = node[part]
    return node


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [each for value in node.values() for each in references(value)]
    return [each for value in node for each in references(value)] if isinstance(node, list) else []


def test_it_is_valid_asyncapi() -> None:
    valid(DOCUMENT)
    for reference in references(DOCUMENT):
        assert resolved(reference)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("asyncapi",), "3.7.0"),
        (("channels", "steps", "adress"), "x"),
        (("channels", "steps", "bindings", "kafka", "partitions"), 0),
        (("operations", "trainer-send-steps", "action"), "publish"),
        (("components", "messages", "step", "payload", "schema", "type"), "recrod"),
    ],
)
def test_the_check_refuses_what_is_wrong(path: tuple[str, ...], wrong: Any) -> None:
    document = deepcopy(DOCUMENT)
    node = document
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = wrong
    with pytest.raises(jsonschema.ValidationError):
        valid(document)


def test_every_topic_and_every_record_is_in_it() -> None:
    channels = DOCUMENT["channels"]
    assert [c["address"] for c in channels.values()] == list(RunTopics("{run}").all)
    named = {name for channel in channels.values() for name in channel["messages"]}
    assert named == set(DOCUMENT["components"]["messages"]) == set(RECORD_TYPES)
    for name, message in DOCUMENT["components"]["messages"].items():
        avro = json.loads((AVRO_DIRECTORY / f"{name}.avsc").read_text())
        assert message["payload"]["schema"] == avro
