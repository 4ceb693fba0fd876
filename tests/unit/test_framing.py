"""Confluent's wire format: the same Avro body behind five other bytes."""

import json
from collections.abc import Callable

import pytest

from dora.schemas.codec import UndecodableRecord, decode, encode
from dora.schemas.framing import RegistryFraming, SchemaAwaited
from dora.schemas.records import Policy
from dora.schemas.registry import (
    CURRENT,
    RECORD_TYPES,
    SCHEMAS,
    Schema,
    current_text,
    schema_from_text,
)
from tests.factories import admission, trajectory

RECORD = trajectory(admission(1, 0))
IDS = {name: 7 + index for index, name in enumerate(RECORD_TYPES)}
KNOWN = {number: CURRENT[name] for name, number in IDS.items()}


def framing(find: Callable[[int], Schema] = KNOWN.__getitem__) -> RegistryFraming:
    made = RegistryFraming(find)
    made.write_with(IDS)
    return made


def test_only_the_prefix_differs() -> None:
    data = encode(RECORD, framing())
    assert data[:5] == b"\0" + IDS["trajectory"].to_bytes(4, "big")
    assert data[5:] == encode(RECORD)[10:]


@pytest.mark.parametrize("name", sorted(RECORD_TYPES))
def test_what_is_registered_is_the_schema_that_is_written_with(name: str) -> None:
    registered = schema_from_text(current_text(name), "x")
    assert registered is not None and "\n" not in current_text(name)
    assert (registered.record, registered.fingerprint) == (name, CURRENT[name].fingerprint)


def test_a_record_comes_back_in_either_framing() -> None:
    both = framing()
    assert decode(encode(RECORD, both), both) == RECORD
    assert decode(encode(RECORD), both) == RECORD


def test_each_id_is_asked_for_once() -> None:
    asked: list[int] = []

    def find(number: int) -> Schema:
        asked.append(number)
        return KNOWN[number]

    made = framing(find)
    data = encode(RECORD, made)
    assert decode(data, made) == decode(data, made)
    assert asked == [IDS["trajectory"]]


def test_without_a_registry_the_record_is_refused_with_what_to_set() -> None:
    with pytest.raises(
        UndecodableRecord, match=r"id 15 of a schema registry.*kafka\.registry\.url"
    ):
        decode(b"\0\0\0\0\x0fbody")
    with pytest.raises(UndecodableRecord) as caught:
        decode(encode(RECORD, framing()))
    assert caught.value.code == "no_registry"


def test_a_record_whose_schema_is_not_known_yet_is_not_unreadable() -> None:
    answers: list[Schema] = []

    def find(number: int) -> Schema:
        if not answers:
            raise SchemaAwaited(number)
        return answers[0]

    made = framing(find)
    data = encode(RECORD, made)
    with pytest.raises(SchemaAwaited):
        decode(data, made)
    answers.append(CURRENT["trajectory"])
    assert decode(data, made) == RECORD


def _refusal(data: bytes) -> UndecodableRecord:
    with pytest.raises(UndecodableRecord) as caught:
        decode(data, framing())
    return caught.value


@pytest.mark.parametrize("number", [0, 2**31, 2**32 - 1])
def test_an_id_that_no_registry_gives_is_not_asked_for(number: int) -> None:
    assert _refusal(b"\0" + number.to_bytes(4, "big") + b"x").code == "unknown_schema"


def test_a_cut_record_is_truncated() -> None:
    data = encode(RECORD, framing())
    for end in range(1, len(data)):
        assert _refusal(data[:end]).code == "truncated", end
    assert "2 bytes are left over" in _refusal(data + b"xy").reason


def test_a_body_of_another_schema_is_invalid_or_truncated() -> None:
    policy = encode(RECORD, framing())[5:]
    refusal = _refusal(b"\0" + IDS["policy"].to_bytes(4, "big") + policy)
    assert refusal.code in ("invalid", "truncated")


def _newer(**field: object) -> Schema:
    text = json.loads(current_text("policy"))
    text["fields"].append(field)
    schema = schema_from_text(json.dumps(text), "newer")
    assert schema is not None and schema.fingerprint != CURRENT["policy"].fingerprint
    return schema


def test_a_record_of_a_newer_version_is_resolved_to_what_is_known_here() -> None:
    record = Policy("r", 3, "full", "file:///w", (), "sum", b"", b"", (), 1)
    data = encode(record)[10:] + b"\x08note"
    newer = _newer(name="remark", type="string", default="")
    made = RegistryFraming(lambda number: newer)
    assert decode(b"\0\0\0\0\x63" + data, made) == record


def test_past_schemas_are_known_by_their_text_too() -> None:
    past = next(schema for schema in SCHEMAS if not schema.current)
    again = schema_from_text(json.dumps(past.parsed), "registry")
    assert again is not None
    assert (again.record, again.fingerprint) == (past.record, past.fingerprint)


@pytest.mark.parametrize(
    "text",
    ['"string"', '{"type":"record","name":"Trajectory","fields":[]}', '["null","string"]'],
)
def test_a_schema_of_somebody_else_is_none_of_ours(text: str) -> None:
    assert schema_from_text(text, "x") is None


@pytest.mark.parametrize(
    "text", ["", "{", '{"type":"record"}', '{"type":"wrong"}', "[1]", '{"$schema":"x"}', "7"]
)
def test_what_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        schema_from_text(text, "x")
