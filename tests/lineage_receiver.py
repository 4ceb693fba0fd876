"""A service that takes OpenLineage events over HTTP, and refuses those that are none."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jsonschema
from referencing import Registry, Resource

from tests.http_server import Handler, served
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
    """What arrived; while `refusing` it answers 503."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.keys: list[str | None] = []
        self.refused: list[str] = []
        self.refusing = False
        self.url = ""

    def take(self, path: str, key: str | None, body: bytes) -> int:
        """The status to answer with."""
        try:
            assert path == "/api/v1/lineage", path
            if self.refusing:
                return 503
            event = json.loads(body)
            valid(event)
        except (AssertionError, ValueError, jsonschema.ValidationError) as error:
            self.refused.append(str(error))
            return 422
        self.events.append(event)
        self.keys.append(key)
        return 201


@contextmanager
def receiver() -> Iterator[Receiver]:
    """One on a port of its own."""
    taking = Receiver()

    class Events(Handler):
        def do_POST(self) -> None:
            self.answer(taking.take(self.path, self.headers.get("Authorization"), self.body()))

    with served(Events) as taking.url:
        yield taking
