"""Schemas evolve FULL_TRANSITIVE: every version reads what every other version wrote."""

import copy
import json
from io import BytesIO
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from fastavro import parse_schema, schemaless_reader, schemaless_writer
from fastavro.utils import generate_many

from dora.schemas import registry
from dora.schemas.registry import AVRO_DIRECTORY, CURRENT, RECORD_TYPES, SCHEMAS

PUBLISHED: dict[str, list[str]] = json.loads(
    (AVRO_DIRECTORY / "fingerprints.json").read_text(encoding="utf-8")
)


def incompatibilities(writer: Any, reader: Any, where: str = "") -> list[str]:
    """Why data written with `writer` cannot be read with `reader`; empty if it can."""
    if isinstance(writer, list) or isinstance(reader, list):
        if not (isinstance(writer, list) and isinstance(reader, list)):
            return [f"{where}: a union on one side only"]
        return [] if writer == reader else [f"{where}: the union's branches differ"]
    if not (isinstance(writer, dict) and isinstance(reader, dict)):
        return [] if writer == reader else [f"{where}: {writer} became {reader}"]
    if writer["type"] != reader["type"]:
        return [f"{where}: {writer['type']} became {reader['type']}"]
    if writer["type"] == "array":
        return incompatibilities(writer["items"], reader["items"], f"{where}[]")
    if writer["type"] == "map":
        return incompatibilities(writer["values"], reader["values"], f"{where}{{}}")
    if writer["name"] != reader["name"]:
        return [f"{where}: {writer['name']} was renamed to {reader['name']}"]
    written = {field["name"]: field for field in writer["fields"]}
    problems = []
    for field in reader["fields"]:
        name = field["name"]
        if name in written:
            problems += incompatibilities(written[name]["type"], field["type"], f"{where}.{name}")
        elif "default" not in field:
            problems.append(f"{where}.{name}: new and without a default")
    return problems


def versions(record: str) -> list[registry.Schema]:
    """All versions of a record, current first."""
    return [schema for schema in SCHEMAS if schema.record == record]


@pytest.mark.parametrize("record", sorted(RECORD_TYPES))
def test_no_published_schema_is_lost(record: str) -> None:
    known = {schema.fingerprint.hex() for schema in versions(record)}
    assert known == set(PUBLISHED[record]), (
        f"{record}.avsc changed: copy its former text to avro/history/{record}.<n>.avsc and add "
        f"the fingerprint {CURRENT[record].fingerprint.hex()} to avro/fingerprints.json"
    )
    assert PUBLISHED[record][-1] == CURRENT[record].fingerprint.hex()


def test_all_past_schemas_belong_to_a_record() -> None:
    assert {schema.record for schema in SCHEMAS} == set(RECORD_TYPES)


@pytest.mark.parametrize("record", sorted(RECORD_TYPES))
def test_every_version_reads_what_every_other_wrote(record: str) -> None:
    for writer, reader in permutations(versions(record), 2):
        assert incompatibilities(writer.parsed, reader.parsed) == [], (
            f"{writer.source} -> {reader.source}"
        )
        for datum in generate_many(writer.parsed, 5):
            body = BytesIO()
            schemaless_writer(body, writer.parsed, datum)
            body.seek(0)
            schemaless_reader(body, writer.parsed, reader.parsed)
            assert body.read() == b""


def _changed(record: str, change: Any) -> dict[str, Any]:
    schema = json.loads((AVRO_DIRECTORY / f"{record}.avsc").read_text(encoding="utf-8"))
    change(schema)
    parsed = parse_schema(schema, named_schemas={})
    assert isinstance(parsed, dict)
    return parsed


def test_a_new_field_with_a_default_is_compatible_both_ways() -> None:
    newer = _changed(
        "admission",
        lambda schema: schema["fields"].append({"name": "note", "type": "string", "default": ""}),
    )
    current = CURRENT["admission"].parsed
    assert incompatibilities(current, newer) == []
    assert incompatibilities(newer, current) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda schema: schema["fields"].append({"name": "note", "type": "string"}),
            ".note: new and without a default",
        ),
        (lambda schema: schema["fields"].pop(1), ".group_id: new and without a default"),
        (lambda schema: schema["fields"][0].update(type="bytes"), ".run: string became bytes"),
        (
            lambda schema: schema["fields"][0].update(name="run_name"),
            ".run_name: new and without a default",
        ),
    ],
)
def test_a_breaking_change_is_found(change: Any, problem: str) -> None:
    changed, current = _changed("admission", change), CURRENT["admission"].parsed
    found = incompatibilities(current, changed) + incompatibilities(changed, current)
    assert problem in found


def test_a_record_of_a_past_version_is_read_as_the_current_one(tmp_path: Path) -> None:
    from dora.schemas import codec

    past = copy.deepcopy(json.loads((AVRO_DIRECTORY / "status.avsc").read_text(encoding="utf-8")))
    past["fields"] = [field for field in past["fields"] if field["name"] not in ("host", "pid")]
    (tmp_path / "status.1.avsc").write_text(json.dumps(past), encoding="utf-8")
    schema = registry.read_schema(tmp_path / "status.1.avsc", "status", current=False)
    body = BytesIO()
    datum = {"run": "r", "process": "w", "role": "rollout", "incarnation": "i", "state": "ready"}
    schemaless_writer(body, schema.parsed, {**datum, "created_ms": 5, "running": ["g0/1#0"]})

    writer, reader, from_avro, _ = codec.reader_of(schema)
    record = from_avro(schemaless_reader(BytesIO(body.getvalue()), writer, reader))

    assert record.running == ("g0/1#0",)
    assert (record.host, record.pid, record.created_ms) == ("", 0, 5)


def test_a_type_that_several_records_share_is_the_same_in_all_of_them() -> None:
    shapes: dict[str, set[str]] = {}

    def collect(schema: Any) -> None:
        if isinstance(schema, dict):
            if schema.get("type") == "record":
                shapes.setdefault(schema["name"], set()).add(json.dumps(schema, sort_keys=True))
            for value in schema.values():
                collect(value)
        elif isinstance(schema, list):
            for value in schema:
                collect(value)

    for schema in CURRENT.values():
        collect({k: v for k, v in schema.parsed.items() if not k.startswith("__")})
    assert {name: len(texts) for name, texts in shapes.items() if len(texts) > 1} == {}
