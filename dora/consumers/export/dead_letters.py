"""Records that do not belong into a run's topics, on their way to its dead letters.

Invariant: each such record is a dead letter once, however often the log is read: one that is there
already is not written again.
"""

import time
from contextlib import ExitStack

from dora.bus.reader import BEGINNING, LogReader, Message, Unreadable
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.bus.writer import LogWriter
from dora.log.dead_letters import dead_letter
from dora.schemas.codec import encode
from dora.schemas.records import DeadLetter

PROCESS = "export"


class DeadLetters(ExitStack):
    """The dead letters of a run; the end of a `with` block waits for what was written. With `write`
    False nothing is written, only counted.

    `deadline` (seconds) bounds reading those that are there, and each wait for the cluster
    (DeadlineError). Raises BusError if the cluster refuses.
    """

    def __init__(
        self, settings: ClusterSettings, topics: RunTopics, *, write: bool, deadline: float
    ) -> None:
        super().__init__()
        self._settings = settings
        self._topics = topics
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

    def take(self, message: Message, what: str) -> None:
        """`message` is foreign or cannot be read: `what` says why."""
        place = (message.topic, message.partition, message.offset)
        if place in self._seen:
            return
        self._seen.add(place)
        if not self._write or place in self._there():
            return
        value = message.value
        code, payload = (
            (value.code, value.payload)
            if isinstance(value, Unreadable)
            else ("foreign", encode(value))
        )
        letter = dead_letter(
            code,
            what,
            run=self._topics.run,
            process=PROCESS,
            now_ms=time.time_ns() // 1_000_000,
            max_message_bytes=self._settings.max_message_bytes,
            message=message,
            trajectory_id=message.key or "",
            payload=payload,
        )
        if self._writer is None:
            writer = LogWriter(self._settings, client_id=f"{self._topics.run}.{PROCESS}")
            self._writer = self.enter_context(writer)
        self._writer.send(self._topics.dead_letters, letter, key=PROCESS)
        self.written += 1

    def flush(self) -> None:
        """Wait until those that were taken are in the log."""
        if self._writer is not None:
            self._writer.flush(self._deadline)

    def _there(self) -> set[tuple[str, int, int]]:
        """Where the records lie whose dead letters were written before."""
        if self._known is None:
            self._known = set()
            with LogReader(
                self._settings, client_id=f"{self._topics.run}.{PROCESS}-letters"
            ) as reader:
                reader.assign({(self._topics.dead_letters, 0): BEGINNING})
                for message in reader.read_to_end(self._deadline):
                    value = message.value
                    if isinstance(value, DeadLetter) and value.topic:
                        self._known.add((value.topic, value.partition, value.offset))
        return self._known
