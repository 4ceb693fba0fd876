"""Several trainer ranks, started by DeepSpeed's launcher as `dora train` does."""

import re
import signal
import subprocess
from dataclasses import replace
from typing import Any

import psutil
import torch

from dora.bus.topics import TopicAdmin, topic_plan
from dora.config import Config
from dora.schemas.records import Policy
from dora.weights.store import WeightStore
from dora.weights.tensors import read_tensors
from tests.training_world import World, fed, model, wait_for, world

__all__ = ["model", "world"]

ZERO = {"zero_optimization": {"stage": 2}}
SECONDS = 240.0


def another(world: World, name: str) -> World:
    """A run of its own with the same model and the same groups."""
    other = replace(world, name=f"{world.name}-{name}", directory=world.directory / name)
    TopicAdmin(world.settings).create(topic_plan(other.config()))
    return other


def newest(world: World) -> tuple[str, dict[str, torch.Tensor]]:
    """Checksum and weights of the newest version."""
    policies = [p for p in world.read(world.topics.policies) if isinstance(p, Policy)]
    weights = read_tensors(WeightStore.of(world.config()).fetch(policies[-1], world.directory))
    return policies[-1].weights_checksum, weights


def finish(world: World, process: "subprocess.Popen[bytes]", code: int = 0) -> None:
    assert process.wait(SECONDS) == code, world.log.read_text()[-6000:]


def rank_pids(world: World) -> dict[int, int]:
    """Process of each rank, the ones started last."""
    said = world.log.read_text() if world.log.exists() else ""
    found = re.findall(r"rank (\d) of 2, pid (\d+)", said)
    return {int(rank): int(pid) for rank, pid in found}


def assert_gone(world: World) -> None:
    pids = rank_pids(world)
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids.values()))


def named(config: Config, world: World) -> Config:
    """The same configuration for another run."""
    run = config.run.model_copy(update={"name": world.name, "directory": world.directory})
    return config.model_copy(update={"run": run})


def alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Adam's first updates are lr * sign(g) where |g| >> eps: compared where it is."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        close = torch.isclose(found[name], tensor, atol=5e-5)
        assert close.float().mean() > 0.99, name


def test_two_ranks_train_what_one_trains_and_end_when_asked_to(world: World) -> None:
    options: dict[str, Any] = {"checkpoint_every": 2, "max_tokens_per_micro_batch": 24}
    with fed(world):
        world.train(world.config(steps=2, **options))
        after_two = newest(world)
        world.train(world.config(steps=4, **options))
    plain = another(world, "plain")
    with fed(plain, most=4):
        process = plain.start(plain.config(steps=4, ranks=2, **options))
        wait_for(lambda: len(plain.steps()) == 2, SECONDS)
        process.send_signal(signal.SIGTERM)
        finish(plain, process)
    assert "stopped between two steps: version 2" in plain.log.read_text()
    assert_gone(plain)
    alike(newest(plain)[1], after_two[1])
    assert [s.trained for s in plain.steps()] == [s.trained for s in world.steps()][:2]


def test_a_killed_rank_ends_all_and_the_redo_is_bit_identical(world: World) -> None:
    options: dict[str, Any] = {"checkpoint_every": 2, "max_tokens_per_micro_batch": 24}
    with fed(world):
        world.train(world.config(steps=4, **options))
    config = world.config(steps=4, ranks=2, deepspeed=ZERO, **options)
    whole = another(world, "whole")
    with fed(whole):
        finish(whole, whole.start(named(config, whole)))
    alike(newest(whole)[1], newest(world)[1])
    killed = another(world, "killed")
    with fed(killed, most=6):
        process = killed.start(named(config, killed))
        wait_for(lambda: len(killed.steps()) == 3, SECONDS)
        psutil.Process(rank_pids(killed)[1]).kill()
        finish(killed, process, 1)
    assert re.search(r"rank 1 of 2 \(pid \d+ on .*\) ended without a word", killed.log.read_text())
    assert_gone(killed)
    with fed(killed):
        finish(killed, killed.start(named(config, killed)))
    assert "1 steps redone from the log" in killed.log.read_text()
    assert newest(killed)[0] == newest(whole)[0]
