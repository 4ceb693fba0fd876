"""Two trainer ranks, started by DeepSpeed's launcher, against one."""

import torch

from dora.schemas.records import Policy
from dora.weights.store import WeightStore
from dora.weights.tensors import read_tensors
from tests.training_world import World, fed, model, wait_for, world

__all__ = ["model", "world"]

ZERO = {"zero_optimization": {"stage": 2}}


def newest(world: World) -> dict[str, torch.Tensor]:
    policies = [p for p in world.read(world.topics.policies) if isinstance(p, Policy)]
    return read_tensors(WeightStore.of(world.config()).fetch(policies[-1], world.directory))


def test_two_ranks_take_the_same_steps_as_one(world: World) -> None:
    with fed(world):
        process = world.start(world.config(steps=2, ranks=2))
        assert process.wait(180) == 0, world.log.read_text()[-4000:]
    assert [s.version_out for s in world.steps()] == [1, 2]
