"""What a process could not use, as a record that says why.

Invariant: a dead letter fits into a record of the topic, whatever the size of what it tells of.
"""

import time

from dora.bus.messages import Message, Unreadable
from dora.bus.settings import ClusterSettings
from dora.schemas.codec import encode
from dora.schemas.records import DeadLetter

_TEXT = 4_096
"""Most characters of a reason and of a key: what others wrote may be of any length."""
_FRAME_BYTES = 65_536
"""Left free in a record for what a dead letter says beside the payload."""


def dead_letter(
    message: Message, reason: str, *, run: str, process: str, settings: ClusterSettings
) -> DeadLetter:
    """`message` cannot be read, or does not belong where it lies: `reason` says why.

    Of its bytes as many are kept as a record has room for.
    """
    value = message.value
    code, payload = (
        (value.code, value.payload) if isinstance(value, Unreadable) else ("foreign", encode(value))
    )
    room = max(0, settings.max_message_bytes - _FRAME_BYTES)
    reason = reason[:_TEXT]
    if len(payload) > room:
        reason += f" (the first {room} of {len(payload)} bytes are kept)"
    return DeadLetter(
        run=run,
        code=code,
        reason=reason,
        process=process,
        created_ms=time.time_ns() // 1_000_000,
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        trajectory_id=(message.key or "")[:_TEXT],
        payload=payload[:room],
    )
