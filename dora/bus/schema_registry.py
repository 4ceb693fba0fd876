"""The schema registry: ids of dora's schemas for writers, schemas of ids for readers.

Invariant: a process that writes has, before its first record, the id of every record's current
schema, and the registry checks each of them for FULL_TRANSITIVE compatibility. Ids never change
their meaning, so each is asked for once: a registry that goes away later stops nobody who knows the
ids. A record is called unreadable only when the registry answered that its id is none of dora's;
while it does not answer, the record waits.

Subjects are the records' full names (`RecordNameStrategy`): several kinds of record share a topic,
and all runs share the schemas, so that a registry holds nine subjects however many runs there are.
"""

import math
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from dora.bus.registry_client import PAUSE_SECONDS, Refused, RegistryClient
from dora.config_registry import RegistrySection
from dora.errors import RegistryRefusal
from dora.schemas.framing import RegistryFraming, SchemaAwaited, UndecodableRecord
from dora.schemas.registry import (
    CURRENT,
    FULL_NAMES,
    RECORD_TYPES,
    Schema,
    current_text,
    schema_from_text,
)

COMPATIBILITY = "FULL_TRANSITIVE"

_UNKNOWN_SECONDS = 60.0
_KEPT_UNKNOWN = 1000


@dataclass(slots=True)
class _Question:
    """An id that the registry was asked for."""

    answer: "Future[Schema]" = field(default_factory=Future)
    until: float = math.inf
    """When it has to be asked for anew, as `time.monotonic`."""


class SchemaRegistry:
    """One registry as one process sees it; shared by all its readers and writers, and threads.

    Making it does no I/O. `connect_timeout` bounds the wait for the first answer,
    `request_timeout` for later ones, in seconds.
    """

    def __init__(
        self, section: RegistrySection, *, connect_timeout: float, request_timeout: float
    ) -> None:
        self.url = section.url
        self._client = RegistryClient(section, connect_timeout)
        self._may_register = section.register_schemas
        self._connect_timeout = connect_timeout
        self._request_timeout = request_timeout
        self._lock = threading.Lock()
        self._is_registry = False
        self._known: dict[int, Schema] = {}
        self._asked: dict[int, _Question] = {}
        self.framing = RegistryFraming(self._find)
        """For the codec; for writing only after `prepare`."""

    def prepare(self) -> RegistryFraming:
        """Have every record's current schema in the registry, and know its id.

        RegistryError if it does not answer within `connect_timeout`; RegistryRefusal, with the
        registry's reason, if it refuses a schema, the compatibility level, or this user;
        ConfigError for a property that its client does not know.
        """
        with self._lock:
            if not self.framing.prefixes:
                deadline = time.monotonic() + self._connect_timeout
                self._probe(deadline)
                ids = {}
                for name in RECORD_TYPES:
                    ids[name] = self._id_of(name, deadline)
                    self._known[ids[name]] = CURRENT[name]
                self.framing.write_with(ids)
        return self.framing

    def ping(self) -> None:
        """RegistryError unless a registry answers within `connect_timeout` and takes the
        credentials."""
        self._is_registry = False
        self._probe(time.monotonic() + self._connect_timeout)

    def _probe(self, deadline: float) -> None:
        """Once: a server that is something else would answer that it knows no schema."""
        if self._is_registry:
            return
        try:
            self._client.call(lambda client: client.get_compatibility(), "connecting", deadline)
        except Refused as refused:
            if refused.status == 401:
                raise self._client.refusal(refused, "connecting") from refused
            # The right to see the global level is not needed.
            if refused.status != 403:
                raise self._client.no_registry(refused.reason) from refused
        self._is_registry = True

    def _id_of(self, name: str, deadline: float) -> int:
        """Id of a record's current schema, registered if it is not there yet."""
        from confluent_kafka.schema_registry import Schema as RegistrySchema

        subject = CURRENT[name].parsed["name"]
        schema = RegistrySchema(current_text(name), "AVRO")

        self._have_level(subject, deadline)
        found = self._client.find(
            lambda client: client.lookup_schema(subject, schema), f"looking up {subject}", deadline
        )
        if found is not None:
            return int(found.schema_id)
        refusal = RegistryRefusal(
            f"the schema registry at {self.url} does not have this version's schema of "
            f"{subject}, and kafka.registry.register_schemas is false",
            hint="let someone who may register run: dora topics create CONFIG",
        )
        if self._may_register:
            doing = f"registering {subject}"
            try:
                return int(
                    self._client.call(
                        lambda client: client.register_schema(subject, schema), doing, deadline
                    )
                )
            except Refused as refused:
                refusal = self._client.refusal(refused, doing)
        # Another process may have done it meanwhile; someone else, with other line breaks.
        number = self._equal_version(name, subject, deadline)
        if number is None:
            raise refusal
        return number

    def _equal_version(self, name: str, subject: str, deadline: float) -> int | None:
        """Id of a version that makes the same bytes, though its text is another."""

        def versions(client: Any) -> list[Any]:
            return [client.get_version(subject, each) for each in client.get_versions(subject)]

        for found in reversed(self._client.find(versions, f"looking up {subject}", deadline) or []):
            if _fingerprint(found.schema.schema_str) == CURRENT[name].fingerprint:
                return int(found.schema_id)
        return None

    def _have_level(self, subject: str, deadline: float) -> None:
        """Make the registry check the subject's schemas for COMPATIBILITY."""
        if self._level(subject, deadline) == COMPATIBILITY:
            return
        refused: Refused | None = None
        if self._may_register:
            setting = f"setting the compatibility of {subject}"
            try:
                self._client.call(
                    lambda client: client.set_compatibility(subject, COMPATIBILITY),
                    setting,
                    deadline,
                )
            except Refused as refusal:
                if not refusal.forbidden:
                    raise self._client.refusal(refusal, setting) from refusal
                refused = refusal
        # Where the subject has no level of its own the registry's counts.
        level = self._level(subject, deadline) or self._level(None, deadline)
        if level != COMPATIBILITY:
            why = f" and may not be changed here: {refused.reason}" if refused else ""
            raise RegistryRefusal(
                f"the compatibility of {subject} in the schema registry at {self.url} is {level}, "
                f"not {COMPATIBILITY}{why}",
                hint="let someone who may change it run: dora topics create CONFIG",
            )

    def _level(self, subject: str | None, deadline: float) -> str | None:
        """The compatibility of a subject, None if it has none of its own; or the registry's."""
        doing = f"reading the compatibility of {subject or 'new subjects'}"
        level = self._client.find(lambda client: client.get_compatibility(subject), doing, deadline)
        return None if level is None else str(level).upper()

    def _find(self, number: int) -> Schema:
        """See `RegistryFraming`; RegistryError if the registry stayed away."""
        with self._lock:
            if number in self._known:
                return self._known[number]
            question = self._asked.get(number)
            if question is None or time.monotonic() >= question.until:
                if len(self._asked) >= _KEPT_UNKNOWN:
                    self._asked.clear()
                question = self._asked[number] = _Question()
                threading.Thread(
                    target=self._ask, args=(number, question), name="registry", daemon=True
                ).start()
            if not question.answer.done():
                raise SchemaAwaited(number)
            error = question.answer.exception()
            if error is None:
                return question.answer.result()
            if isinstance(error, UndecodableRecord):
                # Raised many times, one object would gather all their tracebacks.
                raise UndecodableRecord(error.code, error.reason)
            del self._asked[number]
            raise error

    def _ask(self, number: int, question: _Question) -> None:
        """In a thread, so that whoever waits for the answer goes on with its work."""
        try:
            question.answer.set_result(self._schema(number))
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for the answer
            question.until = time.monotonic() + _UNKNOWN_SECONDS
            question.answer.set_exception(error)

    def _schema(self, number: int) -> Schema:
        """Ask until there is an answer."""
        patience = self._request_timeout if self._client.answered else self._connect_timeout
        deadline = time.monotonic() + patience
        self._probe(deadline)
        for pause in (PAUSE_SECONDS, 0.0):
            found = self._client.find(
                lambda client: client.get_schema(number), f"asking for schema {number}", deadline
            )
            if found is not None:
                return _own_schema(found, number, self.url)
            # One server of several may learn of a new schema a moment later than the others.
            time.sleep(pause)
        raise UndecodableRecord(
            "unknown_schema", f"the schema registry at {self.url} has no schema with id {number}"
        )


def _own_schema(found: Any, number: int, url: str) -> Schema:
    """The registry's schema as one of dora's; UndecodableRecord if it is another's."""
    name: object = found.schema_type
    if found.schema_type == "AVRO":
        try:
            schema = schema_from_text(found.schema_str, f"schema {number} of {url}")
        except ValueError as error:
            name = f"an Avro schema ({error})"
        else:
            if schema is not None:
                return schema
            name = "an Avro schema"
    raise UndecodableRecord(
        "unknown_schema",
        f"schema {number} of the registry at {url} is {name}, not one of "
        f"{', '.join(sorted(FULL_NAMES))}",
    )


def _fingerprint(text: str) -> bytes | None:
    try:
        schema = schema_from_text(text, "registry")
    except ValueError:
        return None
    return None if schema is None else schema.fingerprint
