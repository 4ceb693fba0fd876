"""A service that takes OpenLineage events over HTTP, and refuses those that are none."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jsonschema
from referencing import Registry, Resource

from tests.manifests import SCHEMAS, schema

Event = dict[str, Any]

_NAMES = sorted(path.stem for path in SCHEMAS.glob("openlineage-*.json"))
_REGISTRY: Registry[Any] = Registry().with_resources(
    (schema(name)["$id"], Resource.from_contents(schema(name))) for name in _NAMES
)
_FORMATS = jsonschema.FormatChecker(["uuid"])


def facets(event: Event) -> Iterator[tuple[str, Event]]:
    """All facets of an event, by name."""
    groups = [event["run"].get("facets"), event["job"].get("facets")]
    for dataset in (*event.get("inputs", ()), *event.get("outputs", ())):
        groups += [dataset.get(key) for key in ("facets", "inputFacets", "outputFacets")]
    for group in groups:
        yield from (group or {}).items()


def valid(event: Event) -> None:
    """Raise unless the event is one, and each of its facets what its schema says; only dora's own
    facets may have a schema that is not OpenLineage's."""
    check(event, {"$ref": schema("openlineage-OpenLineage")["$id"]})
    assert datetime.fromisoformat(event["eventTime"]).tzinfo is not None
    for name, facet in facets(event):
        where = facet["_schemaURL"]
        if name.startswith("dora_"):
            assert where.startswith("urn:dora:facet:")
            continue
        assert where.split("#")[0] in _REGISTRY, f"{name}: no schema {where}"
        check(facet, {"$ref": where})


def check(instance: Any, wanted: Event) -> None:
    """Raise unless `instance` fits the schema."""
    jsonschema.Draft202012Validator(wanted, registry=_REGISTRY, format_checker=_FORMATS).validate(
        instance
    )


class Receiver:
    """What arrived. `refusing` answers 503, `wedged` does not answer while it is set."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.keys: list[str | None] = []
        self.refused: list[str] = []
        self.refusing = False
        self.wedged: threading.Event | None = None
        self.arrived = threading.Condition()
        self.url = ""

    def take(self, path: str, key: str | None, body: bytes) -> int:
        """The status to answer with."""
        if self.wedged is not None:
            self.wedged.wait(60.0)
        with self.arrived:
            try:
                assert path == "/api/v1/lineage", path
                if self.refusing:
                    return 503
                event = json.loads(body)
                valid(event)
                self.events.append(event)
                self.keys.append(key)
                return 201
            except (AssertionError, ValueError, jsonschema.ValidationError) as error:
                self.refused.append(str(error))
                return 422
            finally:
                self.arrived.notify_all()

    def wait_for(self, count: int) -> list[Event]:
        """The events, once there are that many; AssertionError after a minute."""
        with self.arrived:
            done = self.arrived.wait_for(lambda: len(self.events) >= count, 60.0)
            assert done, f"{len(self.events)} of {count} events; refused: {self.refused}"
            return list(self.events)


@contextmanager
def receiver() -> Iterator[Receiver]:
    """One on a port of its own."""
    taking = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(taking.take(self.path, self.headers.get("Authorization"), body))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    taking.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield taking
    finally:
        if taking.wedged is not None:
            taking.wedged.set()
        server.shutdown()
        server.server_close()
