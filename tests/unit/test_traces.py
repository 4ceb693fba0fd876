"""Names of traces, their header, and an exporter that never waits."""

import socket
import time

import pytest

from dora.consumers.trainer.step_reports import spans_of
from dora.producers.coordinator.coordinator import GroupTraces
from dora.telemetry import span_export
from dora.telemetry.span_export import ExportingTracer
from dora.telemetry.tracer import (
    Span,
    TraceContext,
    admission_span,
    generation_span,
    parse_traceparent,
    scoring_span,
    trace_of,
)
from tests.factories import G, admission, places_of, step, trajectory
from tests.span_receiver import span_receiver

DEADLINE = 60.0


def test_names_are_functions_of_what_they_name() -> None:
    # written out, because runs that go on under a newer dora must keep them
    assert trace_of("id", "g0") == "fd2fd4ab1ed39754c64e228ef2ce9d02"
    assert trace_of("id", "g0") != trace_of("id", "g1") != trace_of("other", "g1")
    assert generation_span("g0/1", 0) != generation_span("g0/1", 1) != scoring_span("g0/1", 1)
    assert len(admission_span()) == 16


def test_the_header_says_where_and_whether_spans_are_made() -> None:
    header = GroupTraces(sampled=False)
    assert header.header("g0") is None, "before the run's id is known"
    header.run_id = "id"
    text = header.header("g0")
    assert text == f"00-{trace_of('id', 'g0')}-{admission_span()}-00"
    found = parse_traceparent(text.encode())
    assert found == TraceContext(trace_of("id", "g0"), admission_span(), False)
    assert str(found) == text
    assert header.header("") is None


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"00-" + b"0" * 32 + b"-" + b"1" * 16 + b"-01",
        b"00-" + b"1" * 32 + b"-" + b"0" * 16 + b"-01",
        b"ff-" + b"1" * 32 + b"-" + b"1" * 16 + b"-01",
        b"00-" + b"1" * 32 + b"-" + b"1" * 16 + b"-01-more",
        b"00-" + b"A" * 32 + b"-" + b"1" * 16 + b"-01",
        b"00-" + b"1" * 31 + b"-" + b"1" * 16 + b"-01",
    ],
)
def test_a_header_that_is_none_names_no_trace(header: bytes | None) -> None:
    assert parse_traceparent(header) is None


def test_a_header_of_a_later_version_is_understood() -> None:
    later = b"01-" + b"1" * 32 + b"-" + b"2" * 16 + b"-03-more"
    assert parse_traceparent(later) == TraceContext("1" * 32, "2" * 16, True)


def test_a_step_has_a_span_in_the_trace_of_each_group_it_trained() -> None:
    groups = [admission(0, 0), admission(1, 0)]
    places = places_of([trajectory(g, s) for g in groups for s in range(G)])
    taken = step(0, 1, groups, places, at=10_000, train_seconds=2.0, publish_seconds=1.0)
    spans = spans_of(taken, "id")
    assert [span.context.trace for span in spans] == [trace_of("id", "g0"), trace_of("id", "g1")]
    assert [(span.start_ms, span.end_ms) for span in spans] == [(7000.0, 10_000)] * 2
    assert spans[0].attributes["staleness"] == 1
    assert [link.span for link in spans[0].links] == [scoring_span(f"g0/{s}", 0) for s in range(G)]


class Counted:
    """A meter that counts in a dictionary."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}

    def count(self, name: str, by: float = 1.0, value: str = "") -> None:
        self.counts[name] = self.counts.get(name, 0.0) + by


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    meter = Counted()
    monkeypatch.setattr(span_export, "meter", lambda: meter)
    monkeypatch.setattr(span_export, "SEND_SECONDS", 0.01)
    return meter


def span(number: int) -> Span:
    context = TraceContext(trace_of("id", f"g{number}"), admission_span(), True)
    return Span("admission", context, "", 1000.0, 2000.0, {"group": f"g{number}"})


def test_spans_are_sent_in_batches_and_the_rest_at_the_end(counted: Counted) -> None:
    with span_receiver() as receiver:
        tracer = ExportingTracer(receiver.endpoint, run="r", role="trainer", process="trainer")
        for number in range(700):
            tracer.emit(span(number))
        tracer.close()
        assert len(receiver.spans) == 700
        assert {one.service for one in receiver.spans} == {"dora-trainer"}
        assert receiver.spans[0].attributes == {"dora.group": "g0"}
        assert receiver.spans[0].end - receiver.spans[0].start == 10**9
    assert counted.counts == {"dora_process_spans_total": 700.0}


def test_what_has_gathered_is_sent_at_once(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_export, "SEND_SECONDS", 2.0)
    monkeypatch.setattr(span_export, "BATCH", 10)
    with span_receiver() as receiver:
        tracer = ExportingTracer(receiver.endpoint, run="r", role="trainer", process="trainer")
        for number in range(100):
            tracer.emit(span(number))
        begun = time.monotonic()
        while len(receiver.spans) < 100:
            assert time.monotonic() < begun + 10.0, "a batch waits for each: 20 s"
            time.sleep(0.02)
        tracer.close()


def test_spans_are_dropped_and_counted_while_the_receiver_is_away(
    counted: Counted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(span_export, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(span_export, "WAITING", 10)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        tracer = ExportingTracer(endpoint, run="r", role="trainer", process="trainer")
        for number in range(100):
            tracer.emit(span(number))
        dropped = "dora_process_spans_dropped_total"
        until = time.monotonic() + DEADLINE
        while counted.counts.get(dropped, 0.0) < 100 and time.monotonic() < until:
            time.sleep(0.05)
        tracer.close()
    assert counted.counts == {"dora_process_spans_total": 100.0, dropped: 100.0}
    assert len([r for r in caplog.records if "spans are dropped" in r.message]) == 1
