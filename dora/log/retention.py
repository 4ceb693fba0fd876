"""Whether the log still holds what a run needs to go on, or a replay to train again.

A trainer needs the whole ledger, the announcements and slots of the live versions, the journal
since the oldest of them, and every trajectory that a redo trains. It does not need chunks: without
them a takeover starts over, and nothing else is lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dora.bus.offsets import Partition
from dora.bus.reader import LogReader
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.core.ring import JOURNAL, version_starts
from dora.core.window import Window
from dora.errors import RunError
from dora.log.ledger import History
from dora.log.run_log import RunLog
from dora.schemas.records import Step

_NAMED = 5


@dataclass(frozen=True, slots=True)
class Need:
    """A partition is needed from `offset` on, or at it alone, for the reason `whose`."""

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
        hint="It was deleted, by retention or hand. Restore the topic, or, where a redo needs it, "
        "a later checkpoint; otherwise give run.name another value. kafka.retention_hours must be "
        "longer than checkpoints lie apart and a run may pause; without it everything is kept.",
    )


def span(numbers: Sequence[int]) -> str:
    """First and last of ordered numbers, for people."""
    if numbers[0] == numbers[-1]:
        return str(numbers[0])
    return f"{numbers[0]} to {numbers[-1]}"


def gone(
    steps: Sequence[Step], begins: Mapping[int, int]
) -> dict[int, tuple[list[int], list[int]]]:
    """By partition, the offsets that `steps` trained and that lie before its beginning, and the
    steps that trained them."""
    missing: dict[int, tuple[set[int], set[int]]] = {}
    for step in steps:
        for ref in step.trained:
            for sample in ref.samples:
                if sample.offset < begins.get(sample.partition, 0):
                    offsets, numbers = missing.setdefault(sample.partition, (set(), set()))
                    offsets.add(sample.offset)
                    numbers.add(step.version_out)
    return {number: (sorted(o), sorted(s)) for number, (o, s) in missing.items()}


def deleted(run: RunLog, settings: ClusterSettings, steps: Sequence[Step]) -> tuple[str, list[int]]:
    """What retention deleted of the trajectories that `steps` trained, in words, and the steps that
    trained them; empty if all are there."""
    topic = run.topics.trajectories
    partitions = {(topic, s.partition) for step in steps for r in step.trained for s in r.samples}
    with LogReader(settings, client_id=f"{run.run}.replay") as reader:
        begins = {number: at for (_, number), at in reader.start_offsets(partitions).items()}
    missing = gone(steps, begins)
    named = "; ".join(
        f"{topic} partition {number} begins at offset {begins[number]}, but {span(offsets)} "
        f"{'is' if len(offsets) == 1 else 'are'} needed (step{'s' * (len(by) > 1)} {span(by)})"
        for number, (offsets, by) in sorted(missing.items())
    )
    return named, sorted({number for _, by in missing.values() for number in by})
