"""Runs that begin with a step of another run, its optimizer included."""

import json
import shutil
import threading
from dataclasses import replace
from typing import Any

import pytest

from dora.bus import ClusterSettings, TopicAdmin
from dora.bus.topics import topic_plan
from dora.config import Config
from dora.config.loading import load_config
from dora.consumers.trainer.origin import Origin, find_origin
from dora.consumers.trainer.trainer import Trainer
from dora.errors import RunError
from dora.schemas.records import Policy, RunStarted
from dora.weights.store import WeightStore
from tests.integration.test_changed_settings import looked
from tests.small_run import SmallRun, dora, refused
from tests.training_world import World, fed


def new_run(world: World, name: str) -> World:
    other = replace(world, name=f"{world.name}-{name}")
    with TopicAdmin(world.settings) as admin:
        admin.create(topic_plan(other.config()))
    return other


def begin(world: World, config: Config, origin: Origin) -> None:
    """Train the run of `config` from `origin`, as `dora train --from` does."""
    start = find_origin(config, world.settings, origin)
    with fed(world):
        Trainer(config, world.settings, None, start).run(threading.Event())


def version_0(world: World) -> Policy:
    return next(r for r in world.read(world.topics.policies) if isinstance(r, Policy))


def test_a_run_begins_with_the_weights_and_the_optimizer_of_a_step_of_another(
    world: World,
) -> None:
    made = World.config
    with fed(world):
        for steps, rate in ((1, 1e-3), (3, 4e-3)):
            world.train(made(world, steps, checkpoint_every=2, optimizer={"learning_rate": rate}))
    old = world.steps()
    origin = Origin(world.name, 2)
    checkpoint = world.directory / world.name / "checkpoints" / str(old[1].checkpoint)
    kept, redone = new_run(world, "kept"), new_run(world, "redone")
    begin(kept, made(kept, 1), origin)
    shutil.rmtree(checkpoint)
    begin(redone, made(redone, 1), origin)
    for run in (kept, redone):
        started = run.read(run.topics.steps)[0]
        assert isinstance(started, RunStarted) and started.origin == str(origin)
        assert version_0(run).weights_checksum == old[1].weights_checksum
    (first,), (same,) = kept.steps(), redone.steps()
    assert first.weights_checksum == same.weights_checksum, "by checkpoint or by redo: all of it"
    fresh = new_run(world, "fresh")
    policies = [r for r in world.read(world.topics.policies) if isinstance(r, Policy)]
    config = made(fresh, 1)
    stored = WeightStore.of(made(world, 3)).fetch(policies[2], world.directory / "cache")
    policy = config.policy.model_copy(update={"model": str(stored)})
    alone = config.model_copy(update={"policy": policy})
    with fed(fresh):
        fresh.train(alone)
    assert version_0(fresh).weights_checksum == old[1].weights_checksum
    assert fresh.steps()[0].weights_checksum != first.weights_checksum, "Adam's moments"
    # the new run's own checkpoint is gone: it is redone from what it began with
    shutil.rmtree(next((kept.directory / kept.name / "checkpoints").glob("step-00000001-*")))
    with fed(kept):
        kept.train(made(kept, 2))
    assert [step.version_out for step in kept.steps()] == [1, 2]
    assert looked("replay", kept, "--no-checkpoint")["identical"]
    assert not any(looked("audit", kept, "--no-chunks")["violations"].values())
    begin(kept, made(kept, 3), origin)
    with pytest.raises(RunError, match=f"began from {origin} already, not from"):
        begin(kept, made(kept, 4), Origin(world.name, 3))
    other = made(new_run(world, "other"), 1)
    policy = other.policy.model_copy(update={"dtype": "bfloat16"})
    halved = other.model_copy(update={"policy": policy})
    with pytest.raises(RunError, match=r"policy\.dtype: recorded 'float32', given 'bfloat16'"):
        find_origin(halved, world.settings, origin)


def test_dora_run_begins_a_new_run_from_a_step(small: SmallRun, settings: ClusterSettings) -> None:
    small.emulate_training()
    new = f"{small.name}-new"

    def run(*options: str) -> Any:
        return small.dora("run", "--plain", "--json", *options)

    assert run().exit_code == 0
    refused(run("--from", f"{small.name}@9", "--as", new), 1, "has no version 9")
    refused(run("--from", "no-such-run@1", "--as", new), 1, "has no run no-such-run")
    refused(run("--from", small.name, "--as", new), 2, "not of the form RUN@STEP")
    refused(run("--from", f"{small.name}@1"), 2, "--as NEWRUN")
    refused(run("--as", new), 2, "--from")
    refused(run("--from", f"{small.name}@1", "--as", "New Run"), 2, "--as New Run")
    with TopicAdmin(settings) as admin:
        assert admin.existing(new) == [], "a refused start makes nothing"
    address = ("-b", small.address)
    refused(dora("run", *address), 2, "no configuration file is named")
    changed = ("--set", "window.max_staleness=2", "--set", "window.group_size=4")
    begun = (
        "run",
        "--from",
        f"{small.name}@1",
        "--as",
        new,
        *changed,
        *address,
        "--plain",
        "--json",
    )
    result = dora(*begun)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == 2
    written = small.directory / f"{new}.toml"
    assert f"wrote {written}, with what {small.name}@1 was trained with" in result.stderr
    config = load_config(written)
    assert (config.trainer, config.window.group_size) == (small.config().trainer, 4)
    refused(dora(*begun), 2, f"{written}: File exists", "dora run CONFIG --from")
    report = dora("replay", new, *address, "--json", "--no-checkpoint")
    assert json.loads(report.stdout)["identical"], report.output
