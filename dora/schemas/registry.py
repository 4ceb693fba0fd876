"""Every Avro schema a dora record was ever written with, found by its fingerprint.

A schema that was published stays readable. `avro/<record>.avsc` is what this version
writes; `avro/history/<record>.<n>.avsc` are the schemas of earlier versions, and
`avro/fingerprints.json` lists the fingerprints of all of them by record. To change a schema, copy
the current file into `history/` first, change it so that new fields have defaults and none is
renamed or retyped (FULL_TRANSITIVE), and add the new fingerprint to the list.

Fingerprints are CRC-64-AVRO over the Parsing Canonical Form, as 8 little-endian bytes (Avro 1.12
specification, "Single-object encoding").
"""

import json
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from fastavro.schema import (
    SchemaParseException,
    UnknownType,
    fingerprint,
    parse_schema,
    to_parsing_canonical_form,
)

from dora.schemas.records import (
    Admission,
    Chunk,
    Command,
    DeadLetter,
    Policy,
    Record,
    RunStarted,
    Status,
    Step,
    Trajectory,
)

RECORD_TYPES: dict[str, type[Record]] = {
    "admission": Admission,
    "chunk": Chunk,
    "command": Command,
    "dead_letter": DeadLetter,
    "policy": Policy,
    "run_started": RunStarted,
    "status": Status,
    "step": Step,
    "trajectory": Trajectory,
}
"""Record classes by the name of their schema file and of their CloudEvents type."""

RECORD_NAMES: dict[type[Record], str] = {cls: name for name, cls in RECORD_TYPES.items()}
"""The inverse of `RECORD_TYPES`."""


@dataclass(frozen=True, slots=True, eq=False)
class Schema:
    """One version of one record's schema."""

    record: str
    """Name of the record, a key of `RECORD_TYPES`."""
    source: str
    """File name, for messages."""
    parsed: dict[str, Any]
    """Schema as parsed by fastavro."""
    fingerprint: bytes
    """8 bytes, little-endian CRC-64-AVRO."""
    current: bool
    """Whether this is the version that is written now."""


def schema_fingerprint(parsed: dict[str, Any]) -> bytes:
    """The 8 bytes that name a schema in single-object encoding."""
    return bytes.fromhex(fingerprint(to_parsing_canonical_form(parsed), "CRC-64-AVRO"))


def read_schema(file: Traversable, record: str, *, current: bool) -> Schema:
    """Read one `.avsc` file; ValueError (fastavro's or json's own) when it is no schema."""
    parsed = parse_schema(json.loads(file.read_text(encoding="utf-8")), named_schemas={})
    assert isinstance(parsed, dict)
    return Schema(record, file.name, parsed, schema_fingerprint(parsed), current)


_NO_SCHEMA = (
    *(SchemaParseException, UnknownType),
    *(LookupError, TypeError, AttributeError, RecursionError),
)


def schema_from_text(text: str, source: str) -> Schema | None:
    """An Avro schema from elsewhere, if it is one of a dora record (by its full name), else None.

    ValueError when the text is no schema that stands for itself.
    """
    try:
        data = json.loads(text)
        parsed = parse_schema(data, named_schemas={})
    except _NO_SCHEMA as error:
        raise ValueError(str(error) or type(error).__name__) from error
    record = FULL_NAMES.get(parsed["name"]) if isinstance(parsed, dict) else None
    if record is None:
        return None
    assert isinstance(parsed, dict)
    return Schema(record, source, parsed, schema_fingerprint(parsed), current=False)


def current_text(record: str) -> str:
    """The schema that a record is written with as JSON on one line, with its documentation."""
    text = (AVRO_DIRECTORY / f"{record}.avsc").read_text(encoding="utf-8")
    return json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)


def _read_all(directory: Traversable) -> tuple[Schema, ...]:
    schemas = [
        read_schema(directory / f"{record}.avsc", record, current=True) for record in RECORD_TYPES
    ]
    history = directory / "history"
    if history.is_dir():
        for file in sorted(history.iterdir(), key=lambda file: file.name):
            record, _, rest = file.name.partition(".")
            if rest.endswith(".avsc"):
                schemas.append(read_schema(file, record, current=False))
    return tuple(schemas)


AVRO_DIRECTORY: Traversable = files("dora.schemas") / "avro"
"""Where the `.avsc` files lie, installed or in the source tree."""

SCHEMAS: tuple[Schema, ...] = _read_all(AVRO_DIRECTORY)
"""All known schemas, the current ones first."""

CURRENT: dict[str, Schema] = {schema.record: schema for schema in SCHEMAS if schema.current}
"""The schema that each record is written with."""

FULL_NAMES: dict[str, str] = {schema.parsed["name"]: name for name, schema in CURRENT.items()}
"""Records by the full name of their schema: `dora.v1.Chunk` is `chunk`."""

BY_FINGERPRINT: dict[bytes, Schema] = {schema.fingerprint: schema for schema in reversed(SCHEMAS)}
"""All known schemas by fingerprint; a current one wins over an equal past one."""
