"""Rows as an export hands them to a target, made without a log."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from dora.consumers.export.rows import Source, batch_of
from dora.consumers.inspect.rows import Fate
from dora.log.run_log import Placed
from dora.schemas.records import Trajectory
from tests.factories import admission, trajectory


class Broken(Exception):
    """What reading the log raised."""


def group(version: int, ordinal: int, rewards: Sequence[float | None]) -> list[Trajectory]:
    """The trajectories of a group."""
    of = admission(ordinal, version)
    return [trajectory(of, sample, reward=reward) for sample, reward in enumerate(rewards)]


def rows_of(trajectories: Sequence[Trajectory]) -> pa.RecordBatch:
    """A batch of the trained trajectories of one version."""
    placed = [Placed(0, offset, each) for offset, each in enumerate(trajectories)]
    return batch_of(placed, [Fate("trained", each.policy_version + 1, 0) for each in trajectories])


def version_rows(version: int, groups: int = 2) -> Iterator[pa.RecordBatch]:
    """A version of `groups` groups of two trajectories, a batch for each group."""
    for index in range(groups):
        yield rows_of(group(version, 100 * version + index, [0.0, 1.0]))


def broken_rows(version: int) -> Iterator[pa.RecordBatch]:
    """A version of which only the first group can be read."""
    yield from version_rows(version, 1)
    raise Broken(f"offset 7 of version {version}")


def source(version: int, run: str = "r", **fields: object) -> Source:
    """Where the version came from."""
    ranges = {0: (100 * version, 100 * version + 4)}
    made = Source(run, "id", "cluster", f"{run}.trajectories", version, ranges, 2, "0.1.0", 0)
    return replace(made, **fields)  # type: ignore[arg-type]
