"""The tracer of a process whose traces are on: spans go to an OTLP receiver, in batches.

`emit` never waits. A thread of its own sends; while the receiver is away or slow spans gather up to
a limit, and beyond it they are dropped and counted, with one warning. OpenTelemetry's
BatchSpanProcessor does not count what it drops and may hold up the end of a process for 30 seconds.
"""

import logging
import queue
import threading
from collections.abc import Sequence
from typing import Any

from dora import __version__
from dora.errors import ConfigError
from dora.telemetry.meter import meter
from dora.telemetry.tracer import Span, TraceContext, Tracer

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode
except ImportError as error:
    raise ConfigError(
        f"traces.endpoint needs packages that are missing: {error}",
        hint="Install dora with its extra `traces`: pip install 'dora-rl[traces]'.",
    ) from error

log = logging.getLogger(__name__)

WAITING = 8192
"""Spans that may wait to be sent."""
BATCH = 512
SEND_SECONDS = 1.0
"""How long spans gather before they are sent."""
REQUEST_SECONDS = 5.0
CLOSE_SECONDS = 5.0
_PATH = "/v1/traces"


class ExportingTracer(Tracer):
    """Sends to `endpoint`, on behalf of the process with these names."""

    active = True

    def __init__(self, endpoint: str, *, run: str, role: str, process: str) -> None:
        url = endpoint.rstrip("/")
        if not url.endswith(_PATH):
            url += _PATH
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # warned about here, and once
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=REQUEST_SECONDS)
        self._resource = Resource.create(
            {
                "service.namespace": "dora",
                "service.name": f"dora-{role}",
                "service.instance.id": process,
                "service.version": __version__,
                "dora.run": run,
            }
        )
        self._scope = InstrumentationScope("dora", __version__)
        self._waiting: queue.Queue[Span] = queue.Queue(WAITING)
        self._ending = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._send, name="traces", daemon=True)
        self._thread.start()

    def emit(self, span: Span) -> None:
        meter().count("dora_process_spans_total")
        try:
            self._waiting.put_nowait(span)
        except queue.Full:
            self._drop(1, "they come faster than they can be sent")

    def close(self) -> None:
        self._ending.set()
        self._thread.join(CLOSE_SECONDS)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _send(self) -> None:
        while not (self._ending.is_set() and self._waiting.empty()):
            self._ending.wait(SEND_SECONDS)
            while waiting := self._waiting.qsize():  # only this thread takes from it
                self._export([self._waiting.get_nowait() for _ in range(min(waiting, BATCH))])

    def _export(self, batch: Sequence[Span]) -> None:
        try:
            result = self._exporter.export([self._readable(span) for span in batch])
        except Exception as error:  # noqa: BLE001 - whatever a receiver makes of it, the run goes on
            self._drop(len(batch), repr(error))
            return
        if result is not SpanExportResult.SUCCESS:
            self._drop(len(batch), "the receiver did not take them")

    def _drop(self, count: int, why: str) -> None:
        meter().count("dora_process_spans_dropped_total", count)
        if not self._warned:
            self._warned = True
            log.warning("spans are dropped, and counted from here on without a word: %s", why)

    def _readable(self, span: Span) -> ReadableSpan:
        parent = _place(span.context.at(span.parent)) if span.parent else None
        kind = {"dispatch": SpanKind.CONSUMER, "admission": SpanKind.PRODUCER}
        status = Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET)
        return ReadableSpan(
            name=span.name,
            context=_place(span.context),
            parent=parent,
            resource=self._resource,
            attributes=_attributes(span.attributes),
            events=[
                Event(event.name, _attributes(event.attributes), _nanoseconds(event.at_ms))
                for event in span.events
            ],
            links=[Link(_place(link)) for link in span.links],
            kind=kind.get(span.name, SpanKind.INTERNAL),
            status=status,
            start_time=_nanoseconds(span.start_ms),
            end_time=_nanoseconds(max(span.start_ms, span.end_ms)),  # clocks of two machines
            instrumentation_scope=self._scope,
        )


def _place(context: TraceContext) -> SpanContext:
    return SpanContext(
        int(context.trace, 16), int(context.span, 16), is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )  # fmt: skip


def _attributes(given: Any) -> dict[str, Any]:
    return {f"dora.{name}": value for name, value in given.items()}


def _nanoseconds(ms: float) -> int:
    return int(ms * 1_000_000)
