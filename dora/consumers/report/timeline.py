"""Who generated what when, as a picture of bounded size.

Every attempt at a trajectory counts, however it ended. Workers beyond the rows and versions beyond
the colours are added to their neighbours', not left out.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dora.consumers.report.statistics import blocks, spread_over
from dora.log.schedule_log import Occupancy

ROWS = 64
BINS = 180
BLOCKS = 48


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """A worker, or several with names next to one another. `running` maps a block of versions to
    the mean number of trajectories in generation, per bin of time."""

    label: str
    workers: int
    running: dict[int, npt.NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Occupancy of workers. Block `b` holds the versions `b * versions_per_block` and following;
    bins are `bin_seconds` long, the first begins with the run."""

    rows: tuple[TimelineRow, ...]
    bin_seconds: float
    bins: int
    versions_per_block: int
    most_running: float
    workers: int

    @property
    def seconds(self) -> float:
        """The time shown."""
        return self.bin_seconds * self.bins


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts w2 before w10."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((1, int(p), "") if p.isdecimal() else (0, 0, p) for p in parts)


class TimelineFold:
    """Adds up occupancies of `workers` with versions 0 to `newest` between two times (Unix ms)."""

    def __init__(
        self,
        workers: Iterable[str],
        newest: int,
        begin_ms: int,
        end_ms: int,
        *,
        rows: int = ROWS,
        bins: int = BINS,
        colours: int = BLOCKS,
    ) -> None:
        names = sorted(set(workers), key=natural)
        self._rows = blocks(names, rows)
        self._row_of = {name: n for n, row in enumerate(self._rows) for name in row}
        self._block = -(-(newest + 1) // colours)
        self._begin_ms, self._bins = begin_ms, bins
        self._bin_ms = max(end_ms - begin_ms, bins) / bins
        self._cells: dict[tuple[int, int], npt.NDArray[np.float64]] = {}

    def add(self, occupancies: Iterable[Occupancy]) -> None:
        """Add occupancies; ValueError for a worker that was not announced."""
        for each in occupancies:
            row = self._row_of.get(each.worker)
            if row is None:
                raise ValueError(f"{each.worker} is not one of the timeline's workers")
            place = (row, max(each.version, 0) // self._block)
            cell = self._cells.get(place)
            if cell is None:
                cell = self._cells[place] = np.zeros(self._bins)
            begin = (each.start_ms - self._begin_ms) / self._bin_ms
            end = (each.end_ms - self._begin_ms) / self._bin_ms
            spread_over(cell, begin, end, end - begin)

    def timeline(self) -> Timeline:
        """What was added up."""
        rows = []
        most = 0.0
        for number, names in enumerate(self._rows):
            running = {
                block: cell for (row, block), cell in sorted(self._cells.items()) if row == number
            }
            if running:
                most = max(most, float(np.sum(list(running.values()), axis=0).max()))
            rows.append(TimelineRow(_label(names), len(names), running))
        return Timeline(
            rows=tuple(rows),
            bin_seconds=self._bin_ms / 1000,
            bins=self._bins,
            versions_per_block=self._block,
            most_running=most,
            workers=sum(len(names) for names in self._rows),
        )


def _label(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
