"""Follows the run's log while everything around it is struck.

Invariant: each record is handed out once, in its partition's order, whatever happens to the broker
meanwhile.
"""

import time

from dora.bus import BEGINNING, ClusterSettings, LogReader, Message, Partition, RunTopics
from dora.config import Config
from dora.errors import BusError

_POLL_MESSAGES = 2000
_END_SECONDS = 60.0


class Watch:
    """Reads ledger, dispatch, trajectories and heartbeats from their start."""

    def __init__(self, config: Config, settings: ClusterSettings) -> None:
        topics = RunTopics(config.run.name)
        self._settings = settings
        self._positions: dict[Partition, int] = {
            (topics.steps, 0): BEGINNING,
            (topics.workers, 0): BEGINNING,
        }
        for number in range(config.kafka.dispatch_partitions):
            self._positions[topics.dispatch, number] = BEGINNING
        for number in range(config.window.ring * config.kafka.lanes):
            self._positions[topics.trajectories, number] = BEGINNING
        self._reader: LogReader | None = None
        self.problem = ""
        """What the last failed attempt to read said."""

    def poll(self, timeout: float) -> list[Message]:
        """What has arrived; nothing while the broker does not answer."""
        try:
            if self._reader is None:
                self._reader = LogReader(self._settings, client_id="chaos-watch")
                self._reader.assign(self._positions)
            messages = self._reader.poll(_POLL_MESSAGES, timeout)
        except BusError as error:
            self.problem = error.message
            self.close()
            time.sleep(timeout)
            return []
        for message in messages:
            self._positions[message.topic, message.partition] = message.offset + 1
        return messages

    def rest(self) -> list[Message]:
        """Everything up to the end of the log as of now."""
        self.close()
        reader = LogReader(self._settings, client_id="chaos-watch")
        try:
            reader.assign(self._positions)
            messages = list(reader.read_to_end(_END_SECONDS))
        finally:
            reader.close()
        for message in messages:
            self._positions[message.topic, message.partition] = message.offset + 1
        return messages

    def close(self) -> None:
        """Let go of the connection."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
