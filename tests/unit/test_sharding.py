"""Ranks share an optimizer batch: nothing twice, nothing lost, equally much each."""

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dora.config.trainer import LossSection
from dora.consumers.learner.batches import (
    Sample,
    build_shard,
    group_samples,
    plan_update,
    shard_from_message,
    shard_message,
    shard_places,
)
from tests.unit.test_batches import sample, trajectory

SETTINGS = LossSection()
LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=24)


def samples_of(lengths: list[tuple[int, bool]]) -> list[Sample]:
    return [sample(n + 2, n, advantage=1.0 if signal else 0.0) for n, signal in lengths]


@given(lengths=LENGTHS, world=st.integers(1, 5), budget=st.integers(1, 200))
def test_every_sample_with_a_gradient_is_trained_by_exactly_one_rank(
    lengths: list[tuple[int, bool]], world: int, budget: int
) -> None:
    samples = samples_of(lengths)
    plan = plan_update(samples, SETTINGS, budget, 16, world)
    assert len(plan.ranks) == world and len({len(passes) for passes in plan.ranks}) == 1
    counted = [r for passes in plan.ranks for p in passes if not p.idle for r in p.rows]
    assert sorted(counted) == [i for i, (_, signal) in enumerate(lengths) if signal]
    parts = [build_shard(passes, samples, plan.weights) for passes in plan.ranks]
    total = sum(float(b.weights.astype(np.float64).sum()) for p in parts for b in p.batches)
    generated = [n for n, signal in lengths if signal]
    assert math.isclose(total, sum(generated) / sum(n for n, _ in lengths), rel_tol=1e-5)
    # balanced by tokens: no rank has more than another by more than the longest sample
    loads = [
        sum(len(samples[r].token_ids) for p in passes for r in p.rows if not p.idle)
        for passes in plan.ranks
    ]
    if generated:
        assert max(loads) - min(loads) <= max(generated) + 2


def test_one_rank_has_all_without_an_idle_pass() -> None:
    samples = samples_of([(5, True), (9, True), (3, False)])
    plan = plan_update(samples, SETTINGS, 1, 16, 1)
    assert [p.rows for p in plan.ranks[0]] == [(1,), (0,)]
    assert not any(p.idle for p in plan.ranks[0])


def test_a_rank_rebuilds_its_share_from_what_the_log_holds() -> None:
    trajectories = [
        trajectory([5, 6, 7, 8], [0, 1, 1, 1], 1.0, sample=0),
        trajectory([5, 6, 7], [0, 0, 1], 0.0, sample=1),
        trajectory([5, 6, 9], [0, 1, 1], 0.25, sample=2),
    ]
    samples = group_samples(trajectories, SETTINGS)
    places = [(3, 10), (3, 12), (4, 7)]
    log = dict(zip(places, trajectories, strict=True))
    plan = plan_update(samples, SETTINGS, 5, 16, 2)
    for rank in range(2):
        share = json.loads(json.dumps(shard_message(plan, rank, samples, places)))
        assert set(shard_places(share)) == {places[row] for row in plan.rows(rank)}
        found = shard_from_message(share, {place: log[place] for place in shard_places(share)})
        expected = build_shard(plan.ranks[rank], samples, plan.weights)
        for ours, theirs in zip(found.batches, expected.batches, strict=True):
            for name in ("samples", "token_ids", "places", "rows", "targets", "behaviour"):
                assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
            assert ours.weights.tobytes() == theirs.weights.tobytes()
            assert ours.advantages.tobytes() == theirs.advantages.tobytes()
