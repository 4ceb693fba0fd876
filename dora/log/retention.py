"""Whether the log still holds the trajectories that committed steps trained."""

from collections.abc import Mapping, Sequence

from dora.bus.reader import LogReader
from dora.bus.settings import ClusterSettings
from dora.log.run_log import RunLog
from dora.schemas.records import (
    Step,
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
