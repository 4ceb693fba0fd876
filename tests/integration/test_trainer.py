"""The trainer on a real Kafka with real DeepSpeed; a thread plays coordinator and workers."""

import shutil
from pathlib import Path

import pytest

from dora.errors import DeadlineError, PolicyError
from dora.schemas.records import Policy, RunStarted
from dora.weights.store import WeightStore
from dora.weights.tensors import read_tensors, weights_checksum
from tests.training_world import K, World, fed


def test_steps_are_committed_with_their_policies_and_a_restart_goes_on(world: World) -> None:
    with fed(world):
        world.train(world.config(steps=3))
        world.train(world.config(steps=5))
    records = world.read(world.topics.steps)
    started, steps = records[0], world.steps()
    assert isinstance(started, RunStarted) and len(records) == 6
    assert [(s.version_in, s.version_out) for s in steps] == [(v, v + 1) for v in range(5)]
    assert [s.sequence for s in steps] == list(range(5))
    trained = [ref for step in steps for ref in step.trained]
    assert [ref.group_id for ref in trained] == [f"g{i}" for i in range(10)]
    assert all(0 <= s.version_in - r.version <= K for s in steps for r in s.trained)
    assert steps[0].metrics["tokens"] > 0 and steps[0].metrics["reward_mean"] == 0.5
    assert {"idle_seconds", "train_seconds", "live_versions", "loss"} <= steps[0].metrics.keys()
    policies = [p for p in world.read(world.topics.policies) if isinstance(p, Policy)]
    assert [p.version for p in policies] == list(range(6))
    assert [p.weights_checksum for p in policies[1:]] == [s.weights_checksum for s in steps]
    assert len({p.weights_checksum for p in policies}) == 6
    store = WeightStore.of(world.config())
    assert len(store.versions()) == 4  # the window's two and weights.keep = 2
    newest = store.fetch(policies[-1], world.directory)
    assert weights_checksum(read_tensors(newest)) == policies[-1].weights_checksum
    checkpoints = world.directory / world.name / "checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == [s.checkpoint for s in steps[-2:]]


def test_steps_without_a_checkpoint_are_redone_bit_identically_and_orphans_removed(
    world: World,
) -> None:
    with fed(world):
        world.train(world.config(steps=3))
        runs = world.directory / world.name
        shutil.rmtree(runs / "checkpoints")
        orphans = [
            runs / "weights" / "v00000004-0123456789abcdef",
            runs / "checkpoints" / "step-00000004-0123456789abcdef",
        ]
        for orphan in orphans:
            orphan.mkdir(parents=True)
        world.train(world.config(steps=4))
    assert not any(orphan.exists() for orphan in orphans)
    assert [s.version_out for s in world.steps()] == [1, 2, 3, 4]
    # The same run without an interruption ends with the same weights, if it saw the same groups.
    expected = world.steps()[-1].weights_checksum
    shutil.rmtree(world.directory / world.name / "checkpoints")
    with fed(world):
        world.train(world.config(steps=5))
    assert world.steps()[3].weights_checksum == expected


def test_groups_that_fail_or_give_no_signal_are_set_aside_and_do_not_jam_the_window(
    world: World,
) -> None:
    def rewards(ordinal: int, sample: int) -> float | None:
        if ordinal < 4:
            return None if sample else 1.0
        return 1.0 if ordinal < 8 else float(sample)

    with fed(world, rewards):
        world.train(world.config(steps=1, loss={"drop_no_signal": True}))
    aside = [ref for step in world.steps() for ref in step.set_aside]
    assert [ref.group_id for ref in aside] == [f"g{i}" for i in range(8)]
    assert [ref.reason for ref in aside] == ["verifier timed out"] * 4 + ["no_signal"] * 4
    assert [ref.group_id for ref in world.steps()[-1].trained] == ["g8", "g9"]
    assert world.steps()[0].kind == "set_aside"


def test_a_batch_that_does_not_come_ends_in_a_message_that_says_what_is_missing(
    world: World,
) -> None:
    with (
        fed(world, most=1),
        pytest.raises(DeadlineError, match=r"1 of 2 groups finished .*version 0: 1 groups"),
    ):
        world.train(world.config(steps=1, batch_timeout_seconds=2.0))


def test_the_message_of_a_batch_that_does_not_come_has_the_commonest_reason(world: World) -> None:
    said = r"groups set aside since, (\d+) of \1 because of: verifier timed out"
    with fed(world, lambda *_: None), pytest.raises(DeadlineError, match=said):
        world.train(world.emulated(1, batch_timeout_seconds=2.0, max_set_aside_in_row=0))


def test_a_learning_rate_that_makes_no_numbers_ends_the_run_with_the_step_and_what_to_do(
    world: World,
) -> None:
    with fed(world), pytest.raises(PolicyError, match=r"diverged in step [12]: ") as ended:
        world.train(world.config(steps=3, optimizer={"learning_rate": 1e30}))
    assert "trainer.optimizer.learning_rate" in str(ended.value)
    assert ended.value.permanent, "a restart would not help"
    assert [step for step in world.steps() if step.kind == "step"] == []


def test_a_complete_run_ends_at_once_without_its_model(world: World, tmp_path: Path) -> None:
    copy = shutil.copytree(world.model, tmp_path / "copy")
    moved = World(world.settings, world.name, copy, world.directory)
    with fed(world):
        moved.train(moved.config(steps=1))
    shutil.rmtree(copy)
    moved.train(moved.config(steps=1))
    assert len(world.steps()) == 1
