"""The schema registry: ids of dora's schemas for writers, schemas of ids for readers.

Invariant: a process that writes has, before its first record, the id of every record's current
schema, and the registry checks each of them for FULL_TRANSITIVE compatibility. Ids never change
their meaning, so each is asked for once: a registry that goes away later stops nobody who knows the
ids. A record is called unreadable only when the registry answered that its id is none of dora's;
while it does not answer, the record waits.

Subjects are the records' full names (`RecordNameStrategy`): several kinds of record share a topic,
and all runs share the schemas, so that a registry holds nine subjects however many runs there are.
"""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from dora.bus.registry_client import HINT_DOWN, PAUSE_SECONDS, Refused, RegistryClient
from dora.config_registry import RegistrySection
from dora.errors import DoraError, RegistryRefusal
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
_NOT_FOUND = 404


@dataclass(slots=True)
class _Question:
    """An id that the registry was asked for. Times are those of `time.monotonic`."""

    since: float
    answer: Schema | UndecodableRecord | DoraError | None = None
    until: float | None = None
    """When the answer has to be asked for anew; None: never."""


@dataclass(slots=True)
class _Ids:
    known: dict[int, Schema] = field(default_factory=dict)
    asked: dict[int, _Question] = field(default_factory=dict)


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
        self._lock = threading.RLock()
        self._is_registry = False
        self._ids = _Ids()
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
                    self._ids.known[ids[name]] = CURRENT[name]
                self.framing.write_with(ids)
        return self.framing

    def ping(self) -> None:
        """RegistryError unless a registry answers within `connect_timeout`."""
        self._is_registry = False
        self._probe(time.monotonic() + self._connect_timeout)

    def _probe(self, deadline: float) -> None:
        """Once: a server that is something else would answer that it knows no schema."""
        if self._is_registry:
            return
        try:
            self._client.call(lambda client: client.get_compatibility(), "connecting", deadline)
        except Refused as refused:
            # The right to see the global level is not needed.
            if refused.status not in (401, 403):
                raise RegistryRefusal(
                    f"{self.url} does not answer as a schema registry: {refused.reason}",
                    hint=HINT_DOWN,
                ) from refused
        self._is_registry = True

    def _id_of(self, name: str, deadline: float) -> int:
        """Id of a record's current schema, registered if it is not there yet."""
        from confluent_kafka.schema_registry import Schema as RegistrySchema

        subject = CURRENT[name].parsed["name"]
        schema = RegistrySchema(current_text(name), "AVRO")

        def look_up() -> int | None:
            try:
                found = self._client.call(
                    lambda client: client.lookup_schema(subject, schema),
                    f"looking up {subject}",
                    deadline,
                )
            except Refused as refused:
                if refused.status != _NOT_FOUND:
                    raise self._client.refusal(refused, f"looking up {subject}") from refused
                return None
            return int(found.schema_id)

        self._have_level(subject, deadline)
        number = look_up()
        if number is None and not self._may_register:
            number = self._equal_version(name, subject, deadline)
        if number is not None:
            return number
        if not self._may_register:
            raise RegistryRefusal(
                f"the schema registry at {self.url} does not have this version's schema of "
                f"{subject}, and kafka.registry.register_schemas is false",
                hint="let someone who may register run: dora topics create CONFIG",
            )
        try:
            return int(
                self._client.call(
                    lambda client: client.register_schema(subject, schema),
                    f"registering {subject}",
                    deadline,
                )
            )
        except Refused as refused:
            # Another process may have done it meanwhile; someone else, with other line breaks.
            number = look_up() or self._equal_version(name, subject, deadline)
            if number is None:
                raise self._client.refusal(refused, f"registering {subject}") from refused
            return number

    def _equal_version(self, name: str, subject: str, deadline: float) -> int | None:
        """Id of a version that makes the same bytes, though its text is another."""

        def versions(client: Any) -> list[Any]:
            return [client.get_version(subject, each) for each in client.get_versions(subject)]

        try:
            for found in reversed(self._client.call(versions, f"looking up {subject}", deadline)):
                if _fingerprint(found.schema.schema_str) == CURRENT[name].fingerprint:
                    return int(found.schema_id)
        except Refused as refused:
            if refused.status != _NOT_FOUND:
                raise self._client.refusal(refused, f"looking up {subject}") from refused
        return None

    def _have_level(self, subject: str, deadline: float) -> None:
        """Make the registry check the subject's schemas for COMPATIBILITY."""
        doing = f"reading the compatibility of {subject}"
        if self._level(subject, doing, deadline) == COMPATIBILITY:
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
        level = self._level(subject, doing, deadline) or self._level(None, doing, deadline)
        if level != COMPATIBILITY:
            why = f" and may not be changed here: {refused.reason}" if refused else ""
            raise RegistryRefusal(
                f"the compatibility of {subject} in the schema registry at {self.url} is {level}, "
                f"not {COMPATIBILITY}{why}",
                hint="let someone who may change it run: dora topics create CONFIG",
            )

    def _level(self, subject: str | None, doing: str, deadline: float) -> str | None:
        """The compatibility of a subject, None if it has none of its own; or the registry's."""
        try:
            return str(
                self._client.call(lambda client: client.get_compatibility(subject), doing, deadline)
            ).upper()
        except Refused as refused:
            if refused.status == _NOT_FOUND:
                return None
            raise self._client.refusal(refused, doing) from refused

    def _find(self, number: int) -> Schema:
        """See `RegistryFraming`; RegistryError if the registry stayed away."""
        with self._lock:
            known = self._ids.known.get(number)
            if known is not None:
                return known
            now = time.monotonic()
            question = self._ids.asked.get(number)
            if question is None or (question.until is not None and now >= question.until):
                if len(self._ids.asked) >= _KEPT_UNKNOWN:
                    self._ids.asked.clear()
                question = self._ids.asked[number] = _Question(now)
                threading.Thread(
                    target=self._ask, args=(number, question), name="registry", daemon=True
                ).start()
            answer = question.answer
            if isinstance(answer, DoraError):
                del self._ids.asked[number]
        if answer is None:
            raise SchemaAwaited(number)
        if isinstance(answer, Schema):
            return answer
        if isinstance(answer, UndecodableRecord):
            raise UndecodableRecord(answer.code, answer.reason)
        raise answer

    def _ask(self, number: int, question: _Question) -> None:
        """Ask until there is an answer, in a thread: whoever waits goes on with its work."""
        wait = self._request_timeout if self._client.answered else self._connect_timeout
        doing = f"asking for schema {number}"
        answer: Schema | UndecodableRecord | DoraError
        # For what is not foreseen: whoever waits must not wait for ever.
        answer = RegistryRefusal(f"{doing} at {self.url} failed; the reason stands in the log")
        until: float | None = None
        try:
            answer = self._schema(number, doing, question.since + wait)
        except UndecodableRecord as none:
            answer, until = none, time.monotonic() + _UNKNOWN_SECONDS
        except DoraError as error:
            answer = error
        finally:
            with self._lock:
                if isinstance(answer, Schema):
                    self._ids.known[number] = answer
                question.until = until
                question.answer = answer

    def _schema(self, number: int, doing: str, deadline: float) -> Schema:
        self._probe(deadline)
        for attempt in range(2):
            try:
                found = self._client.call(lambda client: client.get_schema(number), doing, deadline)
            except Refused as refused:
                if refused.status != _NOT_FOUND:
                    raise self._client.refusal(refused, doing) from refused
                # One server of several may learn of a new schema a moment later than the others.
                if attempt == 0:
                    time.sleep(PAUSE_SECONDS)
                continue
            return _own_schema(found, number, self.url)
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
