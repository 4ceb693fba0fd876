"""Records to bytes and back: an Avro body behind a prefix that names its schema.

`decode(encode(record)) == record`, and any other bytes either decode to a well-formed record or
raise `UndecodableRecord`, never anything else. The prefix is that of Avro's single-object
encoding, or that of Confluent's wire format where a registry's ids are handed in (see
`dora.schemas.framing`). Single-object values are read either way. Values written with a past schema
are resolved to the current one.
"""

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from io import BytesIO
from operator import attrgetter
from typing import Any, Literal

from fastavro import schemaless_reader, schemaless_writer
from fastavro.read import SchemaResolutionError

from dora.schemas.framing import (
    LARGEST_ID,
    MAGIC,
    REGISTRY_MAGIC,
    REGISTRY_PREFIX_BYTES,
    RegistryFraming,
    UndecodableCode,
    UndecodableRecord,
)
from dora.schemas.records import InvalidRecord, Record
from dora.schemas.registry import BY_FINGERPRINT, CURRENT, RECORD_TYPES, SCHEMAS, Schema

__all__ = ["MAGIC", "SCHEMAS", "UndecodableCode", "UndecodableRecord", "decode", "encode"]

_HEADER_BYTES = len(MAGIC) + 8
_MALFORMED = (
    ValueError,
    TypeError,
    IndexError,
    OverflowError,
    MemoryError,
    SchemaResolutionError,
)

_ToAvro = Callable[[Any], dict[str, Any]]
_FromAvro = Callable[[dict[str, Any]], Any]


def encode(record: Record, framing: RegistryFraming | None = None) -> bytes:
    """The record as bytes; InvalidRecord if a field's value does not fit its type.

    Half of a surrogate pair in a text, which UTF-8 cannot say, is written as `\\udXXX`: texts that
    others wrote (answers, errors of a verifier that quotes them) must not end a process.

    With `framing` in Confluent's wire format, under the ids that it was given.
    """
    prefix, parsed, to_avro = _ENCODERS[type(record)]
    if framing is not None:
        prefix = framing.prefixes[type(record)]
    body = BytesIO()
    body.write(prefix)
    try:
        datum = to_avro(record)
        try:
            schemaless_writer(body, parsed, datum)
        except UnicodeEncodeError:
            body = BytesIO(prefix)
            body.seek(len(prefix))
            schemaless_writer(body, parsed, _encodable(datum))
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InvalidRecord(f"{type(record).__name__} cannot be written: {error}") from error
    return body.getvalue()


def _encodable(value: Any) -> Any:
    """The same value with every text as UTF-8 can say it."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    return [_encodable(each) for each in value] if isinstance(value, list | tuple) else value


def decode(data: bytes, framing: RegistryFraming | None = None) -> Record:
    """The record that the bytes hold; UndecodableRecord if they hold none.

    With `framing` values in Confluent's wire format are read too; SchemaAwaited while the registry
    has not answered.
    """
    if data[:2] == MAGIC:
        if len(data) < _HEADER_BYTES:
            raise UndecodableRecord(
                "truncated", f"{len(data)} bytes are too few for the schema's name"
            )
        start = _HEADER_BYTES
        reader = _READERS.get(data[2:_HEADER_BYTES])
        if reader is None:
            raise UndecodableRecord(
                "unknown_schema",
                f"schema {data[2:_HEADER_BYTES].hex()} is unknown to this version of dora",
            )
    else:
        start = REGISTRY_PREFIX_BYTES
        reader = _registry_reader(data, framing)
    writer_schema, reader_schema, from_avro, name = reader
    body = BytesIO(data)
    body.seek(start)
    try:
        # A reader schema makes fastavro compare and resolve: left out where both are the same.
        datum = schemaless_reader(body, writer_schema, reader_schema)
        end = body.tell()
        if end != len(data):
            raise UndecodableRecord(
                "truncated", f"{len(data) - end} bytes are left over after a {name}"
            )
        record: Record = from_avro(typing.cast(dict[str, Any], datum))
    except UndecodableRecord:
        raise
    except EOFError as error:
        raise UndecodableRecord("truncated", f"the bytes end within a {name}") from error
    except _MALFORMED as error:
        # fastavro reports some ends of data as an IndexError; every record ends with a number, so
        # that nothing else fails at the very end.
        if isinstance(error, IndexError) and body.tell() == len(data):
            raise UndecodableRecord("truncated", f"the bytes end within a {name}") from error
        raise UndecodableRecord("invalid", f"{name}: {error or type(error).__name__}") from error
    return record


def _registry_reader(data: bytes, framing: RegistryFraming | None) -> "_Reader":
    if data[:1] != REGISTRY_MAGIC:
        raise UndecodableRecord(
            "bad_magic", f"starts with {data[:2].hex() or 'nothing'}, not with {MAGIC.hex()}"
        )
    if len(data) < REGISTRY_PREFIX_BYTES:
        raise UndecodableRecord("truncated", f"{len(data)} bytes are too few for a schema's id")
    number = int.from_bytes(data[1:REGISTRY_PREFIX_BYTES], "big")
    if framing is None:
        raise UndecodableRecord(
            "no_registry",
            f"written with id {number} of a schema registry (Confluent's wire format), and none is "
            "configured: set kafka.registry.url or --registry",
        )
    known: _Reader | None = framing.readers.get(number)
    if known is not None:
        return known
    if not 0 < number <= LARGEST_ID:
        raise UndecodableRecord("unknown_schema", f"{number} is no id of a schema registry")
    schema = framing.find(number)
    # One that is unknown here was written by a newer dora: evolution is FULL_TRANSITIVE, so that it
    # resolves to ours.
    reader = _READERS.get(schema.fingerprint) or reader_of(schema)
    framing.readers[number] = reader
    return reader


def _check_int(bad: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if not -(2**31) <= bad[name] < 2**31:
            raise InvalidRecord(f"{name} is {bad[name]}, which does not fit into 32 bits")


def _check_ints(bad: Any, names: list[str]) -> None:
    for name in names:
        for item in bad[name]:
            if not -(2**31) <= item < 2**31:
                raise InvalidRecord(f"{name} holds {item}, which does not fit into 32 bits")


class _Converter:
    """How one dataclass is converted: worked out once, so that records convert in microseconds."""

    def __init__(self, cls: type[Any], schema: Mapping[str, Any]) -> None:
        names = tuple(field.name for field in fields(cls))
        in_schema = {field["name"]: field["type"] for field in schema["fields"]}
        if set(names) != set(in_schema):
            raise TypeError(
                f"{cls.__name__} and its schema differ in {sorted(set(names) ^ set(in_schema))}"
            )
        hints = typing.get_type_hints(cls)
        self.cls = cls
        self.names = names
        self.get = attrgetter(*names)
        self.ints = tuple(name for name in names if in_schema[name] == "int")
        self.choices = tuple(
            (name, frozenset(typing.get_args(hints[name])))
            for name in names
            if typing.get_origin(hints[name]) is Literal
        )
        self.records: list[tuple[str, _Converter]] = []
        self.record_arrays: list[tuple[str, _Converter]] = []
        self.arrays: list[str] = []
        self.int_arrays: list[str] = []
        for name in names:
            self._nest(name, hints[name], in_schema[name])

    def _nest(self, name: str, hint: Any, avro_type: Any) -> None:
        if typing.get_origin(hint) is tuple:
            item = typing.get_args(hint)[0]
            if isinstance(item, type) and hasattr(item, "__dataclass_fields__"):
                self.record_arrays.append((name, _converter_of(item, avro_type["items"])))
            else:
                self.arrays.append(name)
                if avro_type["items"] == "int":
                    self.int_arrays.append(name)
        elif isinstance(hint, type) and hasattr(hint, "__dataclass_fields__"):
            self.records.append((name, _converter_of(hint, avro_type)))
        elif isinstance(hint, types.UnionType) and not {type(None), str, int, float} >= set(
            typing.get_args(hint)
        ):
            raise TypeError(f"{self.cls.__name__}.{name}: no conversion for {hint}")

    def to_avro(self, record: Any) -> dict[str, Any]:
        datum = dict(zip(self.names, self.get(record), strict=True))
        if self.ints:
            _check_int(datum, self.ints)
        if self.int_arrays:
            _check_ints(datum, self.int_arrays)
        for name, converter in self.records:
            datum[name] = converter.to_avro(datum[name])
        for name, converter in self.record_arrays:
            datum[name] = [converter.to_avro(item) for item in datum[name]]
        return datum

    def from_avro(self, datum: dict[str, Any]) -> Any:
        if self.ints:
            _check_int(datum, self.ints)
        if self.int_arrays:
            _check_ints(datum, self.int_arrays)
        for name, choices in self.choices:
            if datum[name] not in choices:
                raise InvalidRecord(
                    f"{name} is {datum[name]!r}, not one of {', '.join(sorted(choices))}"
                )
        for name in self.arrays:
            datum[name] = tuple(datum[name])
        for name, converter in self.records:
            datum[name] = converter.from_avro(datum[name])
        for name, converter in self.record_arrays:
            datum[name] = tuple([converter.from_avro(item) for item in datum[name]])
        return self.cls(**datum)


_NESTED: dict[type[Any], _Converter] = {}


def _converter_of(cls: type[Any], avro_type: Any) -> _Converter:
    # Avro spells a named type out once and refers to it by name from then on.
    if cls not in _NESTED:
        _NESTED[cls] = _Converter(cls, avro_type)
    return _NESTED[cls]


_CONVERTERS = {name: _Converter(cls, CURRENT[name].parsed) for name, cls in RECORD_TYPES.items()}

_ENCODERS: dict[type[Any], tuple[bytes, dict[str, Any], _ToAvro]] = {
    cls: (MAGIC + CURRENT[name].fingerprint, CURRENT[name].parsed, _CONVERTERS[name].to_avro)
    for name, cls in RECORD_TYPES.items()
}


_Reader = tuple[dict[str, Any], dict[str, Any] | None, _FromAvro, str]


def reader_of(schema: Schema) -> _Reader:
    """Writer schema, schema to resolve to (None: the same), conversion and name of the record."""
    current = CURRENT[schema.record]
    resolve_to = None if schema.current else current.parsed
    return schema.parsed, resolve_to, _CONVERTERS[schema.record].from_avro, schema.record


_READERS = {name: reader_of(schema) for name, schema in BY_FINGERPRINT.items()}
