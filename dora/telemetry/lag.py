"""How far the trainer's positions are behind what it could read.

The end of a partition is its last stable offset, the first that a `read_committed` reader cannot
pass. It is asked for in a thread with its own connections, so that a broker that does not answer
does not hold up the trainer.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping

from dora.bus.reader import LogReader
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.config import Config
from dora.core.ring import slot_partitions
from dora.errors import DoraError

log = logging.getLogger(__name__)

Places = Mapping[tuple[str, int], int]

MEASURE_SECONDS = 5.0
_JOIN_SECONDS = 2.0


def lag_of(
    positions: Places,
    ends: Places,
    *,
    journal: str,
    trajectories: str,
    live: Iterable[int],
    ring: int,
    lanes: int,
) -> tuple[int, dict[int, int]]:
    """Offsets between `positions` and `ends`: of the journal, and by live version of trajectories.

    Transaction markers take offsets as well, so a lag of a few is none.
    """
    behind = {place: max(0, ends.get(place, at) - at) for place, at in positions.items()}
    started = sum(lag for (topic, _), lag in behind.items() if topic == journal)
    by_version = {
        version: sum(
            behind.get((trajectories, p), 0) for p in slot_partitions(version, ring, lanes)
        )
        for version in live
    }
    return started, by_version


class LagProbe:
    """Measures every few seconds once it was given positions; `clock` is monotonic, in seconds."""

    def __init__(
        self, config: Config, settings: ClusterSettings, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._topics = RunTopics(config.run.name)
        self._ring, self._lanes = config.window.ring, config.kafka.lanes
        self._given: tuple[dict[tuple[str, int], int], range] | None = None
        self._measured: tuple[float, int, dict[int, int]] | None = None
        self._failing = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def position(self, positions: Places, live: range) -> None:
        """Where the trainer reads, and the live versions; returns at once."""
        self._given = dict(positions), live
        if self._thread is None:
            self._thread = threading.Thread(target=self._measure, name="lag", daemon=True)
            self._thread.start()

    def gauges(self, now: float) -> dict[str, dict[str, float]]:
        """The newest measurement, by metric and version."""
        if self._measured is None:
            return {}
        at, journal, versions = self._measured
        return {
            "dora_trainer_journal_lag_records": {"": float(journal)},
            "dora_trainer_trajectories_lag_records": {
                str(version): float(lag) for version, lag in versions.items()
            },
            "dora_trainer_lag_age_seconds": {"": max(0.0, now - at)},
        }

    def close(self) -> None:
        """Ask the thread to end; one that waits for Kafka is left to end with the process."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def _measure(self) -> None:
        try:
            with LogReader(self._settings, client_id="trainer-lag") as reader:
                while not self._ended.is_set():
                    self._once(reader)
                    self._ended.wait(MEASURE_SECONDS)
        except DoraError as error:
            log.warning("the consumer lag is not measured any more: %s", error.message)

    def _once(self, reader: LogReader) -> None:
        assert self._given is not None
        positions, live = self._given
        try:
            ends = reader.end_offsets(positions)
        except DoraError as error:  # the age of the last measurement grows meanwhile
            if not self._failing:
                log.warning("the consumer lag cannot be measured: %s", error.message)
            self._failing = True
            return
        self._failing = False
        journal, versions = lag_of(
            positions,
            ends,
            journal=self._topics.dispatch,
            trajectories=self._topics.trajectories,
            live=live,
            ring=self._ring,
            lanes=self._lanes,
        )
        self._measured = self._clock(), journal, versions
