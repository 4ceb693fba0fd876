"""Writes what is made from the code: docs/configuration.md, docs/asyncapi.yaml, Strimzi's users,
and the tables of changes, metrics and rights in docs/operations.md, docs/observability.md and
docs/security.md.

`--check` writes nothing, names the files that are out of date, and ends with 1 if there are any.
"""

import json
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dora import __version__
from dora.bus.access import ROLES, ROLES_OF_A_RUN, Resource, Right, default_principal
from dora.bus.topic_plan import topic_plan
from dora.cli.run.preflight import CHECKS
from dora.config import Config
from dora.config.changes import RULES
from dora.schemas.registry import RECORD_TYPES, current_text
from dora.telemetry.catalogue import CATALOGUE, VERSION, Metric

DOCS = Path(__file__).parent
KUBERNETES = DOCS.parent / "ops" / "kubernetes"
END = "<!-- end of what is made -->"


def main() -> int:
    """Write or check every file; the exit code."""
    files: dict[Path, Callable[[], str]] = {
        DOCS / "configuration.md": configuration,
        DOCS / "operations.md": changes,
        DOCS / "training.md": dry_run,
        DOCS / "observability.md": metrics,
        DOCS / "security.md": rights,
        DOCS / "asyncapi.yaml": asyncapi,
        KUBERNETES / "strimzi" / "users.yaml": kafka_users,
    }
    outdated = 0
    for path, text in files.items():
        if "--check" not in sys.argv[1:]:
            path.write_text(text(), encoding="utf-8")
            print(f"wrote {path}")
        elif not path.exists() or path.read_text(encoding="utf-8") != text():
            print(f"{path} is out of date: run `make docs`", file=sys.stderr)
            outdated = 1
    return outdated


def filled(page: str, source: str, text: str) -> str:
    """A page of docs/ with `text` between the marks of what is made from `source`."""
    begin = f"<!-- made by `make docs` from {source} -->"
    before, rest = (DOCS / page).read_text(encoding="utf-8").split(begin)
    return f"{before}{begin}\n\n{text}\n{END}{rest.split(END)[1]}"


INTRODUCTION = """\
# Configuration

Made from the docstrings in `dora/config/` by `make docs`: change them there.

A run is described by one TOML file. These override its values, each one the ones before it:

1. environment variables: `DORA_<SECTION>__<KEY>`, such as `DORA_TRAINER__STEPS=40` or
   `DORA_TRAINER__LOSS__KIND=gspo`; in names of Kafka properties `_` stands for `.`
   (`DORA_KAFKA__PROPERTIES__SASL_PASSWORD`);
2. `--set section.key=value`, any number of times; the value is read as TOML, or else as text;
3. `-b HOST:PORT`, `--kafka-config FILE` and `-X key=value` for the section `kafka`.

Unknown keys, wrong types and impossible combinations are refused with exit code 2, with all
problems listed. Values of `kafka.properties` never appear in messages. Paths are relative to the
working directory, those of data sets and hooks to the configuration file.
"""


def changes() -> str:
    """What may change between two starts, in the page about operations."""
    words = {
        "recorded": "yes, recorded from the next step on",
        "input": "yes, if it holds the same",
        "free": "yes",
        "fixed": "no",
    }
    rows = [
        f"| {', '.join(f'`{prefix}`' for prefix in rule.prefixes)} | {words[rule.kind]} "
        f"| {_one_line(rule.why)} |"
        for rule in RULES
    ]
    table = "\n".join(["| keys | may change | why |", "|---|---|---|", *rows])
    return filled("operations.md", "dora/config/changes.py", table)


def dry_run() -> str:
    """What `dora run --dry-run` checks, in the page about training."""
    rows = [f"| {subject} | {what} |" for subject, what in CHECKS.items()]
    table = "\n".join(["| subject | check |", "|---|---|", *rows])
    return filled("training.md", "dora/cli/run/preflight.py", table)


def configuration() -> str:
    """The page of the configuration, from the docstrings of its models."""
    return "\n".join([INTRODUCTION, *_sections(Config, ())]).rstrip() + "\n"


def _sections(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[str]:
    """A model's table, then those of the sections in it."""
    inner = {
        name: section
        for name, info in model.model_fields.items()
        for section in (info.annotation, *get_args(info.annotation))
        if isinstance(section, type) and issubclass(section, BaseModel)
    }
    if path:
        yield f"## `[{'.'.join(path)}]`\n\n{_one_line(model.__doc__)}\n"
        rows = [
            f"| `{name}` | {_type(info.annotation, info)} | {_default(info)} "
            f"| {_one_line(info.description)} |"
            for name, info in model.model_fields.items()
            if name not in inner
        ]
        yield "\n".join(["| key | type | default | |", "|---|---|---|---|", *rows, ""])
    for name, section in inner.items():
        yield from _sections(section, (*path, name))


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _type(annotation: Any, info: FieldInfo | None = None) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Path or annotation is str or annotation is SecretStr:
        name = {Path: "path", str: "text", SecretStr: "secret"}[annotation]
        return "`module:function`" if _is_hook(info) else name
    if origin in (Union, types.UnionType):
        parts = [part for part in arguments if part is not type(None)]
        return " or ".join(_type(part, info) for part in parts)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return "list of " + _type(arguments[0])
    if origin is dict:
        values = "any" if arguments[1] is Any else _type(arguments[1])
        return f"table of {values}"
    if hasattr(annotation, "__metadata__"):
        return _type(arguments[0], info)
    names = {
        date: "date",
        int: "whole number",
        float: "number",
        bool: "`true` or `false`",
        Any: "any",
    }
    return names[annotation] + _bounds(info)


def _is_hook(info: FieldInfo | None) -> bool:
    return info is not None and "pattern='^[A-Za-z_]" in repr((info.metadata, info.annotation))


def _bounds(info: FieldInfo | None) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    if info is None:
        return ""
    metadata = list(info.metadata)
    for part in get_args(info.annotation):
        for entry in getattr(part, "__metadata__", ()):
            metadata += getattr(entry, "metadata", [entry])
    found = [
        f"{sign} {getattr(entry, name)}"
        for entry in metadata
        for name, sign in signs.items()
        if getattr(entry, name, None) is not None
    ]
    return f", {', '.join(found)}" if found else ""


def _default(info: FieldInfo) -> str:
    if info.default is PydanticUndefined:
        return "**required**"
    value = info.default
    if value is None or value == {} or value == ():
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str | Path):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


METRIC_TITLES = {
    "process": "Every process",
    "coordinator": "Coordinator",
    "rollout": "Rollout workers (added up over the workers of a process)",
    "trainer": "Trainer (rank 0)",
}


def metrics() -> str:
    """docs/observability.md with a table of metrics for each role."""
    parts = []
    for role, title in METRIC_TITLES.items():
        rows = [_metric_row(metric) for metric in CATALOGUE if metric.role == role]
        parts.append("\n".join([f"**{title}**\n", "| metric | kind | |", "|---|---|---|", *rows]))
    text = "\n\n".join(parts) + "\n"
    return filled("observability.md", "dora/telemetry/catalogue.py", text)


def _metric_row(metric: Metric) -> str:
    text = metric.help
    if metric.label == VERSION:
        text += " By `version`, for the versions of the window."
    elif metric.values:
        text += f" By `{metric.label}`: {', '.join(metric.values)}."
    return f"| `{metric.name}` | {metric.kind} | {text} |"


def rights() -> str:
    """docs/security.md with a row for each operation and kind of resource of a role."""
    lines = ["| role | operation | resource | names | what for |", "|---|---|---|---|---|"]
    for role in ROLES.values():
        who = f"**{role.name}**: {role.who}"
        for need in role.needs:
            names = ", ".join(f"`{name}`" for name in need.names)
            shown = "all eight topics" if need.of_all_topics else names
            lines.append(f"| {who} | {need.operation} | {need.resource} | {shown} | {need.why} |")
            who = ""
    return filled("security.md", "dora/bus/access.py", "\n".join(lines) + "\n")


USERS_HEAD = """\
# A user for each role, with the least rights that it needs. Strimzi puts their passwords into
# Secrets of their names. Made by `make docs` from dora/bus/access.py for the run of
# ../base/run.toml: change the run's name there, make it again, and apply.
"""
RESOURCE_TYPES: dict[Resource, str] = {
    "Topic": "topic",
    "Group": "group",
    "TransactionalId": "transactionalId",
}


def kafka_users() -> str:
    """A KafkaUser for each role, with its rights in the run of ops/kubernetes/base/run.toml."""
    run = tomllib.loads((KUBERNETES / "base" / "run.toml").read_text(encoding="utf-8"))
    return USERS_HEAD + "---\n".join(
        yaml.safe_dump(_user(role, run["run"]["name"]), sort_keys=False) for role in ROLES_OF_A_RUN
    )


def _user(role: str, run: str) -> dict[str, Any]:
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
            "resource": {"type": RESOURCE_TYPES[resource], "name": name, "patternType": "literal"},
            "operations": [right.operation for right in found],
            "host": "*",
        }


ASYNCAPI_HEAD = (
    "# Made by `make docs` from dora/schemas/avro, dora/bus/topic_plan.py and dora/bus/access.py.\n"
)

TOPICS: dict[str, tuple[tuple[str, ...], str]] = {
    "dispatch": (
        ("admission", "command"),
        "Partition 0 is the admission journal: the groups in the order in which they start. The "
        "other partitions carry commands to workers, by hash of the worker's name.",
    ),
    "chunks": (
        ("chunk",),
        "Tokens while they are generated: the write-ahead log of trajectories.",
    ),
    "trajectories": (
        ("trajectory",),
        "Finished trajectories with their rewards. The first readable record of a trajectory, by "
        "offset, with its group's version counts.",
    ),
    "handovers": (("chunk",), "Tokens of trajectories that move to another worker, for an hour."),
    "policies": (("policy",), "Policy versions: where weights are, their checksums, their canary."),
    "steps": (
        ("run_started", "step"),
        "The ledger: one record for the run, then one for each committed step. What is in none of "
        "them did not happen.",
    ),
    "workers": (("status",), "Status of every process, at each heartbeat."),
    "dead-letters": (("dead_letter",), "What could not be read, generated or scored, and why."),
}
"""The records of each topic, and what it is for."""

KEYS = {
    "admission": "Id of the group.",
    "command": "Name of the worker.",
    "chunk": "Id of the trajectory.",
    "trajectory": "Id of the trajectory.",
    "policy": "The version, so that compaction keeps one record of each.",
    "run_started": "Name of the run.",
    "step": "Name of the run.",
    "status": "Name of the process, so that compaction keeps its last status.",
    "dead_letter": "Id of the trajectory, or else the code or the process.",
}
ASYNCAPI_ROLES = ("coordinator", "rollout", "trainer")
_ACTIONS = {"Write": "send", "Read": "receive"}


def asyncapi() -> str:
    """A run's topics and records as an AsyncAPI 3 document."""
    document = {
        "asyncapi": "3.0.0",
        "info": {
            "title": "dora: a run's topics",
            "version": __version__,
            "description": "Every run has eight topics of its own, whose names begin with the "
            "run's. Read them with isolation.level=read_committed. Partitions and retention are "
            "those of the default configuration. Values are Avro: framed as single objects (C3 01 "
            "and the schema's CRC-64-AVRO fingerprint), or, with a schema registry, in "
            "Confluent's wire format. Token ids are bytes of little-endian int32, "
            "log-probabilities of little-endian float32.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "avro/binary",
        "servers": {
            "kafka": {
                "host": "{bootstrap}",
                "protocol": "kafka-secure",
                "description": "kafka.bootstrap_servers; `kafka` without TLS and login.",
                "variables": {"bootstrap": {"default": "localhost:9092"}},
            }
        },
        "channels": dict(_channels()),
        "operations": dict(_operations()),
        "components": {
            "messages": {name: _message(name) for name in RECORD_TYPES},
            "schemas": {"headers": HEADERS},
            "parameters": {
                "run": {"description": "run.name: lower-case letters, digits, - and _."}
            },
        },
    }
    text = yaml.safe_dump(document, sort_keys=False, width=100, allow_unicode=True)
    return ASYNCAPI_HEAD + text


HEADERS = {
    "type": "object",
    "description": "CloudEvents 1.0, binary content mode of the Kafka protocol binding.",
    "required": ["ce_specversion", "ce_type", "ce_source", "ce_id", "content-type"],
    "properties": {
        "ce_specversion": {"const": "1.0"},
        "ce_type": {"type": "string", "description": "`dora.<record>.v1`."},
        "ce_source": {
            "type": "string",
            "format": "uri-reference",
            "description": "`/dora/<run>/<process>`, percent-encoded.",
        },
        "ce_id": {"type": "string", "description": "Unique within ce_source."},
        "content-type": {"const": "avro/binary"},
        "traceparent": {
            "type": "string",
            "description": "W3C Trace Context, on records of a group.",
        },
    },
}


def _channels() -> Iterator[tuple[str, dict[str, Any]]]:
    config = Config.model_validate(
        {
            "run": {"name": "run"},
            "policy": {"model": "emulated"},
            "task": {"kind": "synthetic"},
            "trainer": {"steps": 1},
            "rollout": {"engine": "emulated"},
        }
    )
    specs = {spec.name.rpartition(".")[2]: spec for spec in topic_plan(config)}
    if specs.keys() != TOPICS.keys():
        raise SystemExit(f"topics without a description: {specs.keys() ^ TOPICS.keys()}")
    for suffix, (records, text) in TOPICS.items():
        spec = specs[suffix]
        yield (
            suffix,
            {
                "address": f"{{run}}.{suffix}",
                "description": text,
                "parameters": {"run": {"$ref": "#/components/parameters/run"}},
                "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in records},
                "bindings": {
                    "kafka": {
                        "partitions": spec.partitions,
                        "topicConfiguration": {
                            "cleanup.policy": [spec.configs["cleanup.policy"]],
                            "retention.ms": int(spec.configs["retention.ms"]),
                            "max.message.bytes": int(spec.configs["max.message.bytes"]),
                        },
                        "bindingVersion": "0.5.0",
                    }
                },
            },
        )


def _operations() -> Iterator[tuple[str, dict[str, Any]]]:
    """What coordinator, workers and trainer do with each topic."""
    for role in ASYNCAPI_ROLES:
        reasons: dict[tuple[str, str], list[str]] = {}
        for need in ROLES[role].needs:
            if need.resource == "Topic" and need.operation in _ACTIONS:
                for name in need.names:
                    reasons.setdefault((need.operation, name), []).append(need.why)
        for (operation, name), why in reasons.items():
            yield (
                f"{role}-{_ACTIONS[operation]}-{name}",
                {
                    "action": _ACTIONS[operation],
                    "channel": {"$ref": f"#/channels/{name}"},
                    "title": f"{ROLES[role].who}: {'; '.join(why)}",
                    "tags": [{"name": role}],
                },
            )


def _message(record: str) -> dict[str, Any]:
    schema = json.loads(current_text(record))
    return {
        "name": f"dora.{record}.v1",
        "title": schema["name"],
        "summary": schema["doc"],
        "contentType": "avro/binary",
        "headers": {
            "allOf": [
                {"$ref": "#/components/schemas/headers"},
                {"properties": {"ce_type": {"const": f"dora.{record}.v1"}}},
            ]
        },
        "payload": {
            "schemaFormat": "application/vnd.apache.avro+json;version=1.9.0",
            "schema": schema,
        },
        "bindings": {
            "kafka": {
                "key": {"type": "string", "description": KEYS[record]},
                "bindingVersion": "0.5.0",
            }
        },
    }


if __name__ == "__main__":
    sys.exit(main())
