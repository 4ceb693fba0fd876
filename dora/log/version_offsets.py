"""Where in the log the live versions are."""

from collections.abc import Mapping

from dora.bus.offsets import Partition
from dora.bus.reader import BEGINNING, LogReader
from dora.bus.topics import RunTopics
from dora.config import Config
from dora.core.ring import JOURNAL, slot_partitions, version_starts
from dora.core.window import Window
from dora.errors import RunError
from dora.schemas.records import Policy


def live_positions(
    reader: LogReader, config: Config, policies: Mapping[int, Policy], newest: int
) -> dict[Partition, int]:
    """Offsets to read journal and trajectories from while `newest` is the newest version.

    From there on everything is read that concerns a group of a live version; what lies before
    concerns groups that the ledger has closed. Slots of no live version are read from their ends:
    nothing is generated for a new version before it is announced. RunError if `policies` lacks a
    live version.
    """
    topics, window, lanes = RunTopics(config.run.name), config.window, config.kafka.lanes
    oldest = Window(window.max_staleness, window.groups_per_step).oldest_live(newest)
    every = [
        (topics.trajectories, index)
        for version in range(window.ring)
        for index in slot_partitions(version, window.ring, lanes)
    ]
    journal = (topics.dispatch, JOURNAL)
    positions = {**reader.end_offsets(every), journal: BEGINNING}
    for version in range(oldest, newest + 1):
        if version not in policies:
            raise RunError(f"the policies topic of run {config.run.name} has no version {version}")
        positions |= version_starts(policies[version], topics.trajectories)
    if oldest > 0:  # what the journal holds before version 0 does not belong in it
        announced = version_starts(policies[oldest], topics.dispatch)
        positions[journal] = announced.get(journal, BEGINNING)
    return positions
