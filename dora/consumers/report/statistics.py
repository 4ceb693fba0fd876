"""The statistics of a report: intervals, moments, percentiles, histograms, thinned curves.

Intervals of pooled values are computed from the pooled counts, never averaged.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

V = TypeVar("V")

CURVE_POINTS = 300
"""Points of a curve, at most."""
Z95 = 1.959963984540054
"""Standard normal quantile of a two-sided 95 % interval."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with the bounds of its 95 % confidence interval."""

    value: float
    low: float
    high: float


def wilson(successes: float, trials: float) -> Interval | None:
    """Share of successes with Wilson's score interval (Wilson 1927, equation 4); None without
    trials. Unlike the normal approximation it is sensible at 0 and 1."""
    if trials <= 0:
        return None
    share = min(max(successes / trials, 0.0), 1.0)
    spread = Z95**2 / trials
    centre = (share + spread / 2) / (1 + spread)
    half = Z95 / (1 + spread) * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    return Interval(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)))


@dataclass(slots=True)
class Moments:
    """Count, mean and squared deviations of values, one at a time (Welford 1962)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Add one value."""
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self.squares += before * (value - self.mean)

    def merge(self, other: "Moments") -> None:
        """Add all values of the other (Chan et al. 1979)."""
        total = self.count + other.count
        if not total:
            return
        apart = other.mean - self.mean
        self.squares += other.squares + apart**2 * self.count * other.count / total
        self.mean += apart * other.count / total
        self.count = total

    @property
    def interval(self) -> Interval | None:
        """The mean and 1.96 standard errors around it; None without values. One value has no
        spread: its interval is itself."""
        if not self.count:
            return None
        half = 0.0
        if self.count > 1:
            half = Z95 * math.sqrt(self.squares / (self.count - 1) / self.count)
        return Interval(self.mean, self.mean - half, self.mean + half)


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a curve: at `step`, `seconds` after the run's start; without `low` and `high`
    where nothing is known of the spread."""

    step: float
    seconds: float
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Median, 90th, 99th percentile and largest of `count` values."""

    count: int
    p50: float
    p90: float
    p99: float
    largest: float


def percentiles(values: "Sequence[int] | array[int]") -> Percentiles | None:
    """Percentiles of `values`, interpolated linearly between neighbours; None without values."""
    if not len(values):
        return None
    found = np.percentile(np.asarray(values), (50, 90, 99, 100))
    return Percentiles(len(values), *(float(each) for each in found))


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts between `edges`; a bin holds its lower edge, the last one its upper edge too."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        """Number of values."""
        return sum(self.counts)


def length_edges(longest: int, most: int = 40) -> tuple[float, ...]:
    """Edges of at most `most` bins of equal, round width (1, 2 or 5 times a power of 10) that hold
    lengths 0 to `longest`."""
    width = 1
    for power in range(19):
        for factor in (1, 2, 5):
            width = factor * 10**power
            if longest // width + 1 <= most:
                return tuple(float(i * width) for i in range(longest // width + 2))
    raise ValueError(f"{longest} is not a length")


def histogram(groups: "Iterable[Sequence[int] | array[int]]", edges: Sequence[float]) -> Histogram:
    """The histogram of the values of all groups over `edges`; values outside are left out."""
    counts: npt.NDArray[np.int64] = np.zeros(len(edges) - 1, dtype=np.int64)
    for values in groups:
        counts += np.histogram(np.asarray(values), bins=np.asarray(edges))[0]
    return Histogram(tuple(float(e) for e in edges), tuple(int(c) for c in counts))


def blocks(values: Sequence[V], most: int) -> list[Sequence[V]]:
    """Consecutive values in blocks of equal size, the last one shorter, at most `most` of them."""
    size = max(1, -(-len(values) // most))
    return [values[at : at + size] for at in range(0, len(values), size)]


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points, each the mean of equally many neighbours. Bounds are left out where
    points were averaged: those of a mean do not follow from them."""
    if len(points) <= most:
        return list(points)
    return [
        Point(block[-1].step, block[-1].seconds, math.fsum(p.value for p in block) / len(block))
        for block in blocks(points, most)
    ]


class TimeBins:
    """Amounts over time in at most `most` bins of equal width, for a span that is known only in the
    end: when a value lies beyond the last bin, bins are joined in pairs.

    Times are seconds from 0 on; earlier ones count as 0.
    """

    def __init__(self, most: int = 240, width: float = 0.25) -> None:
        self.width = width
        """Seconds of a bin."""
        self._amounts: npt.NDArray[np.float64] = np.zeros(most)
        self._last = 0.0

    def spread(self, begin: float, end: float, amount: float) -> None:
        """Spread `amount` evenly over `begin` to `end`."""
        begin = max(begin, 0.0)
        end = max(end, begin)
        self._last = max(self._last, end)
        while end >= self.width * len(self._amounts):
            halves = self._amounts.reshape(-1, 2).sum(axis=1)
            self._amounts[:] = 0.0
            self._amounts[: len(halves)] = halves
            self.width *= 2
        spread_over(self._amounts, begin / self.width, end / self.width, amount)

    def rates(self) -> list[tuple[float, float]]:
        """Middle of each bin (s) and its amount per second, up to the last time that was seen."""
        used = int(self._last / self.width) + 1
        result = []
        for number in range(used):
            begin = number * self.width
            long = min(self.width, self._last - begin)
            if long > 0:
                result.append((begin + long / 2, float(self._amounts[number]) / long))
        return result


def spread_over(bins: npt.NDArray[np.float64], begin: float, end: float, amount: float) -> None:
    """Add `amount` evenly over `begin` to `end`, which count bins; parts outside are left out."""
    count = len(bins)
    if end <= begin:
        if 0 <= begin < count:
            bins[int(begin)] += amount
        return
    density = amount / (end - begin)
    low, high = max(begin, 0.0), min(end, float(count))
    if high <= low:
        return
    first, last = int(low), min(int(high), count - 1)
    if first == last:
        bins[first] += density * (high - low)
        return
    bins[first] += density * (first + 1 - low)
    bins[first + 1 : last] += density
    bins[last] += density * (high - last)
