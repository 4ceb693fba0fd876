"""The newest chunks of a few trajectories, looked up in the log.

Invariant: only chunks of the trajectories asked for are decoded, and a look takes no longer than
its budget; what it did not reach, the next look goes on with.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dora.bus.offsets import Partition
from dora.bus.reader import LogReader
from dora.bus.settings import ClusterSettings
from dora.consumers.monitor.waits import Sign
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
    """Looks up signs of life; holds no connection between two looks."""

    def __init__(self, settings: ClusterSettings, client_id: str) -> None:
        self._settings = settings
        self._client_id = client_id
        self._scans: dict[Partition, _Scan] = {}
        self._signs: dict[str, Sign] = {}

    def look(self, searches: Mapping[str, Search], budget: float) -> dict[str, Sign]:
        """The newest signs of the trajectories in `searches`, as far as `budget` seconds allow.

        BusError if the cluster does not answer or refuses.
        """
        self._signs = {known: sign for known, sign in self._signs.items() if known in searches}
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
                        self._take(message.value)
            except DeadlineError:
                pass  # the next look goes on from the positions
            positions = reader.positions()
            for place, scan in scans.items():
                scan.position = positions[place]
        self._scans = scans
        return dict(self._signs)

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

    def _take(self, chunk: Chunk) -> None:
        sign = Sign.of(chunk)
        known = self._signs.get(chunk.trajectory_id)
        if known is None or sign.order >= known.order:
            self._signs[chunk.trajectory_id] = sign
