"""Calls to a schema registry, each with a deadline.

Invariant: whatever goes wrong leaves as a `dora.errors` that names the registry and the user, never
a secret; an answer that is an error leaves as `Refused`, for the caller to judge.
"""

import os
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

from dora.config_registry import RegistrySection
from dora.errors import ConfigError, RegistryError, RegistryRefusal

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
