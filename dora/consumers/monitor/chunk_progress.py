"""The newest chunks of a few trajectories, looked up in the log.

Only chunks of the trajectories asked for are decoded, and a look takes no longer than
its budget; what it did not reach, the next look goes on with.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dora.bus.offsets import Partition
from dora.bus.reader import LogReader
from dora.bus.settings import ClusterSettings
from dora.consumers.monitor.waits import Progress
from dora.errors import DeadlineError
from dora.schemas.records import Chunk


@dataclass(frozen=True, slots=True)
class Search:
    """Where the chunks of a trajectory lie: in `partition`, from `start` on."""

    partition: Partition
    start: int


@dataclass(slots=True)
class _Scan:
    start: int
    wanted: set[str] = field(default_factory=set)
    position: int | None = None


class ChunkProgress:
    """Looks up progress in the chunks topic; holds no connection between two looks."""

    def __init__(self, settings: ClusterSettings, client_id: str) -> None:
        self._settings = settings
        self._client_id = client_id
        self._scans: dict[Partition, _Scan] = {}
        self._progress: dict[str, Progress] = {}

    def look(self, searches: Mapping[str, Search], budget: float) -> dict[str, Progress]:
        """The newest progress of the trajectories in `searches`, as far as `budget` seconds allow.

        BusError if the cluster does not answer or refuses.
        """
        self._progress = {
            known: progress for known, progress in self._progress.items() if known in searches
        }
        scans = self._plan(searches)
        with LogReader(
            self._settings, client_id=self._client_id, wanted=lambda key: key in searches
        ) as reader:
            begin = reader.start_offsets(scans)
            # retention may have taken the oldest chunks: the newest are what counts here
            reader.assign(
                {
                    place: max(begin[place], scan.start if scan.position is None else scan.position)
                    for place, scan in scans.items()
                }
            )
            try:
                for message in reader.read_to_end(budget):
                    if isinstance(message.value, Chunk):
                        self._handle(message.value)
            except DeadlineError:
                pass  # the next look goes on from the positions
            positions = reader.positions()
            for place, scan in scans.items():
                scan.position = positions[place]
        self._scans = scans
        return dict(self._progress)

    def _plan(self, searches: Mapping[str, Search]) -> dict[Partition, _Scan]:
        """Partitions to read; one that was read for other trajectories is read from its start."""
        scans: dict[Partition, _Scan] = {}
        for identity, search in searches.items():
            scan = scans.setdefault(search.partition, _Scan(search.start))
            scan.start = min(scan.start, search.start)
            scan.wanted.add(identity)
        for place, scan in scans.items():
            former = self._scans.get(place)
            if former is not None and scan.wanted <= former.wanted:
                scan.position = former.position
        return scans

    def _handle(self, chunk: Chunk) -> None:
        progress = Progress.of(chunk)
        known = self._progress.get(chunk.trajectory_id)
        if known is None or progress.order >= known.order:
            self._progress[chunk.trajectory_id] = progress
