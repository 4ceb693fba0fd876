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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dora.config_registry import RegistrySection
from dora.errors import ConfigError, RegistryError, RegistryRefusal
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

_OWN_PROPERTIES = frozenset({"url", "timeout", "max.retries"})
_ATTEMPT_SECONDS = 5.0
_PAUSE_SECONDS = 0.25
_UNKNOWN_SECONDS = 60.0
_KEPT_UNKNOWN = 1000
_NOT_FOUND = 404
_READ_ONLY_MODE = 42205
_HINT_DOWN = (
    "check that it runs, and kafka.registry.url (the root of its Confluent-compatible API: "
    "http://HOST:8081, for Apicurio http://HOST:8080/apis/ccompat/v7)"
)

Result = TypeVar("Result")


@dataclass(slots=True)
class _Question:
    """An id that the registry was asked for. Times are those of `time.monotonic`."""

    since: float
    answer: Schema | UndecodableRecord | RegistryError | None = None
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
        forbidden = sorted(_OWN_PROPERTIES & set(section.properties))
        if forbidden:
            raise ConfigError(
                f"kafka.registry.properties must not set {', '.join(forbidden)}",
                hint="the address is kafka.registry.url; how long to wait follows from the "
                "timeouts in [kafka]",
            )
        self.url = section.url
        self._section = section
        self._connect_timeout = connect_timeout
        self._request_timeout = request_timeout
        self._lock = threading.RLock()
        self._ids = _Ids()
        self._made: Any = None
        self._answered = False
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

    def _probe(self, deadline: float) -> None:
        try:
            self._call(lambda client: client.get_compatibility(), "connecting", deadline)
        except _Refused as refused:
            # The right to see the global level is not needed.
            if refused.status not in (401, 403):
                raise RegistryRefusal(
                    f"{self.url} does not answer as a schema registry: {refused.reason}",
                    hint=_HINT_DOWN,
                ) from refused

    def _id_of(self, name: str, deadline: float) -> int:
        """Id of a record's current schema, registered if it is not there yet."""
        from confluent_kafka.schema_registry import Schema as RegistrySchema

        subject = CURRENT[name].parsed["name"]
        schema = RegistrySchema(current_text(name), "AVRO")

        def look_up() -> int | None:
            try:
                found = self._call(
                    lambda client: client.lookup_schema(subject, schema),
                    f"looking up {subject}",
                    deadline,
                )
            except _Refused as refused:
                if refused.status != _NOT_FOUND:
                    raise self._refusal(refused, f"looking up {subject}") from refused
                return None
            return int(found.schema_id)

        self._have_level(subject, deadline)
        number = look_up()
        if number is None and not self._section.register_schemas:
            number = self._equal_version(name, subject, deadline)
        if number is not None:
            return number
        if not self._section.register_schemas:
            raise RegistryRefusal(
                f"the schema registry at {self.url} does not have this version's schema of "
                f"{subject}, and kafka.registry.register_schemas is false",
                hint="let someone who may register run: dora topics create CONFIG",
            )
        try:
            return int(
                self._call(
                    lambda client: client.register_schema(subject, schema),
                    f"registering {subject}",
                    deadline,
                )
            )
        except _Refused as refused:
            # Another process may have done it meanwhile; someone else, with other line breaks.
            number = look_up() or self._equal_version(name, subject, deadline)
            if number is None:
                raise self._refusal(refused, f"registering {subject}") from refused
            return number

    def _equal_version(self, name: str, subject: str, deadline: float) -> int | None:
        """Id of a version that makes the same bytes, though its text is another."""

        def versions(client: Any) -> list[Any]:
            return [client.get_version(subject, each) for each in client.get_versions(subject)]

        try:
            for found in reversed(self._call(versions, f"looking up {subject}", deadline)):
                if _fingerprint(found.schema.schema_str) == CURRENT[name].fingerprint:
                    return int(found.schema_id)
        except _Refused as refused:
            if refused.status != _NOT_FOUND:
                raise self._refusal(refused, f"looking up {subject}") from refused
        return None

    def _have_level(self, subject: str, deadline: float) -> None:
        """Make the registry check the subject's schemas for COMPATIBILITY."""
        level = self._level(subject, deadline)
        if level == COMPATIBILITY:
            return
        refused: _Refused | None = None
        if self._section.register_schemas:
            doing = f"setting the compatibility of {subject}"
            try:
                self._call(
                    lambda client: client.set_compatibility(subject, COMPATIBILITY), doing, deadline
                )
            except _Refused as refusal:
                if not refusal.forbidden:
                    raise self._refusal(refusal, doing) from refusal
                refused = refusal
            level = self._level(subject, deadline)
        if level != COMPATIBILITY:
            why = f" and may not be changed here: {refused.reason}" if refused else ""
            raise RegistryRefusal(
                f"the compatibility of {subject} in the schema registry at {self.url} is {level}, "
                f"not {COMPATIBILITY}{why}",
                hint="let someone who may change it run: dora topics create CONFIG",
            )

    def _level(self, subject: str, deadline: float) -> str:
        """The level that counts for a subject: its own, or else the registry's."""
        doing = f"reading the compatibility of {subject}"
        try:
            return str(
                self._call(lambda client: client.get_compatibility(subject), doing, deadline)
            ).upper()
        except _Refused as refused:
            if refused.status != _NOT_FOUND:
                raise self._refusal(refused, doing) from refused
        try:
            return str(
                self._call(lambda client: client.get_compatibility(), doing, deadline)
            ).upper()
        except _Refused as refused:
            raise self._refusal(refused, doing) from refused

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
            if isinstance(answer, RegistryError):
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
        wait = self._request_timeout if self._answered else self._connect_timeout
        doing = f"asking for schema {number}"
        answer: Schema | UndecodableRecord | RegistryError
        until: float | None = None
        try:
            answer = self._schema(number, doing, question.since + wait)
        except UndecodableRecord as none:
            answer, until = none, time.monotonic() + _UNKNOWN_SECONDS
        except (RegistryError, ConfigError) as error:
            answer = (
                error
                if isinstance(error, RegistryError)
                else RegistryRefusal(error.message, hint=error.hint)
            )
        with self._lock:
            if isinstance(answer, Schema):
                self._ids.known[number] = answer
            question.until = until
            question.answer = answer

    def _schema(self, number: int, doing: str, deadline: float) -> Schema:
        for attempt in range(2):
            try:
                found = self._call(lambda client: client.get_schema(number), doing, deadline)
            except _Refused as refused:
                if refused.status != _NOT_FOUND:
                    raise self._refusal(refused, doing) from refused
                # One server of several may learn of a new schema a moment later than the others.
                if attempt == 0:
                    time.sleep(_PAUSE_SECONDS)
                continue
            return _own_schema(found, number, self.url)
        raise UndecodableRecord(
            "unknown_schema", f"the schema registry at {self.url} has no schema with id {number}"
        )

    def _call(self, call: Callable[[Any], Result], doing: str, deadline: float) -> Result:
        """Call until the registry answers; _Refused with what it answered if that is an error.

        RegistryError when it has not answered by `deadline`.
        """
        client = self._client()
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        started = time.monotonic()
        while True:
            try:
                result = call(client)
            except SchemaRegistryError as error:
                refused = _Refused(error)
                if not refused.passing:
                    self._answered = True
                    raise refused from error
                reason = refused.reason
                cause: Exception = error
            # Which exceptions a failed connection raises depends on the client's HTTP library.
            except Exception as error:
                reason, cause = str(error) or type(error).__name__, error
                if "[SSL" in reason:
                    raise RegistryError(
                        f"no TLS connection to the schema registry at {self.url}: {reason}",
                        hint="check kafka.registry.url and ssl.ca.location in "
                        "kafka.registry.properties",
                    ) from error
            else:
                self._answered = True
                return result
            if time.monotonic() + _PAUSE_SECONDS >= deadline:
                raise RegistryError(
                    f"the schema registry at {self.url} did not answer while {doing} for "
                    f"{time.monotonic() - started:.0f} s: {reason}",
                    hint=_HINT_DOWN,
                ) from cause
            time.sleep(_PAUSE_SECONDS)

    def _client(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._make_client()
            return self._made

    def _make_client(self) -> Any:
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
        except ImportError as error:
            raise ConfigError(
                f"kafka.registry needs a package that is not installed: {error.name or error}",
                hint="pip install 'dora[registry]'",
            ) from error
        properties: dict[str, Any] = {
            name: _number_or_text(value.get_secret_value())
            for name, value in self._section.properties.items()
        }
        properties["url"] = self.url
        properties["max.retries"] = 0
        properties["timeout"] = min(_ATTEMPT_SECONDS, max(1.0, self._connect_timeout))
        try:
            return SchemaRegistryClient(properties)
        except (ValueError, TypeError, OSError) as error:
            # Messages of the client name properties, not their values; OSError names a file.
            raise ConfigError(
                f"a property of the schema registry is not accepted: {error}",
                hint="names of properties: confluent_kafka.schema_registry.SchemaRegistryClient",
            ) from error

    def _refusal(self, refused: "_Refused", doing: str) -> RegistryRefusal:
        where = f"the schema registry at {self.url}"
        user = self._section.properties.get("basic.auth.user.info")
        who = user.get_secret_value().partition(":")[0] if user is not None else "no user name"
        if refused.status == 401:
            return RegistryRefusal(
                f"{where} refused the credentials ({who}) while {doing}: {refused.reason}",
                hint="check basic.auth.user.info (or bearer.auth.*) in kafka.registry.properties",
            )
        if refused.forbidden:
            return RegistryRefusal(
                f"{where} does not allow {doing} ({who}): {refused.reason}",
                hint="give this user the right, or let someone who has it run once: "
                "dora topics create CONFIG",
            )
        if refused.status == 409:
            return RegistryRefusal(
                f"{where} refused {doing}: another schema is registered there that this one is not "
                f"compatible with: {refused.reason}",
                hint=f"these subjects are dora's own: delete the foreign versions, or give dora a "
                f"registry (or a context) of its own. Needed is {COMPATIBILITY}",
            )
        return RegistryRefusal(f"{where} refused {doing}: {refused.reason}")


class _Refused(Exception):
    """The registry answered with an error."""

    def __init__(self, error: Any) -> None:
        self.status = int(error.http_status_code)
        self.reason = f"{error.error_message} (HTTP status {self.status})"
        self.forbidden = self.status in (401, 403, 405) or error.error_code == _READ_ONLY_MODE
        self.passing = self.status >= 500 or self.status in (408, 429)
        super().__init__(self.reason)


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


def _number_or_text(text: str) -> str | int:
    return int(text) if text.isdecimal() else text
