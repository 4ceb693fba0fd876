"""How many versions had unfinished work at the same time.

Invariant: a version counts from the moment its first group starts until its last trajectory is
finished. Times are those in the records (Unix milliseconds), so clocks of different machines that
disagree blur the result by as much.
"""


class VersionSpans:
    """The time from first start to last finish, by version."""

    def __init__(self) -> None:
        self._started: dict[int, int] = {}
        self._finished: dict[int, int] = {}

    def start(self, version: int, time_ms: int) -> None:
        """A group of the version started."""
        self._started[version] = min(self._started.get(version, time_ms), time_ms)

    def finish(self, version: int, time_ms: int) -> None:
        """A trajectory of the version finished."""
        self._finished[version] = max(self._finished.get(version, time_ms), time_ms)

    def most_at_once(self) -> int:
        """Largest number of versions whose spans overlap in a moment."""
        events: list[tuple[int, int]] = []
        for version, started in self._started.items():
            finished = self._finished.get(version)
            if finished is not None and finished > started:
                events += [(started, 1), (finished, -1)]
        most = live = 0
        for _, change in sorted(events):  # an end at the moment of a start comes first
            live += change
            most = max(most, live)
        return most
