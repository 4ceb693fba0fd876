"""Started trajectories that no worker generates, in the order in which they are to start.

Within a version the order is that of the journal, then of the samples, unless a rank is given. The
cost of looking at the next ones does not depend on how many wait.
"""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from dora.schemas.records import Purpose, VersionRun


@dataclass(frozen=True, slots=True)
class PendingAttempt:
    """A started trajectory that no worker holds; `attempt` is the number of its next attempt.

    That attempt goes on from the prefix, packed as in the records; `prefix_runs` and
    `prompt_hash` as in Command.
    """

    group_id: str
    sample: int
    version: int
    ordinal: int
    purpose: Purpose
    attempt: int
    prefix_token_ids: bytes = b""
    prefix_logprobs: bytes = b""
    prefix_runs: tuple[VersionRun, ...] = ()
    prompt_hash: str = ""


Rank = tuple[float, int, int]


class PendingQueue(MutableMapping[str, PendingAttempt]):
    """Pending attempts by trajectory id. A lower `rank` in `put` starts first, before the journal's
    order."""

    def __init__(self) -> None:
        self._items: dict[str, PendingAttempt] = {}
        self._heaps: dict[int, list[tuple[Rank, str]]] = {}
        self._ranks: dict[str, Rank] = {}
        self._counts: dict[int, int] = {}

    def __getitem__(self, identity: str) -> PendingAttempt:
        return self._items[identity]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, identity: object) -> bool:
        return identity in self._items

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PendingQueue) and self._items == other._items

    __hash__ = None  # type: ignore[assignment]

    def __setitem__(self, identity: str, work: PendingAttempt) -> None:
        self.put(identity, work)

    def put(self, identity: str, work: PendingAttempt, rank: float = 0.0) -> None:
        """A trajectory waits from now on."""
        if identity in self._items:
            del self[identity]
        self._items[identity] = work
        whole = self._ranks[identity] = (rank, work.ordinal, work.sample)
        self._counts[work.version] = self._counts.get(work.version, 0) + 1
        heap = self._heaps.setdefault(work.version, [])
        if len(heap) > 64 + 4 * self._counts[work.version]:
            heap[:] = [entry for entry in heap if self._holds(entry, work.version)]
            heapify(heap)
        heappush(heap, (whole, identity))

    def __delitem__(self, identity: str) -> None:
        work = self._items.pop(identity)
        del self._ranks[identity]
        left = self._counts[work.version] - 1
        if left:
            self._counts[work.version] = left
        else:
            del self._counts[work.version], self._heaps[work.version]

    def versions(self) -> list[int]:
        """Versions of which something waits, oldest first."""
        return sorted(self._counts)

    def count(self, version: int) -> int:
        """How many of a version wait."""
        return self._counts.get(version, 0)

    def first(self, version: int, limit: int) -> list[PendingAttempt]:
        """The next ones of a version, at most `limit`."""
        heap = self._heaps.get(version, [])
        found: list[tuple[Rank, str]] = []
        while heap and len(found) < limit:
            entry = heappop(heap)
            if self._holds(entry, version) and (not found or found[-1] != entry):
                found.append(entry)
        for entry in found:
            heappush(heap, entry)
        return [self._items[identity] for _, identity in found]

    def _holds(self, entry: tuple[Rank, str], version: int) -> bool:
        """Whether what an entry of a heap names still waits."""
        rank, identity = entry
        return self._ranks.get(identity) == rank and self._items[identity].version == version
