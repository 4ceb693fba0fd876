"""Which partition a record goes to, where a version begins there, and the names of trajectories.

Within a partition of a version-partitioned topic, versions never interleave. Version `v` owns the
slot `v mod ring` and a slot consists of `lanes` partitions; with `ring >= K + 2` a slot is used
again only after its old version has left the window. All attempts at a trajectory land in one
partition, because group id and version determine it, in every process alike (the hash is CRC-32,
never Python's salted `hash`).
"""

import zlib
from collections.abc import Iterable, Mapping

from dora.schemas.records import Policy

JOURNAL = 0
"""Partition of the dispatch topic that holds the admission journal; the others hold commands."""


def slot(version: int, ring: int) -> int:
    """Slot of a version, 0 .. ring-1. ValueError for a negative version or an empty ring."""
    if ring < 1:
        raise ValueError(f"a ring needs at least 1 slot, not {ring}")
    if version < 0:
        raise ValueError(f"version {version} has no slot: versions start at 0")
    return version % ring


def lane(group_id: str, lanes: int) -> int:
    """Lane of a group, 0 .. lanes-1; the same in every process. ValueError without lanes."""
    if lanes < 1:
        raise ValueError(f"a slot needs at least 1 lane, not {lanes}")
    return zlib.crc32(group_id.encode()) % lanes


def partition(version: int, group_id: str, ring: int, lanes: int) -> int:
    """Partition of a group's records in a topic of `ring * lanes` partitions."""
    return slot(version, ring) * lanes + lane(group_id, lanes)


def slot_partitions(version: int, ring: int, lanes: int) -> range:
    """All partitions of the version's slot."""
    if lanes < 1:
        raise ValueError(f"a slot needs at least 1 lane, not {lanes}")
    first = slot(version, ring) * lanes
    return range(first, first + lanes)


def version_starts(policy: Policy | None, topic: str | None = None) -> dict[tuple[str, int], int]:
    """Where a version begins, by topic and partition, as announced: in `topic` or in all of them.

    Empty if the announcement was not read (None).
    """
    slots = () if policy is None else policy.slots
    return {(s.topic, s.partition): s.offset for s in slots if topic in (None, s.topic)}


def slot_starts(
    policies: Mapping[int, Policy],
    versions: Iterable[int],
    topic: str,
    ring: int,
    lanes: int,
    unknown: int,
) -> dict[tuple[str, int], int]:
    """Where to read `topic` from for all that concerns `versions`: the partitions of their slots.

    The first version counts where several share a slot; `unknown` stands for an offset that was
    not announced.
    """
    starts: dict[tuple[str, int], int] = {}
    for version in versions:
        announced = version_starts(policies.get(version), topic)
        for number in slot_partitions(version, ring, lanes):
            at = announced.get((topic, number), unknown)
            starts[topic, number] = min(at, starts.get((topic, number), at))
    return starts


def worker_partition(worker: str, dispatch_partitions: int) -> int:
    """Partition of a worker's commands; partition 0 is the admission journal.

    ValueError if the dispatch topic has fewer than 2 partitions.
    """
    if dispatch_partitions < 2:
        raise ValueError(
            f"the dispatch topic needs at least 2 partitions (journal and commands), "
            f"not {dispatch_partitions}"
        )
    return 1 + zlib.crc32(worker.encode()) % (dispatch_partitions - 1)


def train_group_id(ordinal: int) -> str:
    """Id of the group of the prompt at `ordinal` in the training stream."""
    return f"g{ordinal}"


def eval_group_id(version: int, ordinal: int) -> str:
    """Id of the group that evaluates `version` on the held-out prompt at `ordinal`."""
    return f"e{version}-{ordinal}"


def trajectory_id(group_id: str, sample: int) -> str:
    """Id of a group's sample."""
    return f"{group_id}/{sample}"


def parse_trajectory_id(trajectory_id: str) -> tuple[str, int]:
    """Group id and sample index; ValueError when malformed."""
    group_id, separator, sample = trajectory_id.rpartition("/")
    if not (separator and group_id and sample.isascii() and sample.isdecimal()):
        raise ValueError(f"{trajectory_id!r} is no trajectory id: it must read <group id>/<sample>")
    if sample != str(int(sample)):
        raise ValueError(f"{trajectory_id!r} is no trajectory id: the sample has leading zeros")
    return group_id, int(sample)
