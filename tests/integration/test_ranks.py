"""Several trainer ranks, started by DeepSpeed's launcher as `dora train` does."""

import re
import signal
import subprocess
from dataclasses import replace
from typing import Any

import psutil
import torch

from dora.bus.topics import TopicAdmin, topic_plan
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


def alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Adam's first updates are lr * sign(g) where |g| >> eps: compared where it is."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        close = torch.isclose(found[name], tensor, atol=5e-5)
        assert close.float().mean() > 0.99, name


def test_two_ranks_train_what_one_trains_and_a_killed_one_changes_nothing(world: World) -> None:
    options: dict[str, Any] = {"checkpoint_every": 2, "max_tokens_per_micro_batch": 24}
    with fed(world):
        world.train(world.config(steps=4, **options))
    checksums, weights = {}, {}
    for name, zero in (("plain", {}), ("zero", ZERO)):
        run = another(world, name)
        with fed(run):
            finish(run, run.start(run.config(steps=4, ranks=2, deepspeed=zero, **options)))
        checksums[name], weights[name] = newest(run)
        alike(weights[name], newest(world)[1])
        assert [s.trained for s in run.steps()] == [s.trained for s in world.steps()]
    killed = another(world, "killed")
    config = killed.config(steps=4, ranks=2, deepspeed=ZERO, **options)
    with fed(killed, most=6):
        process = killed.start(config)
        wait_for(lambda: len(killed.steps()) == 3, SECONDS)
        psutil.Process(rank_pids(killed)[1]).kill()
        finish(killed, process, 1)
    assert re.search(r"rank 1 of 2 \(pid \d+ on .*\) ended without a word", killed.log.read_text())
    assert not any(psutil.pid_exists(pid) for pid in rank_pids(killed).values())
    with fed(killed):
        finish(killed, killed.start(config))
    assert "1 steps redone from the log" in killed.log.read_text()
    assert newest(killed)[0] == checksums["zero"]


def test_ranks_end_between_two_steps_when_asked_to(world: World) -> None:
    with fed(world, most=2):
        process = world.start(world.config(steps=3, ranks=2))
        wait_for(lambda: len(world.steps()) == 1, SECONDS)
        process.send_signal(signal.SIGTERM)
        finish(world, process)
    assert len(world.steps()) == 1 and "stopped between two steps" in world.log.read_text()
    assert not any(psutil.pid_exists(pid) for pid in rank_pids(world).values())
