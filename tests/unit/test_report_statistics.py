"""Intervals, percentiles, histograms and thinned curves, against values known from elsewhere."""

import random
import statistics
from array import array

import numpy as np
import pytest

from dora.consumers.report.statistics import (
    Moments,
    Point,
    TimeBins,
    blocks,
    histogram,
    length_edges,
    percentiles,
    spread_over,
    thinned,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (50, 100, 0.4038, 0.5962),
    ],
)
def test_wilson_intervals_are_those_of_the_tables(
    successes: float, trials: float, low: float, high: float
) -> None:
    found = wilson(successes, trials)
    assert found is not None
    assert found.value == successes / trials
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


def test_without_trials_or_values_there_is_no_interval() -> None:
    assert wilson(0, 0) is None
    assert Moments().interval is None
    assert percentiles([]) is None


def test_moments_are_those_of_all_values_however_they_were_merged() -> None:
    rng = random.Random(3)
    values = [rng.gauss(5, 2) for _ in range(200)]
    parts = [Moments() for _ in range(3)]
    for index, value in enumerate(values):
        parts[index % 3].add(value)
    whole = Moments()
    for part in [Moments(), *parts]:
        whole.merge(part)
    found = whole.interval
    assert found is not None
    assert found.value == pytest.approx(statistics.fmean(values))
    half = 1.96 * statistics.stdev(values) / 200**0.5
    assert found.high - found.value == pytest.approx(half, rel=1e-4)


def test_one_value_has_no_spread() -> None:
    one = Moments()
    one.add(0.5)
    assert one.interval is not None
    assert (one.interval.low, one.interval.high) == (0.5, 0.5)


def test_percentiles_of_a_hundred_and_one_lengths() -> None:
    found = percentiles(array("l", range(101)))
    assert found is not None
    assert (found.count, found.p50, found.p90, found.p99, found.largest) == (101, 50, 90, 99, 100)


@pytest.mark.parametrize(
    ("longest", "width"), [(0, 1), (39, 1), (40, 2), (399, 10), (30_000, 1000)]
)
def test_lengths_fall_into_at_most_forty_bins_of_round_width(longest: int, width: int) -> None:
    edges = length_edges(longest)
    assert edges[1] - edges[0] == width
    assert edges[0] == 0 and edges[-1] > longest and len(edges) <= 41
    assert histogram([[0, longest]], edges).total == 2


def test_a_histogram_adds_up_its_groups() -> None:
    found = histogram([array("l", [0, 1, 2]), [2, 3], []], (0.0, 2.0, 4.0))
    assert found.counts == (2, 3)
    assert found.total == 5


def test_blocks_cover_everything_once() -> None:
    assert blocks([], 5) == []
    assert blocks("abc", 5) == ["a", "b", "c"]
    found = blocks(range(1001), 300)
    assert [i for block in found for i in block] == list(range(1001))
    assert len(found) <= 300


def test_a_thinned_curve_has_means_and_no_bounds() -> None:
    points = [Point(i, 10 * i, float(i), 0.0, 1.0) for i in range(10)]
    assert thinned(points, 10) == points
    assert thinned(points, 5)[0] == Point(1, 10, 0.5)
    assert sum(p.value for p in thinned(points, 5)) * 2 == sum(p.value for p in points)


def test_time_bins_keep_the_amount_however_long_it_takes() -> None:
    bins = TimeBins(most=8, width=0.5)
    bins.spread(-3, 0.25, 5)  # a clock that was behind
    bins.spread(0, 2, 8)
    bins.spread(1, 1, 2)
    assert bins.width == 0.5
    bins.spread(90, 100, 10)
    assert bins.width == 16.0
    rates = bins.rates()
    assert sum(
        rate * min(16.0, 100 - 16 * n) for n, (_, rate) in enumerate(rates)
    ) == pytest.approx(25)
    assert len(rates) == 7


def test_what_is_spread_beyond_the_bins_is_cut_off() -> None:
    bins = np.zeros(4)
    spread_over(bins, -1, 5, 6)
    spread_over(bins, 1.5, 1.5, 3)
    spread_over(bins, 9, 12, 1)
    assert bins.tolist() == [1, 4, 1, 1]
