"""An OTLP receiver over HTTP, as a collector is one, that keeps the spans of a test."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.http_server import Handler, served


@dataclass(frozen=True, slots=True)
class Received:
    """A span as it came over the wire; ids as hexadecimal text, times in nanoseconds."""

    name: str
    trace: str
    span: str
    parent: str
    start: int
    end: int
    service: str
    attributes: dict[str, Any]
    events: list[dict[str, Any]]
    links: list[tuple[str, str]]


@dataclass
class Receiver:
    """Where spans are sent, and what has come."""

    endpoint: str = ""
    spans: list[Received] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def trace(self, trace: str) -> list[Received]:
        """The spans of a trace."""
        return [span for span in list(self.spans) if span.trace == trace]

    def take(self, body: bytes) -> None:
        """Decode a request."""
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            facts = _attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Received(
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            str(facts["service.name"]),
                            _attributes(span.attributes),
                            [_attributes(event.attributes) for event in span.events],
                            [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                        )
                    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {p.key: getattr(p.value, p.value.WhichOneof("value")) for p in pairs}


@contextmanager
def span_receiver() -> Iterator[Receiver]:
    """A receiver on a free port."""
    receiver = Receiver()

    class Spans(Handler):
        def do_POST(self) -> None:
            body = self.body()
            if self.path != "/v1/traces" or self.headers.get("Content-Encoding"):
                receiver.broken.append(f"{self.path} {self.headers}")
            else:
                receiver.take(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.answer(200, answer, "application/x-protobuf")

    with served(Spans) as receiver.endpoint:
        yield receiver
