"""Partitions and names are the same in every process, for ever."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.core import ring
from dora.schemas.records import Policy, SlotOffset
from tests import factories

RINGS = st.integers(1, 66)
LANES = st.integers(1, 16)
VERSIONS = st.integers(0, 10**6)
NAMES = st.text(min_size=1, max_size=20)


def test_the_hash_is_crc32_and_never_changes() -> None:
    # The check value that the definition of CRC-32 gives: old runs are found by it.
    assert ring.lane("123456789", 2**32) == 0xCBF43926
    assert ring.worker_partition("123456789", 2**32 + 1) == 1 + 0xCBF43926
    assert ring.partition(7, "123456789", 3, 5) == 5 + 0xCBF43926 % 5


@given(VERSIONS, NAMES, RINGS, LANES)
def test_a_group_lies_in_the_slot_of_its_version(
    version: int, group_id: str, slots: int, lanes: int
) -> None:
    partition = ring.partition(version, group_id, slots, lanes)
    assert partition in ring.slot_partitions(version, slots, lanes)
    assert partition % lanes == ring.lane(group_id, lanes)
    assert 0 <= partition < slots * lanes
    assert partition == ring.partition(version + slots, group_id, slots, lanes)


@given(VERSIONS, st.integers(0, 64), LANES)
def test_versions_of_a_window_share_no_partition(version: int, staleness: int, lanes: int) -> None:
    slots = staleness + 2
    used = [
        partition
        for live in range(version, version + slots)
        for partition in ring.slot_partitions(live, slots, lanes)
    ]
    assert sorted(used) == list(range(slots * lanes))


@pytest.mark.parametrize("lanes", [2, 4, 7])
def test_groups_spread_evenly_over_lanes(lanes: int) -> None:
    counts = Counter(ring.lane(ring.train_group_id(ordinal), lanes) for ordinal in range(7000))
    assert set(counts) == set(range(lanes))
    assert max(counts.values()) < 1.1 * min(counts.values())


@given(NAMES, st.integers(2, 64))
def test_no_worker_listens_to_the_journal(worker: str, partitions: int) -> None:
    assert 1 <= ring.worker_partition(worker, partitions) < partitions


@given(NAMES, st.integers(0, 10**6))
def test_trajectory_ids_can_be_read_back(group_id: str, sample: int) -> None:
    assert ring.parse_trajectory_id(ring.trajectory_id(group_id, sample)) == (group_id, sample)


@pytest.mark.parametrize("text", ["", "g1", "/3", "g1/", "g1/x", "g1/-1", "g1/01", "g1/ 1", "g1/²"])
def test_malformed_trajectory_ids_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="trajectory id"):
        ring.parse_trajectory_id(text)


def test_train_and_eval_groups_have_different_ids() -> None:
    assert ring.train_group_id(12) == "g12"
    assert ring.eval_group_id(3, 12) == "e3-12"


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="version"):
        ring.slot(-1, 3)
    with pytest.raises(ValueError, match="ring"):
        ring.slot(1, 0)
    with pytest.raises(ValueError, match="lane"):
        ring.lane("g1", 0)
    with pytest.raises(ValueError, match="lane"):
        ring.slot_partitions(1, 3, 0)
    with pytest.raises(ValueError, match="2 partitions"):
        ring.worker_partition("w", 1)


def announced(version: int, **offsets: int) -> Policy:
    slots = tuple(SlotOffset(f"r.{name}", version, at) for name, at in offsets.items())
    return factories.policy(version, slots=slots)


def test_where_versions_begin_is_read_from_their_announcements() -> None:
    policies = {1: announced(1, chunks=5, steps=9), 2: announced(2, chunks=7)}
    assert ring.version_starts(None) == {}
    assert ring.version_starts(policies[1]) == {("r.chunks", 1): 5, ("r.steps", 1): 9}
    assert ring.version_starts(policies[1], "r.steps") == {("r.steps", 1): 9}
    topic = "r.chunks"
    starts = ring.slot_starts(policies, [0, 1, 2], topic, ring=4, lanes=1, unknown=-2)
    assert starts == {(topic, 0): -2, (topic, 1): 5, (topic, 2): 7}


def test_a_slot_begins_with_the_first_of_its_versions() -> None:
    policies = {0: announced(0, chunks=3), 4: announced(0, chunks=8)}
    topic = "r.chunks"
    assert ring.slot_starts(policies, [4, 0], topic, 4, 1, unknown=0) == {(topic, 0): 3}
