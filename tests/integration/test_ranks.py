"""Several trainer ranks, started by DeepSpeed's launcher as `dora train` does."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from dora.bus.settings import ClusterSettings
from dora.bus.topics import TopicAdmin, topic_plan
from dora.errors import ExitCode
from dora.schemas.records import Policy
from dora.weights.store import WeightStore
from dora.weights.tensors import read_tensors
from tests.small_run import SmallRun
from tests.training_world import World, fed
from tests.waiting import until

ZERO = "{zero_optimization = {stage = 2}}"
SECONDS = 240.0


def another(world: World, name: str) -> World:
    """A run of its own with the same model and the same groups."""
    other = replace(world, name=f"{world.name}-{name}", directory=world.directory / name)
    TopicAdmin(world.settings).create(topic_plan(other.config()))
    return other


def newest(world: World) -> dict[str, torch.Tensor]:
    """Weights of the newest version."""
    policies = [p for p in world.read(world.topics.policies) if isinstance(p, Policy)]
    return read_tensors(WeightStore.of(world.config()).fetch(policies[-1], world.directory))


def trained(world: World) -> list[list[str]]:
    """The groups of each step."""
    return [[ref.group_id for ref in step.trained] for step in world.steps()]


def finish(world: World, process: "subprocess.Popen[bytes]", code: int = 0) -> None:
    assert process.wait(SECONDS) == code, world.log.read_text()[-6000:]


def pids_in(log: Path) -> dict[int, int]:
    """Process of each rank, the ones started last."""
    found = re.findall(r"rank (\d) of 2, pid (\d+)", log.read_text())
    return {int(rank): int(pid) for rank, pid in found}


def assert_gone(world: World) -> None:
    pids = pids_in(world.log)
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids.values()))


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
    plain = another(world, "plain")
    with fed(plain, most=4):
        process = plain.start(plain.config(steps=4, ranks=2, **options), "--fail-incomplete")
        until(lambda: len(plain.steps()) == 2, "step 2", SECONDS)
        process.send_signal(signal.SIGTERM)
        finish(plain, process, ExitCode.INCOMPLETE)
    assert "stopped between two steps: version 2" in plain.log.read_text()
    assert_gone(plain)
    alike(newest(plain), newest(world))
    assert trained(plain) == trained(world)


def test_a_run_with_two_ranks_survives_the_death_of_one(
    small: SmallRun, settings: ClusterSettings
) -> None:
    """`dora run` from beginning to end. Its supervisor starts the trainer again, which redoes the
    step after the checkpoint; a redo that gave other bits would end it."""
    small.make_topics(settings)
    log = small.directory / "runs" / small.name / "logs" / "trainer.log"
    command = [sys.executable, "-m", "dora", "run", str(small.path), "-b", small.address]
    sets = [
        *("trainer.steps=4", "trainer.ranks=2", "trainer.checkpoint_every=2"),
        *("trainer.max_tokens_per_micro_batch=24", f"trainer.deepspeed={ZERO}"),
    ]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    process = subprocess.Popen(
        [*command, "--plain", *(f"--set={text}" for text in sets)],
        env={k: v for k, v in os.environ.items() if k not in names} | {"OMP_NUM_THREADS": "1"},
        cwd=small.directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until(lambda: log.exists() and "version 3:" in log.read_text(), "version 3", SECONDS)
        # the launcher notices first, and asks the others to stop as for an end in order
        first, second = (psutil.Process(pids_in(log)[rank]) for rank in (0, 1))
        first.suspend()
        second.kill()
        until(
            lambda: not psutil.pid_exists(second.pid) or second.status() == "zombie",
            "the end of the second rank",
            SECONDS,
        )
        first.terminate()
        first.resume()
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        process.terminate()
    assert process.returncode == 0, output + log.read_text()[-4000:]
    text = log.read_text()
    assert re.search(r"rank 1 of 2 \(pid \d+ on .*\) ended without a word", text), text
    assert "1 steps redone from the log" in text
    assert "trainer started again (restart 1)" in output
    assert not any(map(psutil.pid_exists, pids_in(log).values()))
    report = json.loads(small.look("audit", "--json").stdout)
    assert report["steps"] == 4 and not any(report["violations"].values()), report
    assert report["groups_trained"] == 8
