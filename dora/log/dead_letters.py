"""What a process could not use, as a record that says why.

Invariant: a dead letter fits into a record of the topic, whatever the size of what it tells of.
"""

from dora.bus.reader import Message
from dora.schemas.records import DeadLetter

_TEXT = 4_096
"""Most characters of a reason and of a key: what others wrote may be of any length."""
_FRAME_BYTES = 65_536
"""Left free in a record for what a dead letter says beside the payload."""


def dead_letter(
    code: str,
    reason: str,
    *,
    run: str,
    process: str,
    now_ms: int,
    max_message_bytes: int,
    message: Message | None = None,
    trajectory_id: str = "",
    payload: bytes = b"",
) -> DeadLetter:
    """`message`, if it is about one, or `trajectory_id` could not be used: `reason` says why.

    Of `payload` as many bytes are kept as a record of `max_message_bytes` has room for.
    """
    room = max(0, max_message_bytes - _FRAME_BYTES)
    reason = reason[:_TEXT]
    if len(payload) > room:
        reason += f" (the first {room} of {len(payload)} bytes are kept)"
    return DeadLetter(
        run=run,
        code=code,
        reason=reason,
        process=process,
        created_ms=now_ms,
        topic=message.topic if message else "",
        partition=message.partition if message else -1,
        offset=message.offset if message else -1,
        trajectory_id=trajectory_id[:_TEXT],
        payload=payload[:room],
    )
