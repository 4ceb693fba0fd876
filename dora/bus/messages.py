"""Records where they lie in the log.

Invariant: whatever a producer wrote becomes a `Message`; what is no record becomes one too, with
the reason and its bytes. Only dora's own record in a framing that this process cannot read is an
error: left unread, a run would be taken for an empty one.
"""

from dataclasses import dataclass
from typing import Any

from dora.errors import ConfigError
from dora.schemas.codec import UndecodableCode, UndecodableRecord, decode
from dora.schemas.framing import RegistryFraming
from dora.schemas.records import Record


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A value that is no record: why (see `UndecodableRecord`), and its bytes."""

    code: UndecodableCode
    reason: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Message:
    """A record where it lies in the log. `timestamp_ms` is the writer's clock."""

    topic: str
    partition: int
    offset: int
    key: str | None
    timestamp_ms: int
    headers: dict[str, bytes]
    value: Record | Unreadable


def message_of(raw: Any, key: str | None, framing: RegistryFraming | None) -> Message:
    """The message that librdkafka handed over, its value decoded.

    SchemaAwaited while the registry has not said what its id means; ConfigError for a record of
    dora's that was written with a schema registry when none is configured.
    """
    data = raw.value() or b""
    value: Record | Unreadable
    try:
        value = decode(data, framing)
    except UndecodableRecord as reason:
        if reason.code == "no_registry" and _is_own(raw):
            raise ConfigError(
                f"{raw.topic()}[{raw.partition()}] offset {raw.offset()} is {reason.reason}",
                hint="every part of the run and every command that reads it needs the registry; "
                "DORA_KAFKA__REGISTRY__URL does it for all of them",
            ) from None
        value = Unreadable(reason.code, reason.reason, data)
    return Message(
        topic=raw.topic(),
        partition=raw.partition(),
        offset=raw.offset(),
        key=key,
        timestamp_ms=raw.timestamp()[1],
        headers={name: content or b"" for name, content in raw.headers() or ()},
        value=value,
    )


def _is_own(raw: Any) -> bool:
    """Whether a record says that dora wrote it (see `HeaderMaker`)."""
    return any(
        name == "ce_type" and (content or b"").startswith(b"dora.")
        for name, content in raw.headers() or ()
    )
