"""The codec: what is written is read back, and what is damaged is refused with a reason."""

import json
import math
import struct
import typing
from dataclasses import asdict, fields, replace
from io import BytesIO
from types import UnionType
from typing import Any, Literal

import fastavro
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora.schemas.codec import MAGIC, UndecodableRecord, decode, encode
from dora.schemas.records import (
    Admission,
    Chunk,
    Command,
    DeadLetter,
    GroupRef,
    InvalidRecord,
    Policy,
    Record,
    RunStarted,
    SampleRef,
    Sampling,
    SlotOffset,
    Status,
    Step,
    Trajectory,
    VersionRun,
    WeightFile,
    pack_logprobs,
    pack_tokens,
)
from dora.schemas.registry import AVRO_DIRECTORY, CURRENT, RECORD_TYPES, schema_fingerprint

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def _value(hint: Any, avro_type: Any) -> st.SearchStrategy[Any]:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return st.sampled_from(typing.get_args(hint))
    if origin is UnionType:
        inner = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        return st.none() | _value(inner, next(t for t in avro_type if t != "null"))
    if origin is tuple:
        item = typing.get_args(hint)[0]
        return st.lists(_value(item, avro_type["items"]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(TEXT, _value(typing.get_args(hint)[1], None), max_size=3)
    if hint in (Sampling, VersionRun, WeightFile, SlotOffset, GroupRef, SampleRef):
        return _plain(hint, NESTED[hint])
    if hint is int:
        return INT32 if avro_type == "int" else INT64
    return {str: TEXT, float: FLOAT, bool: st.booleans(), bytes: st.binary(max_size=16)}[hint]


def _nested_schemas(schema: Any, found: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema, dict):
        if schema.get("type") == "record":
            found[schema["name"].rpartition(".")[2]] = schema
        for value in schema.values():
            _nested_schemas(value, found)
    elif isinstance(schema, list):
        for value in schema:
            _nested_schemas(value, found)
    return found


_BY_NAME = _nested_schemas([schema.parsed for schema in CURRENT.values()], {})
NESTED: dict[Any, Any] = {
    cls: _BY_NAME[cls.__name__]
    for cls in (Sampling, VersionRun, WeightFile, SlotOffset, GroupRef, SampleRef)
}


def _plain(cls: type[Any], schema: Any, **given_fields: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    avro = {field["name"]: field["type"] for field in schema["fields"]}
    strategies = {
        field.name: given_fields.get(field.name, _value(hints[field.name], avro[field.name]))
        for field in fields(cls)
    }
    return st.builds(cls, **strategies)


@st.composite
def records(draw: st.DrawFn, cls: type[Record]) -> Record:
    """Any well-formed record of the class."""
    name = next(name for name, known in RECORD_TYPES.items() if known is cls)
    n = draw(st.integers(0, 6))
    tokens = pack_tokens(draw(st.lists(INT32, min_size=n, max_size=n)))
    logprobs = pack_logprobs(draw(st.lists(FLOAT32, min_size=n, max_size=n)))
    own: dict[str, Any] = {}
    if cls is Chunk:
        own = {"token_ids": tokens, "logprobs": logprobs}
        own["resumed_tokens"] = draw(st.integers(0, n))
    elif cls is Command:
        own = {"prefix_token_ids": tokens, "prefix_logprobs": logprobs}
        first = draw(st.integers(0, n))
        runs = (VersionRun(3, first), VersionRun(4, n - first))
        own["prefix_runs"] = draw(st.sampled_from([(), runs]))
    elif cls is Policy:
        own = {"canary_token_ids": tokens, "canary_logprobs": logprobs[4:]}
    elif cls is Trajectory:
        mask = bytes(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)))
        own = {
            "token_ids": tokens,
            "logprobs": logprobs,
            "mask": mask,
            "version_runs": (VersionRun(draw(INT64), mask.count(1)),),
            "resumed_tokens": draw(st.integers(0, mask.count(1))),
            "error": "no reward" if draw(st.booleans()) else None,
        }
        own["reward"] = draw(FLOAT | st.none()) if own["error"] else draw(FLOAT)
    return typing.cast(
        Record,
        draw(_plain(cls, CURRENT[name].parsed, **{k: st.just(v) for k, v in own.items()})),
    )


ANY_RECORD = st.one_of([records(cls) for cls in RECORD_TYPES.values()])

SAMPLING = Sampling(1.0, 0.9, 50, 64, (2, 7), 11)
TRAJECTORY = Trajectory(
    run="r",
    trajectory_id="g0/1",
    group_id="g0",
    sample=1,
    attempt=2,
    chunks=1,
    policy_version=3,
    ordinal=0,
    purpose="train",
    token_ids=pack_tokens([5, 6, 7]),
    mask=b"\x00\x01\x01",
    logprobs=pack_logprobs([0.0, -1.5, -0.25]),
    version_runs=(VersionRun(3, 2),),
    finish_reason="stop",
    reward=0.5,
    reward_parts={"a": 0.5},
    error=None,
    text="hi",
    worker="w",
    engine="e",
    sampling=SAMPLING,
    started_ms=1,
    generated_ms=2,
    created_ms=3,
)


def _write(name: str, datum: dict[str, Any]) -> bytes:
    """A value with the current schema's name in front, whatever its content."""
    body = BytesIO()
    fastavro.schemaless_writer(body, CURRENT[name].parsed, datum)
    return MAGIC + CURRENT[name].fingerprint + body.getvalue()


def _datum(data: bytes, name: str) -> dict[str, Any]:
    return typing.cast(
        dict[str, Any], fastavro.schemaless_reader(BytesIO(data[10:]), CURRENT[name].parsed, None)
    )


@pytest.mark.parametrize("name", sorted(RECORD_TYPES))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_record_comes_back_as_it_was_written(name: str, data: st.DataObject) -> None:
    record = data.draw(records(RECORD_TYPES[name]))
    assert decode(encode(record)) == record


@pytest.mark.parametrize("name", sorted(RECORD_TYPES))
def test_dataclass_and_schema_have_the_same_fields(name: str) -> None:
    in_schema = {field["name"] for field in CURRENT[name].parsed["fields"]}
    assert {field.name for field in fields(RECORD_TYPES[name])} == in_schema


@pytest.mark.parametrize("name", sorted(RECORD_TYPES))
def test_dataclass_and_schema_have_the_same_defaults(name: str) -> None:
    in_schema = {field["name"]: field for field in CURRENT[name].parsed["fields"]}
    for field in fields(RECORD_TYPES[name]):
        schema_default = in_schema[field.name].get("default")
        if field.default_factory is not field.default and callable(field.default_factory):
            assert schema_default == field.default_factory()
        elif isinstance(field.default, bytes):
            assert schema_default.encode("latin-1") == field.default
        elif isinstance(field.default, tuple):
            assert schema_default == list(field.default)
        elif isinstance(field.default, (str, int, float)):
            assert schema_default == field.default


def test_fingerprints_are_those_of_the_avro_specification() -> None:
    # Published CRC-64-AVRO values of the primitive schemas (Apache Avro's own test data).
    assert schema_fingerprint(typing.cast(Any, "null")) == struct.pack("<q", 7195948357588979594)
    assert schema_fingerprint(typing.cast(Any, "int")) == struct.pack("<q", 8247732601305521295)


def test_a_value_starts_with_magic_and_the_fingerprint_of_its_schema() -> None:
    data = encode(TRAJECTORY)
    assert data[:2] == b"\xc3\x01"
    assert data[2:10] == CURRENT["trajectory"].fingerprint


def test_collections_come_back_as_tuples_so_that_records_stay_immutable() -> None:
    record = decode(encode(TRAJECTORY))
    assert isinstance(record, Trajectory)
    assert isinstance(record.version_runs, tuple)
    assert isinstance(record.sampling.stop_token_ids, tuple)


def test_numpy_numbers_are_written_like_their_python_values() -> None:
    record = replace(TRAJECTORY, reward=np.float32(0.5), ordinal=np.int64(4), sample=np.int32(1))
    assert decode(encode(record)) == replace(TRAJECTORY, ordinal=4)


def test_a_number_beyond_32_bits_is_refused_in_a_field_of_32_bits() -> None:
    with pytest.raises(InvalidRecord, match="sample is 2147483648"):
        encode(replace(TRAJECTORY, sample=2**31))
    with pytest.raises(InvalidRecord, match="stop_token_ids holds 2147483648"):
        encode(replace(TRAJECTORY, sampling=replace(TRAJECTORY.sampling, stop_token_ids=(2**31,))))


def test_a_value_of_the_wrong_type_is_refused_with_the_records_name() -> None:
    with pytest.raises(InvalidRecord, match="Trajectory cannot be written"):
        encode(replace(TRAJECTORY, worker=typing.cast(str, 7)))


def test_half_a_surrogate_pair_is_spelled_out_wherever_it_stands() -> None:
    """A verifier's error may quote a row of a data set that holds one."""
    half = replace(TRAJECTORY, text="sun \ud800", reward_parts={"\udfff": 1.0}, error="\ud800")
    read = decode(encode(half))
    assert isinstance(read, Trajectory)
    assert (read.text, read.error) == ("sun \\ud800", "\\ud800")
    assert read.reward_parts == {"\\udfff": 1.0}
    assert read == replace(half, text=read.text, error=read.error, reward_parts=read.reward_parts)


def _refusal(data: bytes) -> UndecodableRecord:
    with pytest.raises(UndecodableRecord) as caught:
        decode(data)
    return caught.value


@pytest.mark.parametrize("data", [b"", b"\xc3", b"{}", b"\x01\x00\x00\x00\x07hello"])
def test_bytes_of_another_format_are_bad_magic(data: bytes) -> None:
    assert _refusal(data).code == "bad_magic"


def test_a_schema_of_another_version_is_unknown_and_named() -> None:
    refusal = _refusal(MAGIC + bytes(8) + b"body")
    assert refusal.code == "unknown_schema"
    assert "0000000000000000" in refusal.reason


def test_a_record_is_truncated_wherever_it_is_cut() -> None:
    data = encode(TRAJECTORY)
    for end in range(2, len(data)):
        assert _refusal(data[:end]).code == "truncated", end


def test_bytes_left_over_are_counted() -> None:
    refusal = _refusal(encode(TRAJECTORY) + b"xyz")
    assert refusal.code == "truncated"
    assert "3 bytes are left over" in refusal.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token_ids": b"\x01\x02\x03\x04\x05"}, "multiple of 4"),
        ({"logprobs": struct.pack("<3f", 0, math.nan, -1)}, "log-probability 1 is nan"),
        ({"logprobs": struct.pack("<3f", 0, -math.inf, -1)}, "log-probability 1 is -inf"),
        ({"logprobs": struct.pack("<2f", 0, -1)}, "2 log-probabilities for 3 tokens"),
        ({"mask": b"\x00\x01"}, "mask of 2 for 3 tokens"),
        ({"mask": b"\x00\x01\x02"}, "something else than 0 and 1"),
        ({"version_runs": [{"version": 3, "tokens": 1}]}, "do not add up"),
        ({"reward": math.nan}, "reward is nan"),
        ({"reward": None}, "neither reward nor error"),
        ({"purpose": "fun"}, "purpose is 'fun', not one of eval, train"),
        ({"sample": 2**40}, "sample is 1099511627776"),
        (
            {"sampling": {**asdict(TRAJECTORY.sampling), "stop_token_ids": [2, 2**40]}},
            "stop_token_ids holds 1099511627776",
        ),
    ],
)
def test_a_record_that_contradicts_itself_is_invalid(change: dict[str, Any], reason: str) -> None:
    datum = {**_datum(encode(TRAJECTORY), "trajectory"), **change}
    refusal = _refusal(_write("trajectory", datum))
    assert refusal.code == "invalid"
    assert reason in refusal.reason


def test_text_that_is_no_utf8_is_invalid() -> None:
    data = encode(replace(TRAJECTORY, worker="worker-seven"))
    refusal = _refusal(data.replace(b"worker-seven", b"worker-\xff\xff\xff\xff\xff"))
    assert refusal.code == "invalid"


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused_and_never_crash(data: bytes) -> None:
    with pytest.raises(UndecodableRecord):
        decode(data)


@settings(max_examples=600, deadline=None)
@given(name=st.sampled_from(sorted(RECORD_TYPES)), body=st.binary(max_size=200))
def test_a_random_body_is_read_or_refused(name: str, body: bytes) -> None:
    try:
        record = decode(MAGIC + CURRENT[name].fingerprint + body)
    except UndecodableRecord:
        return
    assert decode(encode(record)) is not None


@settings(max_examples=150, deadline=None)
@given(record=ANY_RECORD, data=st.data())
def test_a_damaged_record_is_read_or_refused(record: Record, data: st.DataObject) -> None:
    damaged = bytearray(encode(record))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(2, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(damaged))
    except UndecodableRecord:
        return


def test_every_record_class_is_covered() -> None:
    assert set(RECORD_TYPES.values()) == {
        Admission,
        Chunk,
        Command,
        DeadLetter,
        Policy,
        RunStarted,
        Status,
        Step,
        Trajectory,
    }
    assert {file.name for file in AVRO_DIRECTORY.iterdir() if file.name.endswith(".avsc")} == {
        f"{name}.avsc" for name in RECORD_TYPES
    }
    listed = json.loads((AVRO_DIRECTORY / "fingerprints.json").read_text(encoding="utf-8"))
    assert set(listed) == set(RECORD_TYPES)
