"""The headers of records as CloudEvents (Kafka protocol binding, binary content mode)."""

import re
from urllib.parse import unquote

import pytest

from dora.bus.writer import HeaderMaker
from dora.schemas.codec import encode
from dora.schemas.records import Command, DeadLetter, Record, Step
from dora.schemas.registry import RECORD_NAMES
from tests.cloud_events import event_of
from tests.factories import admission, chunk, policy, run_started, status, trajectory

GROUP = admission(0, 0)
TRAJECTORY = trajectory(GROUP)
RECORDS: list[Record] = [
    GROUP,
    TRAJECTORY,
    policy(0),
    run_started(),
    Step("r", "step", 1, 0, 1, (), (), {}, "c", None, "t", 0),
    status("w0"),
    chunk(TRAJECTORY, 0, 0, 4),
    Command("r", "w0", "i", "stop", 0),
    DeadLetter("r", "invalid", "why", "w0", 0),
]
URI_REFERENCE = re.compile(r"(?:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-F]{2})+")


def test_no_kind_of_record_is_left_out() -> None:
    assert {type(record) for record in RECORDS} == set(RECORD_NAMES)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
@pytest.mark.parametrize("trace", [None, "00-" + "a" * 32 + "-" + "b" * 16 + "-01"])
def test_a_record_is_a_valid_event(record: Record, trace: str | None) -> None:
    headers = HeaderMaker("w0").headers(record, trace)
    given = [(name, value) for name, value in headers if isinstance(value, bytes)]
    assert len(given) == len(headers)
    attributes, data = event_of(given, b"key", encode(record))
    assert data == record
    assert attributes["specversion"] == "1.0"
    assert attributes["type"] == f"dora.{RECORD_NAMES[type(record)]}.v1"
    assert attributes["source"] == f"/dora/{record.run}/w0"
    assert attributes["datacontenttype"] == "avro/binary"
    assert attributes["partitionkey"] == "key"
    # the trace is the transport's (W3C Trace Context), not an attribute of the event
    assert dict(given).get("traceparent") == (None if trace is None else trace.encode())


def test_source_and_id_together_name_one_event() -> None:
    makers = [HeaderMaker(name) for name in ("w0", "w0", "w1")]
    named = set()
    for maker in makers:
        for _ in range(50):
            headers = dict(maker.headers(GROUP, None))
            named.add((headers["ce_source"], headers["ce_id"]))
    assert len(named) == 150


@pytest.mark.parametrize("name", ["w0", "gpu box 7", "a/b?c#d", "Wörker", "100%"])
def test_a_source_is_a_uri_reference_whatever_a_worker_is_called(name: str) -> None:
    source = dict(HeaderMaker(name).headers(GROUP, None))["ce_source"]
    assert isinstance(source, bytes)
    text = source.decode()
    assert URI_REFERENCE.fullmatch(text)
    assert unquote(text.rsplit("/", 1)[1]) == name and text.count("/") == 3
