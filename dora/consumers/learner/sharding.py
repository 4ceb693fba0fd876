"""How the ranks of a trainer share an optimizer batch.

Invariant: every sample that can have a gradient is in exactly one rank's share, with the weight
that it would have on a single rank, and all ranks make equally many passes (collective operations
need every rank in each). So the sum of the ranks' gradients is the gradient of the whole batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dora.config.trainer import LossSection
from dora.consumers.learner.batches import (
    MicroBatch,
    Sample,
    assemble,
    contributes,
    pack,
    sample_of,
    token_weights,
)
from dora.schemas.records import Trajectory

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward pass of one rank."""

    rows: tuple[int, ...]
    """Samples, by their index in the optimizer batch."""
    idle: bool = False
    """Made without weight, because another rank makes a pass more."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Who does what in one optimizer update."""

    weights: tuple[float, ...]
    """Of each sample's tokens; they hold the denominators of the whole batch."""
    ranks: tuple[tuple[Pass, ...], ...]
    """The passes of each rank, equally many; none if no sample can have a gradient."""

    def rows(self, rank: int) -> list[int]:
        """The samples that a rank needs, in order."""
        return sorted({row for each in self.ranks[rank] for row in each.rows})


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of an optimizer update: its passes, and samples at hand by index."""

    batches: tuple[MicroBatch, ...]
    samples: Mapping[int, Sample]


def plan_update(
    samples: Sequence[Sample],
    settings: LossSection,
    budget: int,
    constant_length: int,
    world: int,
) -> Plan:
    """Share the samples of one optimizer batch among `world` ranks, balanced by tokens.

    Longest first to the rank with the fewest tokens so far (Graham 1969: at most a third above the
    best possible), then cut into passes of at most `budget` tokens. Ties go by index, so that the
    same samples give the same plan.
    """
    weights = token_weights(samples, settings, constant_length)
    chosen = [i for i, s in enumerate(samples) if s.generated and contributes(s, settings)]
    if not chosen:
        return Plan(tuple(weights), ((),) * world)
    lengths = [len(sample.token_ids) for sample in samples]
    shares: list[list[int]] = [[] for _ in range(world)]
    loads = [0] * world
    for index in sorted(chosen, key=lambda i: (-lengths[i], i)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    passes = [
        [
            Pass(tuple(share[i] for i in batch))
            for batch in pack([lengths[i] for i in share], budget)
        ]
        for share in map(sorted, shares)
    ]
    most = max(map(len, passes))
    for share, own in zip(shares, passes, strict=True):
        shortest = min(share or chosen, key=lambda i: (lengths[i], i))
        own += [Pass((shortest,), idle=True)] * (most - len(own))
    return Plan(tuple(weights), tuple(map(tuple, passes)))


def part_of(
    passes: Sequence[Pass],
    samples: Sequence[Sample] | Mapping[int, Sample],
    weights: Sequence[float] | Mapping[int, float],
) -> Part:
    """The micro-batches of one rank's passes."""
    batches = tuple(
        assemble(samples, each.rows, dict.fromkeys(each.rows, 0.0) if each.idle else weights)
        for each in passes
    )
    known = samples if isinstance(samples, Mapping) else dict(enumerate(samples))
    return Part(batches, known)


def describe_share(
    plan: Plan, rank: int, samples: Sequence[Sample], places: Sequence[Place]
) -> dict[str, Any]:
    """What another rank needs to do its part, as JSON: places in the trajectories topic,
    advantages, weights and passes."""
    return {
        "samples": [
            [row, *places[row], samples[row].advantage, plan.weights[row]]
            for row in plan.rows(rank)
        ],
        "passes": [[list(each.rows), each.idle] for each in plan.ranks[rank]],
    }


def share_places(share: Mapping[str, Any]) -> list[Place]:
    """The places that a described share names."""
    return [(int(partition), int(offset)) for _, partition, offset, _, _ in share["samples"]]


def part_of_share(share: Mapping[str, Any], found: Mapping[Place, Trajectory]) -> Part:
    """This rank's part, from what rank 0 described and the trajectories at the named places."""
    samples = {
        int(row): sample_of(found[int(partition), int(offset)], float(advantage))
        for row, partition, offset, advantage, _ in share["samples"]
    }
    weights = {int(row): float(weight) for row, _, _, _, weight in share["samples"]}
    passes = [Pass(tuple(map(int, rows)), bool(idle)) for rows, idle in share["passes"]]
    return part_of(passes, samples, weights)
