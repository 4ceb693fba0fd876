"""Writes docs/asyncapi.yaml: a run's topics and records as an AsyncAPI 3 document, made from the
Avro schemas, the plan of the topics and the table of who may do what.

`--check` writes nothing and ends with 1 if the file is out of date.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from publication import publish

from dora import __version__
from dora.bus.access import ROLES
from dora.bus.topic_plan import topic_plan
from dora.config import Config
from dora.schemas.registry import RECORD_TYPES, current_text

FILE = Path(__file__).with_name("asyncapi.yaml")
HEAD = (
    "# Made by `make docs` from dora/schemas/avro, dora/bus/topic_plan.py and dora/bus/acls.py.\n"
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
    "handovers": (("chunk",), "What trajectories had that move to another worker, for an hour."),
    "policies": (("policy",), "Policy versions: where weights are, their checksums, their canary."),
    "steps": (
        ("run_started", "step"),
        "The ledger: one record for the run, then one for each committed step. What is in none of "
        "them did not happen.",
    ),
    "workers": (("status",), "How every process is, each heartbeat."),
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
    "status": "Name of the process, so that compaction keeps its last word.",
    "dead_letter": "Id of the trajectory, or else the code or the process.",
}
SPOKEN = ("coordinator", "rollout", "trainer")
_ACTIONS = {"Write": "send", "Read": "receive"}


def main() -> int:
    """Write or check the file; the exit code."""
    text = HEAD + yaml.safe_dump(document(), sort_keys=False, width=100, allow_unicode=True)
    return publish(FILE, text)


def document() -> dict[str, Any]:
    """The whole document."""
    return {
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
    for role in SPOKEN:
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
