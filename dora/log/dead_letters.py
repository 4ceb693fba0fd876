"""Dead letters: what a process of a run could not use, as records that say why."""

import time
from collections.abc import Callable
from contextlib import ExitStack

from dora.bus.reader import BEGINNING, LogReader, Message, Unreadable
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.bus.writer import LogWriter
from dora.schemas.codec import encode
from dora.schemas.records import DeadLetter
from dora.telemetry.meter import meter

_TEXT = 4_096
"""Most characters of a reason and of a key: what others wrote may be of any length."""
_FRAME_BYTES = 65_536
"""Left free in a record for what a dead letter holds beside the payload."""


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


class DeadLetterWriter:
    """Writes the dead letters of `process` with `writer`, and counts them in its metrics."""

    def __init__(
        self,
        writer: LogWriter,
        topics: RunTopics,
        process: str,
        max_message_bytes: int,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._writer = writer
        self._topics = topics
        self._process = process
        self._max_message_bytes = max_message_bytes
        self._now_ms = now_ms

    def write(
        self,
        code: str,
        reason: str,
        *,
        message: Message | None = None,
        trajectory_id: str = "",
        payload: bytes = b"",
        key: str | None = None,
    ) -> None:
        """Send one; BusError if Kafka does not take it."""
        meter().count("dora_process_dead_letters_total", value=code)
        letter = dead_letter(
            code,
            reason,
            run=self._topics.run,
            process=self._process,
            now_ms=self._now_ms(),
            max_message_bytes=self._max_message_bytes,
            message=message,
            trajectory_id=trajectory_id,
            payload=payload,
        )
        self._writer.send(self._topics.dead_letters, letter, key=key or self._process)

    def write_record(self, message: Message, reason: str) -> None:
        """Send the dead letter of a record that does not belong where it lies, or is unreadable."""
        value = message.value
        code, payload = (
            (value.code, value.payload)
            if isinstance(value, Unreadable)
            else ("foreign", encode(value))
        )
        self.write(code, reason, message=message, trajectory_id=message.key or "", payload=payload)


class ForeignRecords(ExitStack):
    """Records of a run's topics that do not belong there: each becomes a dead letter once, however
    often the log is read.

    The end of a `with` block waits for what was written. With `write` False nothing is written,
    only counted. `deadline` (seconds) bounds reading the dead letters that are there, and each wait
    for the cluster (DeadlineError). BusError if the cluster refuses.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        topics: RunTopics,
        process: str,
        *,
        write: bool,
        deadline: float,
    ) -> None:
        super().__init__()
        self._settings = settings
        self._topics = topics
        self._process = process
        self._write = write
        self._deadline = deadline
        self._known: set[tuple[str, int, int]] | None = None
        self._seen: set[tuple[str, int, int]] = set()
        self._writer: LogWriter | None = None
        self.written = 0
        """Dead letters that were added."""

    @property
    def seen(self) -> int:
        """Records that do not belong where they lie."""
        return len(self._seen)

    def add(self, message: Message, reason: str) -> None:
        """Note a foreign or unreadable record, and write its dead letter if there is none yet."""
        place = (message.topic, message.partition, message.offset)
        if place in self._seen:
            return
        self._seen.add(place)
        if not self._write or place in self._written_before():
            return
        if self._writer is None:
            writer = LogWriter(self._settings, client_id=f"{self._topics.run}.{self._process}")
            self._writer = self.enter_context(writer)
        letters = DeadLetterWriter(
            self._writer, self._topics, self._process, self._settings.max_message_bytes
        )
        letters.write_record(message, reason)
        self.written += 1

    def flush(self) -> None:
        """Wait until the dead letters are in the log."""
        if self._writer is not None:
            self._writer.flush(self._deadline)

    def _written_before(self) -> set[tuple[str, int, int]]:
        """Where the records lie whose dead letters are in the log."""
        if self._known is None:
            self._known = set()
            client_id = f"{self._topics.run}.{self._process}-letters"
            with LogReader(self._settings, client_id=client_id) as reader:
                reader.assign({(self._topics.dead_letters, 0): BEGINNING})
                for message in reader.read_to_end(self._deadline):
                    value = message.value
                    if isinstance(value, DeadLetter) and value.topic:
                        self._known.add((value.topic, value.partition, value.offset))
        return self._known
