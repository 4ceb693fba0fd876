"""Whether the log still holds what a run needs to go on.

Invariant: a trainer that starts has found in the log the whole ledger, the announcements and slots
of the live versions, the journal since the oldest of them, and every trajectory that a redo trains.
Chunks are not among them: without them a takeover starts over, and nothing else is lost.
"""

from dataclasses import dataclass

from dora.bus.offsets import Partition
from dora.bus.reader import LogReader
from dora.bus.topics import RunTopics
from dora.core.ring import JOURNAL, version_starts
from dora.core.window import Window
from dora.errors import RunError
from dora.log.ledger import History

_NAMED = 5


@dataclass(frozen=True, slots=True)
class Need:
    """From `offset` on (or at it alone) a partition is needed, and by whom."""

    partition: Partition
    offset: int
    whose: str


def check_ledger(reader: LogReader, topics: RunTopics) -> None:
    """RunError if the ledger's beginning was deleted: an emptied one looks like a new run."""
    ledger = (topics.steps, 0)
    _check(reader, topics.run, [Need(ledger, 0, "the ledger is read from its first record")])


def check_retention(
    reader: LogReader, topics: RunTopics, history: History, newest: int, window: Window
) -> None:
    """RunError, naming partition, offsets and who needs them, if something is gone that recovery or
    the outstanding groups need.

    `history` is the ledger's, read to its end, and `newest` the version it leads to.
    """
    if history.started is None:
        return
    _check_policies(topics, history, newest, window)
    _check(reader, topics.run, _needs(topics, history, newest, window))


def _needs(topics: RunTopics, history: History, newest: int, window: Window) -> list[Need]:
    oldest = window.oldest_live(newest)
    journal = (topics.dispatch, JOURNAL)
    announced = version_starts(history.policies[oldest])
    needs = [
        Need(journal, announced.get(journal, 0), f"the admissions since version {oldest} are there")
    ]
    for version in range(oldest, newest + 1):
        needs += [
            Need(place, offset, f"the trajectories of live version {version} are there")
            for place, offset in version_starts(
                history.policies[version], topics.trajectories
            ).items()
        ]
    for step in history.redo_after(history.base):
        needs += [
            Need(
                (topics.trajectories, sample.partition),
                sample.offset,
                f"step {step.version_in} -> {step.version_out}, which no checkpoint holds, "
                f"trained group {ref.group_id} from there",
            )
            for ref in step.trained
            for sample in ref.samples
        ]
    return needs


def _check_policies(topics: RunTopics, history: History, newest: int, window: Window) -> None:
    needed = set(range(window.oldest_live(newest), newest + 1))
    if history.base is None:
        needed.add(0)
    missing = sorted(needed - history.policies.keys())
    if missing:
        versions = ", ".join(map(str, missing))
        raise RunError(
            f"{topics.policies} does not announce version {versions} any more, which run "
            f"{topics.run} at version {newest} needs: it was deleted",
            hint="The topic must be compacted, never shortened (cleanup.policy=compact). Restore "
            "it, or give run.name another value.",
        )


def _check(reader: LogReader, run: str, needs: list[Need]) -> None:
    first = reader.start_offsets({need.partition for need in needs})
    gone = [need for need in needs if need.offset < first[need.partition]]
    if not gone:
        return
    gone.sort(key=lambda need: (need.partition, need.offset))
    seen: dict[tuple[Partition, str], Need] = {}
    for need in gone:
        seen.setdefault((need.partition, need.whose), need)
    named = [
        f"{need.partition[0]} partition {need.partition[1]} begins at offset "
        f"{first[need.partition]}, but offset {need.offset} is needed: {need.whose}"
        for need in seen.values()
    ]
    more = f"; and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    raise RunError(
        f"the log of run {run} lacks what it needs to go on: " + "; ".join(named[:_NAMED]) + more,
        hint="Retention deleted it, or somebody did. Restore the topic, or, where a redo needs it, "
        "a later checkpoint; otherwise give run.name another value. kafka.retention_hours must be "
        "longer than checkpoints lie apart and a run may pause; without it everything is kept.",
    )
