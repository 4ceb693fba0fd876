"""A run whose learning rate, loss and other keys change on the way, redone and replayed."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

from dora.bus import ClusterSettings, LogWriter, TopicAdmin
from dora.schemas.records import RunStarted, Step
from tests.factories import status
from tests.small_run import SmallRun, dora, refused
from tests.training_world import World, fed

CHANGES: list[dict[str, Any]] = [
    {"optimizer": {"learning_rate": 1e-3}},
    {
        "optimizer": {"learning_rate": 3e-3, "betas": (0.5, 0.7), "gradient_clip": 1e-2},
        "loss": {"kl_coefficient": 0.1, "clip_low": 0.1},
    },
    {
        "optimizer": {"learning_rate": 2e-3, "schedule": "cosine", "weight_decay": 0.1},
        "loss": {"kind": "gspo", "importance_cap": 2.0},
        "updates_per_step": 2,
        "max_tokens_per_micro_batch": 16,
    },
]


def looked(command: str, world: World, *options: str) -> dict[str, Any]:
    address = world.settings.bootstrap_servers
    result = dora(command, world.name, "-b", str(address), "--json", *options)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_each_step_is_redone_with_the_values_of_its_time(world: World) -> None:
    checkpoints = world.directory / world.name / "checkpoints"
    with fed(world):
        for steps, change in zip((2, 4, 5), CHANGES, strict=True):
            world.train(world.config(steps, checkpoint_every=3, **change))
        shutil.rmtree(next(checkpoints.glob("step-00000003-*")))
        assert not list(checkpoints.iterdir()), "all five steps are redone, bit by bit"
        world.train(world.config(6, checkpoint_every=3, optimizer={"learning_rate": 1e-4}))
    steps = world.steps()
    assert [s.version_out for s in steps] == [1, 2, 3, 4, 5, 6]
    changed = [s.version_out for s in steps if s.settings]
    assert changed == [3, 5, 6], "the entry from which on a value holds has it"
    assert steps[2].settings["trainer.optimizer.learning_rate"] == "0.003"
    assert steps[2].settings["trainer.loss.kl_coefficient"] == "0.1"
    rates = [s.metrics["learning_rate"] for s in steps]
    assert rates[:4] == [1e-3, 1e-3, 3e-3, 3e-3] and rates[5] == 1e-4
    report = looked("replay", world, "--no-checkpoint")
    assert report["identical"] and report["steps"] == 6, report["first_difference"]
    assert looked("replay", world, "--step", "5")["identical"], (
        "from version 4 without a checkpoint"
    )
    other = looked("replay", world, "--step", "4", "--set", "trainer.optimizer.learning_rate=1.0")
    (step,) = [each for each in other["by_step"] if each["asked"]]
    assert step["replayed"]["learning_rate"] == 1.0 != step["recorded"]["learning_rate"]
    assert step["checksum"] != step["recorded_checksum"]
    audit = looked("audit", world, "--no-chunks")
    assert not any(audit["violations"].values()), audit["violations"]


def test_a_key_that_may_not_change_is_refused_and_nothing_is_recorded(world: World) -> None:
    with fed(world):
        world.train(world.emulated(1))
    before = world.read(world.topics.steps)
    address = str(world.settings.bootstrap_servers)
    path = Path(world.directory) / "other.toml"
    config = world.emulated(2).model_dump(mode="json", exclude_defaults=True, exclude={"home"})
    import tomli_w

    config["window"]["max_staleness"] = 2
    path.write_text(tomli_w.dumps({k: v for k, v in config.items() if v}))
    for command in ("coordinator", "train", "rollout"):
        result = dora(command, str(path), "-b", address)
        assert result.exit_code == 1
        said = " ".join(result.stderr.split())
        assert "window.max_staleness: recorded 1, given 2. What stays as it was, and why:" in said
        assert f"dora run CONFIG --from {world.name}@1 --as NEWRUN" in said
    assert world.read(world.topics.steps) == before
    assert isinstance(before[0], RunStarted) and isinstance(before[1], Step)


def test_nothing_is_locked_while_no_step_is_committed(
    small: SmallRun, settings: ClusterSettings
) -> None:
    small.emulate_training()
    small.make_topics(settings)
    refused(small.dora("train", "--set", "trainer.batch_timeout_seconds=0.1"), 1, "no batch became")
    changed = [
        part
        for text in ("window.group_size=4", "window.max_staleness=2", "kafka.lanes=2")
        for part in ("--set", text)
    ]
    small.data.write_text(small.data.read_text() + '{"prompt": "sea", "answer": "aes"}\n')
    refused(
        small.dora("train", *changed),
        1,
        "window.group_size: recorded 2, given 4",
        "dora run CONFIG",
    )
    with TopicAdmin(settings) as admin, LogWriter(settings, client_id="test") as writer:
        before = admin.topic_ids(small.name)
        for state in ("ready", "stopped"):  # first a worker on another machine is at work
            report = status("w7", state, run=small.name, at=int(time.time() * 1000), host="far")
            writer.send(small.topics.workers, report, key="w7")
            writer.flush(30.0)
            result = small.dora("run", "--plain", "--json", *changed)
            if state == "ready":
                refused(result, 1, f"w7 of run {small.name} (host far, pid 0) is at work")
                assert admin.topic_ids(small.name) == before
    assert result.exit_code == 0, result.output
    assert "no step is committed, so the run begins anew: run" in result.stderr
    assert json.loads(result.stdout)["steps"] == 2
    refused(
        small.dora("run", *changed, "--set", "window.group_size=2"),
        1,
        "window.group_size: recorded 4, given 2",
        f"--from {small.name}@2 --as NEWRUN",
    )


def test_a_start_that_is_refused_for_a_property_makes_nothing(
    small: SmallRun, settings: ClusterSettings
) -> None:
    bad = ("-X", "max.poll.interval.ms=6000")
    for command in ("run", "topics create", "train", "coordinator", "rollout"):
        result = dora(*command.split(), str(small.path), "-b", small.address, *bad)
        refused(result, 2, "a Kafka property is not accepted", "max.poll.interval.ms")
    refused(small.dora("run", "--set", f"run.directory={small.data}/runs"), 1, "cannot write to")
    with TopicAdmin(settings) as admin:
        assert admin.existing(small.name) == []
