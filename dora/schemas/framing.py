"""How a value says which schema its Avro body was written with.

The body is the same in both framings, only the prefix differs. Single-object encoding (Avro 1.12
specification): `C3 01` and the 8-byte little-endian CRC-64-AVRO fingerprint of the schema.
Confluent's wire format: `00` and a 4-byte big-endian id that a schema
registry gave the schema; readers ask it once per id. Nothing here does any I/O.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from dora.schemas.records import Record
from dora.schemas.registry import RECORD_TYPES, Schema

MAGIC = b"\xc3\x01"
"""What a value in single-object encoding starts with."""
REGISTRY_MAGIC = b"\x00"
"""What a value in Confluent's wire format starts with."""
REGISTRY_PREFIX_BYTES = 5
LARGEST_ID = 2**31 - 1
"""Registries count ids as signed 32-bit numbers."""

UndecodableCode = Literal["bad_magic", "no_registry", "unknown_schema", "truncated", "invalid"]


class UndecodableRecord(ValueError):
    """Bytes that are no record.

    `code` is `bad_magic` (neither framing), `no_registry` (Confluent's wire format, and no schema
    registry is configured), `unknown_schema` (written by a version of dora that this one does not
    know, or with a schema that is not dora's), `truncated` (bytes missing or left over) or
    `invalid` (a value that contradicts the schema or the record itself); `reason` says it for
    people.
    """

    def __init__(self, code: UndecodableCode, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code: UndecodableCode = code
        self.reason = reason


class SchemaAwaited(Exception):
    """The registry was asked for a schema and has not answered yet: decode again later."""


class RegistryFraming:
    """Confluent's wire format, with the ids of one registry.

    `find(id)` returns the schema with that id, or raises UndecodableRecord if it is none of dora's,
    or SchemaAwaited while that is not known; what it returned is kept, and not asked for again.
    """

    def __init__(self, find: Callable[[int], Schema]) -> None:
        self.find = find
        self.prefixes: dict[type[Record], bytes] = {}
        """The 5 bytes before each kind of record; filled by `write_with`."""
        self.readers: dict[int, Any] = {}
        """What the codec made of the schemas that were found, by id."""

    def write_with(self, ids: Mapping[str, int]) -> None:
        """Write each record (by its name in `RECORD_TYPES`) under the id of its current schema."""
        self.prefixes = {
            RECORD_TYPES[name]: REGISTRY_MAGIC + number.to_bytes(4, "big")
            for name, number in ids.items()
        }
