"""The trajectories that committed steps trained, fetched from where they lie in the log."""

import time
from collections.abc import Iterable

from dora.bus.reader import LogReader, Unreadable
from dora.errors import DeadlineError, RunError
from dora.schemas.records import GroupRef, Step, Trajectory

Place = tuple[int, int]
"""Partition and offset in the trajectories topic."""

FAR = 500
"""Records that are read past rather than skipped with a new request."""


def fetch_trajectories(
    reader: LogReader, topic: str, places: Iterable[Place], deadline: float
) -> dict[Place, Trajectory]:
    """The trajectories at the given (partition, offset) places.

    `reader` is used for nothing else. Raises RunError if a place holds something else, BusError if
    retention deleted it, DeadlineError (seconds) if the cluster does not deliver it.
    """
    wanted: dict[int, set[int]] = {}
    for partition, offset in places:
        wanted.setdefault(partition, set()).add(offset)
    found: dict[Place, Trajectory] = {}
    until = time.monotonic() + deadline
    reader.assign({(topic, partition): min(offsets) for partition, offsets in wanted.items()})
    while wanted:
        for message in reader.poll(timeout=0.5):
            missing = wanted.get(message.partition)
            if missing is None:
                continue
            if message.offset in missing:
                if not isinstance(message.value, Trajectory):
                    what = (
                        f"cannot be read ({message.value.reason})"
                        if isinstance(message.value, Unreadable)
                        else f"holds a {type(message.value).__name__}"
                    )
                    raise RunError(f"{message.place}, which the ledger trained, {what}")
                found[message.partition, message.offset] = message.value
                missing.discard(message.offset)
            if missing and message.offset > min(missing):
                raise RunError(
                    f"{topic} partition {message.partition} has no record at offset "
                    f"{min(missing)}, which the ledger trained"
                )
            if not missing:
                del wanted[message.partition]
            elif min(missing) - message.offset > FAR:
                reader.assign({(topic, message.partition): min(missing)})
        if wanted and time.monotonic() > until:
            partition, offsets = next(iter(wanted.items()))
            raise DeadlineError(
                f"{topic} partition {partition} offset {min(offsets)} did not arrive in "
                f"{deadline:g} s"
            )
    return found


def fetch_steps(
    reader: LogReader, topic: str, steps: Iterable[Step], deadline: float
) -> dict[Place, Trajectory]:
    """The trajectories that `steps` trained; raises what `fetch_trajectories` raises."""
    groups = [group for step in steps for group in places_of(step.trained)]
    return fetch_trajectories(reader, topic, [p for group in groups for p in group], deadline)


def places_of(refs: Iterable[GroupRef]) -> list[list[Place]]:
    """Where the samples of each group lie, in the order in which they are trained."""
    return [[(sample.partition, sample.offset) for sample in ref.samples] for ref in refs]
