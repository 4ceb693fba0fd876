"""Writes ops/kubernetes/strimzi/users.yaml: a KafkaUser for each role, with the rights that
`dora.bus.access` says the role needs in the run of ops/kubernetes/base/run.toml.

`--check` writes nothing and ends with 1 if the file is out of date.
"""

import sys
import tomllib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from publication import publish

from dora.bus.access import ROLES, ROLES_OF_A_RUN, Resource, Right, default_principal

KUBERNETES = Path(__file__).parents[1] / "ops" / "kubernetes"
FILE = KUBERNETES / "strimzi" / "users.yaml"

HEAD = """\
# A user for each role, with the least rights that it needs. Strimzi puts their passwords into
# Secrets of their names. Made by `make docs` from dora/bus/access.py for the run of
# ../base/run.toml: change the run's name there, make it again, and apply.
"""
TYPES: dict[Resource, str] = {
    "Topic": "topic",
    "Group": "group",
    "TransactionalId": "transactionalId",
}


def users() -> str:
    """The whole file."""
    run = tomllib.loads((KUBERNETES / "base" / "run.toml").read_text(encoding="utf-8"))
    return HEAD + "---\n".join(
        yaml.safe_dump(user(role, run["run"]["name"]), sort_keys=False) for role in ROLES_OF_A_RUN
    )


def user(role: str, run: str) -> dict[str, Any]:
    """The KafkaUser of a role."""
    return {
        "apiVersion": "kafka.strimzi.io/v1",
        "kind": "KafkaUser",
        "metadata": {
            "name": default_principal(role).removeprefix("User:"),
            "labels": {"strimzi.io/cluster": "dora"},
        },
        "spec": {
            "authentication": {"type": "scram-sha-512"},
            "authorization": {"type": "simple", "acls": list(_acls(ROLES[role].rights(run)))},
        },
    }


def _acls(rights: list[Right]) -> Iterator[dict[str, Any]]:
    for (resource, name), found in groupby(rights, key=lambda r: (r.resource, r.name)):
        yield {
            "resource": {"type": TYPES[resource], "name": name, "patternType": "literal"},
            "operations": [right.operation for right in found],
            "host": "*",
        }


if __name__ == "__main__":
    sys.exit(publish(FILE, users()))
