"""The manifests and schemas of the tests, as Kubernetes and `dora` would see them."""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import click
import jsonschema
import kubernetes_validate
import yaml

from dora.cli.main import cli

ROOT = Path(__file__).parents[1]
KUBERNETES = ROOT / "ops" / "kubernetes"
SCHEMAS = ROOT / "tests" / "data" / "schemas"
VERSIONS = ("1.31", "1.37")
"""Of Kubernetes: oldest (the first in which Jobs have all that the trainer's uses) to newest."""


@cache
def schema(name: str) -> dict[str, Any]:
    """A JSON schema of tests/data/schemas."""
    found = json.loads((SCHEMAS / f"{name}.json").read_text())
    assert isinstance(found, dict)
    return found


def documents(file: Path) -> list[dict[str, Any]]:
    """The documents of a file."""
    return [each for each in yaml.safe_load_all(file.read_text()) if each is not None]


def merged(old: Any, patch: Any) -> Any:
    """A strategic merge patch, as far as the ones here go: lists of things with a name are merged
    by it, null deletes."""
    if isinstance(old, Mapping) and isinstance(patch, Mapping):
        result = dict(old)
        for key, value in patch.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merged(old[key], value) if key in old else value
        return result
    if isinstance(old, list) and isinstance(patch, list) and _named(old) and _named(patch):
        names = {each["name"]: each for each in old}
        for each in patch:
            names[each["name"]] = merged(names.get(each["name"], {}), each)
        return list(names.values())
    return patch


def _named(items: list[Any]) -> bool:
    return bool(items) and all(isinstance(each, dict) and "name" in each for each in items)


def built(directory: Path) -> list[dict[str, Any]]:
    """What `kubectl kustomize` makes of a directory: resources, bases first, patched, with the
    image named; ConfigMaps made of files come last. Names of ConfigMaps get no hash here."""
    plan = yaml.safe_load((directory / "kustomization.yaml").read_text())
    known = {"apiVersion", "kind", "namespace", "resources", "patches", "images"}
    assert set(plan) <= known | {"configMapGenerator"}, "more than this knows how to build"
    found: list[dict[str, Any]] = []
    for name in plan["resources"]:
        path = (directory / name).resolve()
        found += built(path) if path.is_dir() else documents(path)
    for entry in plan.get("patches", ()):
        for patch in documents(directory / entry["path"]):
            (target,) = [r for r in found if identity(r) == identity(patch)]
            found[found.index(target)] = merged(target, patch)
    for image in plan.get("images", ()):
        for container in (c for r in found for c in containers(r)):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    for made in plan.get("configMapGenerator", ()):
        data = {name: (directory / name).read_text() for name in made["files"]}
        meta = {"name": made["name"]}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data})
    return deepcopy(found)


def identity(resource: Mapping[str, Any]) -> tuple[str, str]:
    """Kind and name."""
    return resource["kind"], resource["metadata"]["name"]


def pod_of(resource: Mapping[str, Any]) -> dict[str, Any] | None:
    """The template of its pods."""
    template = resource.get("spec", {}).get("template")
    return template if isinstance(template, dict) else None


def containers(resource: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The containers of its pods."""
    pod = pod_of(resource)
    if pod is not None and "spec" in pod:
        yield from pod["spec"]["containers"]


def local_kafka() -> dict[str, str]:
    """The settings of the local broker."""
    lines = (ROOT / "ops" / "kafka" / "server.properties").read_text().splitlines()
    pairs = (line.partition("=") for line in lines if line[:1].isalpha())
    return {name: value for name, _, value in pairs}


def understood(words: list[str]) -> click.Context:
    """What `dora` makes of a command line."""
    command: click.Command = cli
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(click.Context(cli), name)
        assert found is not None, f"dora has no command {name}"
        command = found
    return command.make_context(command.name, list(words))


def check(resource: Mapping[str, Any]) -> None:
    """Raise unless the resource is one that Kubernetes (each of `VERSIONS`, strictly: without
    unknown keys) or Strimzi takes."""
    if resource["apiVersion"].startswith("kafka.strimzi.io/"):
        assert resource["apiVersion"] == "kafka.strimzi.io/v1"
        _custom(resource["kind"]).validate(resource)
        return
    for version in VERSIONS:
        kubernetes_validate.validate(dict(resource), version, strict=True)


@cache
def _custom(kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(closed(schema(f"strimzi-{kind}")))


def closed(part: Any) -> Any:
    """A schema of a custom resource that refuses unknown keys, where Kubernetes only drops them;
    metadata is Kubernetes' own."""
    if isinstance(part, list):
        return [closed(each) for each in part]
    if not isinstance(part, dict):
        return part
    result = {key: closed(value) for key, value in part.items()}
    open_ended = part.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in part
    if part.get("type") == "object" and "properties" in part and not open_ended:
        result["additionalProperties"] = False
        if {"apiVersion", "kind"} <= part["properties"].keys():
            result["properties"]["metadata"] = {"type": "object"}
    return result
