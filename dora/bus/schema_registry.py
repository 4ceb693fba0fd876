"""The schema registry: ids of dora's schemas for writers, schemas of ids for readers.

A process that writes has, before its first record, the id of every record's current schema, and
the registry checks each of them for FULL_TRANSITIVE compatibility. Ids never change their meaning,
so each is asked for once: a process that knows the ids needs the registry no more. A record is
unreadable only when the registry answered that its id is not one of dora's; while it does not
answer, the record waits.

Subjects are the records' full names (`RecordNameStrategy`): several kinds of record share a topic,
and all runs share the schemas, so that a registry holds nine subjects however many runs there are.
"""

import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from dora.config.kafka import RegistrySection
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

PAUSE_SECONDS = 0.25
"""Before the registry is asked again."""

_OWN_PROPERTIES = frozenset(
    {
        *("url", "timeout", "max.retries", "retries.wait.ms", "retries.max.wait.ms"),
        *("cache.capacity", "cache.latest.ttl.sec"),
    }
)
_ATTEMPT_SECONDS = 5.0
_READ_ONLY_MODE = 42205
_NOT_FOUND = 404
_HINT_DOWN = (
    "check that it runs, and kafka.registry.url (the root of its Confluent-compatible API: "
    "http://HOST:8081, for Apicurio http://HOST:8080/apis/ccompat/v7)"
)

Result = TypeVar("Result")


class Refused(Exception):
    """The registry answered with an error."""

    def __init__(self, error: Any) -> None:
        self.status = int(error.http_status_code)
        self.reason = f"{error.error_message} (HTTP status {self.status})"
        self.forbidden = self.status in (401, 403, 405) or error.error_code == _READ_ONLY_MODE
        self.passing = self.status >= 500 or self.status in (408, 429)
        super().__init__(self.reason)


class RegistryClient:
    """confluent-kafka's client of one registry, made when it is needed first.

    `attempt_seconds` bounds a single request.
    """

    def __init__(self, section: RegistrySection, attempt_seconds: float) -> None:
        forbidden = sorted(_OWN_PROPERTIES & set(section.properties))
        if forbidden:
            raise ConfigError(
                f"kafka.registry.properties must not set {', '.join(forbidden)}",
                hint="the address is kafka.registry.url; how long to wait follows from the "
                "timeouts in [kafka]",
            )
        self.url = section.url
        self.answered = False
        """Whether it ever answered."""
        self._section = section
        self._attempt_seconds = min(_ATTEMPT_SECONDS, max(1.0, attempt_seconds))

    def call(self, call: Callable[[Any], Result], doing: str, deadline: float) -> Result:
        """Call until the registry answers; Refused with what it answered if that is an error.

        RegistryError when it has not answered by `deadline`; RegistryRefusal when its answer is
        none of a registry.
        """
        client = self._client
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        started = time.monotonic()
        while True:
            try:
                result = call(client)
            except SchemaRegistryError as error:
                refused = Refused(error)
                if not refused.passing:
                    self.answered = True
                    raise refused from error
                reason = refused.reason
                cause: Exception = error
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise self.no_registry(f"{type(error).__name__}: {error}") from error
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
                self.answered = True
                return result
            if time.monotonic() + PAUSE_SECONDS >= deadline:
                raise RegistryError(
                    f"the schema registry at {self.url} did not answer while {doing} for "
                    f"{time.monotonic() - started:.0f} s: {reason}",
                    hint=_HINT_DOWN,
                ) from cause
            time.sleep(PAUSE_SECONDS)

    def find(self, call: Callable[[Any], Result], doing: str, deadline: float) -> Result | None:
        """Like `call`, but None for what the registry does not have, and RegistryRefusal for any
        other error that it answered."""
        try:
            return self.call(call, doing, deadline)
        except Refused as refused:
            if refused.status != _NOT_FOUND:
                raise self.refusal(refused, doing) from refused
            return None

    def no_registry(self, reason: str) -> RegistryRefusal:
        """The error to raise when something else answers at the address."""
        return RegistryRefusal(
            f"{self.url} does not answer as a schema registry: {reason}", hint=_HINT_DOWN
        )

    def refusal(self, refused: Refused, doing: str) -> RegistryRefusal:
        """The error to raise for a refusal that happened while `doing` (a gerund)."""
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
                hint="these subjects are dora's own: delete the foreign versions, or give dora a "
                "registry (or a context of it) for itself",
            )
        return RegistryRefusal(f"{where} refused {doing}: {refused.reason}")

    @cached_property
    def _client(self) -> Any:
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
        except ImportError as error:
            raise ConfigError(
                f"kafka.registry needs a package that is not installed: {error.name or error}",
                hint="pip install 'dora-rl[registry]'",
            ) from error
        properties: dict[str, Any] = {
            name: value.get_secret_value() for name, value in self._section.properties.items()
        }
        for name, value in properties.items():
            if name.endswith(".location") and not os.access(value, os.R_OK):
                raise ConfigError(
                    f"a property of the schema registry is not accepted: {name} names {value}, "
                    "which cannot be read",
                    hint="relative paths start where the command runs",
                )
        # Its own tries have no deadline for all of them together.
        properties |= {"url": self.url, "max.retries": 0, "timeout": self._attempt_seconds}
        try:
            return SchemaRegistryClient(properties)
        except (ValueError, TypeError, OSError) as error:
            # Messages of the client name properties, not their values.
            raise ConfigError(
                f"a property of the schema registry is not accepted: {error}",
                hint="names of properties: confluent_kafka.schema_registry.SchemaRegistryClient",
            ) from error


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
        """For `RegistryFraming`; RegistryError if the registry did not answer."""
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
        """Run in a thread, so that the caller goes on with its work."""
        try:
            question.answer.set_result(self._schema(number))
        except Exception as error:  # noqa: BLE001 - raised where the answer is used
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
