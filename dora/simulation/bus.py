""" """

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from dora.schemas.records import Record

Action = Callable[..., None]


class Events:
    """What happens when; times in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0
        """Events that have happened."""
        self._queue: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, time: float, action: Action, *arguments: Any) -> None:
        """Have `action(*arguments)` called at `time`, or now if that is past."""
        self._asked += 1
        heapq.heappush(self._queue, (max(time, self.now), self._asked, action, arguments))

    def happen(self) -> bool:
        """The next event; False if there is none."""
        if not self._queue:
            return False
        self.now, _, action, arguments = heapq.heappop(self._queue)
        self.count += 1
        action(*arguments)
        return True


class Mailbox:
    """Records on their way to one reader, `delay` seconds each; `wake` is called when some arrive,
    at multiples of `tick` where that is not 0."""

    def __init__(self, events: Events, delay: float, tick: float, wake: Action) -> None:
        self._events = events
        self._delay = delay
        self._tick = tick
        self._wake = wake
        self._listening = True
        self._records: deque[tuple[float, Record, int]] = deque()
        self._wakes_at: float | None = None

    def put(self, record: Record, offset: int) -> None:
        """Write a record."""
        arrival = self._events.now + self._delay
        self._records.append((arrival, record, offset))
        if self._wakes_at is None and self._listening:
            self.call(arrival)

    def listen(self, listening: bool) -> None:
        """Whether the reader is to be woken by what arrives; it may look by itself at any time."""
        self._listening = listening
        if listening and self._records:
            self.call(self._records[0][0])

    def call(self, time: float) -> None:
        """Wake the reader at `time`, or at the tick after it."""
        if self._tick:
            time = -(-time // self._tick) * self._tick
        if self._wakes_at is None or time < self._wakes_at:
            self._wakes_at = time
            self._events.at(time, self._woken, time)

    def _woken(self, time: float) -> None:
        if time != self._wakes_at:
            return
        self._wakes_at = None
        self._wake()
        if self._records and self._listening:
            self.call(max(self._records[0][0], self._events.now))

    def arrived(self) -> Iterator[tuple[Record, int]]:
        """The records that have arrived, with their offsets; each once."""
        records, now = self._records, self._events.now + 1e-9
        while records and records[0][0] <= now:
            _, record, offset = records.popleft()
            yield record, offset
