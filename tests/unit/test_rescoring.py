"""What another verifier changes, counted."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dora.core.rescoring import Rescored, compare, largest_changes, merge_versions, spread_groups

unhurried = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])

REWARDS = st.one_of(st.none(), st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0]))


def score(
    identity: str, old: float | None, new: float | None, version: int = 0, purpose: str = "train"
) -> Rescored:
    code, reason = ("verifier_raised", "KeyError: 'x'") if new is None else (None, None)
    group = identity.partition("/")[0]
    return Rescored(identity, group, version, purpose, old, new, code, reason)  # type: ignore[arg-type]


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Rescored], dict[str, int]]:
    sizes = {f"g{n}": draw(st.integers(1, 4)) for n in range(draw(st.integers(0, 5)))}
    scores = [
        score(f"{group}/{sample}", draw(REWARDS), draw(REWARDS), version=int(group[1:]) // 2)
        for group, size in sizes.items()
        for sample in range(size)
        if draw(st.booleans()) or sample == 0
    ]
    return scores, sizes


@given(runs(), st.sampled_from([0.0, 0.5, 1.0]))
@unhurried
def test_every_trajectory_and_group_is_counted_once(
    run: tuple[list[Rescored], dict[str, int]], threshold: float
) -> None:
    scores, sizes = run
    c = compare(scores, threshold=threshold, group_sizes=sizes)
    both = c.up + c.down + c.unchanged
    assert both + c.newly_failed + c.newly_scored + c.failed_twice == c.trajectories == len(scores)
    assert sum(f.count for f in c.failures) == c.newly_failed + c.failed_twice
    assert sum(m.both for m in c.by_version) == sum(m.both for m in c.by_purpose) == both
    g = c.groups
    assert g.compared + g.incomplete == len({s.group for s in scores})
    assert g.signal_after - g.signal_before == g.signal_gained - g.signal_lost
    assert 0 <= g.advantages_turned <= g.advantages_changed
    for means in c.by_purpose:
        assert round((means.success_after - means.success_before) * means.both) == (
            c.to_success - c.to_failure
        )
        # means over the same trajectories differ exactly by what the rewards differ
        changes = sum(s.change for s in scores)
        assert (means.reward_after - means.reward_before) * means.both == pytest.approx(changes)


@given(runs())
@unhurried
def test_the_same_verifier_changes_nothing(run: tuple[list[Rescored], dict[str, int]]) -> None:
    scores = [score(s.trajectory, s.old, s.old, s.version) for s in run[0]]
    c = compare(scores, threshold=1.0, group_sizes=run[1])
    assert c.identical
    assert c.up == c.down == c.to_success == c.to_failure == c.groups.advantages_changed == 0
    assert c.groups.signal_gained == c.groups.signal_lost == 0
    assert largest_changes(scores, 5) == []


@given(runs())
@unhurried
def test_swapping_old_and_new_swaps_the_counts(
    run: tuple[list[Rescored], dict[str, int]],
) -> None:
    scores, sizes = run
    there = compare(scores, threshold=0.5, group_sizes=sizes)
    swapped = [score(s.trajectory, s.new, s.old, s.version) for s in scores]
    back = compare(swapped, threshold=0.5, group_sizes=sizes)
    assert (there.up, there.to_success, there.newly_failed) == (
        back.down, back.to_failure, back.newly_scored,
    )  # fmt: skip
    assert there.groups.signal_gained == back.groups.signal_lost
    assert there.groups.failed_before == back.groups.failed_after
    assert there.groups.advantages_turned == back.groups.advantages_turned


def test_signal_and_signs_of_advantages_are_those_of_whole_groups() -> None:
    scores = [
        *(score(f"g0/{i}", old, new) for i, (old, new) in enumerate([(1.0, 0.0), (0.0, 1.0)])),
        *(score(f"g1/{i}", 1.0, new) for i, new in enumerate([1.0, 0.0])),
        *(score(f"g2/{i}", old, 0.0) for i, old in enumerate([1.0, 0.0])),
        *(score(f"g3/{i}", old, new) for i, (old, new) in enumerate([(1.0, None), (0.0, 0.0)])),
        score("g4/0", 1.0, 0.0),
        score("e0-0/0", 1.0, 0.0, purpose="eval"),
    ]
    sizes = {f"g{n}": 2 for n in range(5)} | {"e0-0": 1}
    groups = compare(scores, threshold=1.0, group_sizes=sizes).groups
    assert (groups.compared, groups.incomplete) == (4, 1)
    assert (groups.signal_gained, groups.signal_lost) == (1, 2)
    assert (groups.failed_before, groups.failed_after) == (0, 1)
    assert (groups.advantages_turned, groups.advantages_changed) == (2, 6)


def test_a_reward_at_the_mean_has_no_advantage_whatever_rounding_says() -> None:
    old, new = [0.1, 0.2, 0.3], [0.0, 0.5, 1.0]
    scores = [score(f"g0/{i}", o, n) for i, (o, n) in enumerate(zip(old, new, strict=True))]
    assert compare(scores, threshold=1, group_sizes={"g0": 3}).groups.advantages_changed == 0


def test_a_group_has_signal_where_it_has_for_the_trainer() -> None:
    # rewards that differ, however little, are trained; nobody's advantage is worth counting
    scores = [score("g0/0", 1.0, 1.0), score("g0/1", 1.0, 1.0 + 1e-13)]
    groups = compare(scores, threshold=1, group_sizes={"g0": 2}).groups
    assert (groups.signal_before, groups.signal_after) == (0, 1)
    assert groups.advantages_changed == 0


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 12))
@unhurried
def test_merged_versions_are_means_over_all_their_trajectories(
    counts: list[int], rows: int
) -> None:
    scores = [
        score(f"g{v}/{i}", 0.0 if i else None, float(v % 2), v)
        for v, count in enumerate(counts)
        for i in range(1 + count)
    ]
    single = compare(scores, threshold=1.0, group_sizes={}).by_version
    merged = merge_versions(single, rows)
    assert len(merged) == min(rows, len(counts))
    assert sum(m.both for m in merged) == sum(counts)
    for means in merged:
        first, _, last = means.label.partition("-")
        own = [v % 2 for v in range(int(first), int(last or first) + 1) for _ in range(counts[v])]
        assert (
            means.reward_after == means.success_after == pytest.approx(sum(own) / max(len(own), 1))
        )


def test_failures_are_told_by_reason_and_the_rest_by_code() -> None:
    scores = [
        Rescored(f"g{n}/0", f"g{n}", 0, "train", 1.0, None, "verifier_raised", f"line {n % 13}")
        for n in range(39)
    ]
    failures = compare(scores, threshold=1.0, group_sizes={}).failures
    assert len(failures) == 11 and sum(f.count for f in failures) == 39
    assert (failures[-1].reason, failures[-1].count) == ("other reasons", 9)


def test_the_largest_changes_come_first_and_failures_before_them() -> None:
    scores = [
        score("g0/0", 0.0, 0.5), score("g0/1", 1.0, -1.0), score("g0/2", 1.0, None),
        score("g0/3", 1.0, 1.0), score("g0/4", None, None),
    ]  # fmt: skip
    assert [s.trajectory for s in largest_changes(scores, 9)] == ["g0/2", "g0/1", "g0/0"]
    assert len(largest_changes(scores, 2)) == 2


@given(st.lists(st.integers(1, 5), min_size=1, max_size=30), st.integers(1, 60))
@unhurried
def test_a_limit_takes_whole_groups_from_all_over_the_run(sizes: list[int], limit: int) -> None:
    named = {f"g{n}": size for n, size in enumerate(sizes)}
    chosen = spread_groups(named, limit)
    assert chosen <= set(named) and chosen
    assert sum(named[g] for g in chosen) <= limit or len(chosen) == 1
    if sum(sizes) <= limit:
        assert chosen == set(named)


def test_the_limit_spreads_evenly() -> None:
    assert spread_groups({f"g{n}": 8 for n in range(100)}, 40) == {
        f"g{n}" for n in (0, 20, 40, 60, 80)
    }
    assert [len(spread_groups({"a": 2, "b": 2}, n)) for n in (1, 2, 3)] == [1, 1, 1]
