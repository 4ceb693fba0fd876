"""A whole run redone from its log: every version of it, without its checkpoints."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dora.consumers.redo import redo_run
from dora.errors import RunError
from tests.training_world import World, fed, model, world

__all__ = ["model", "world"]

STEPS = 3


def test_every_version_is_redone_bit_by_bit_with_nothing_but_log_and_starting_model(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = world.config(steps=STEPS, checkpoint_every=2)
    # the first group fails, so that the ledger names one that was not trained
    with fed(world, rewards=lambda ordinal, sample: float(sample) if ordinal else None):
        world.train(config)
    assert any(step.set_aside for step in world.steps())
    before = world.steps()
    shutil.rmtree(world.directory)
    monkeypatch.setattr("dora.consumers.redo.STEPS_AT_ONCE", 2)
    told: list[tuple[int, int]] = []
    report = redo_run(config, world.settings, progress=lambda *counts: told.append(counts))
    assert report.identical and report.steps == STEPS
    assert report.checksum == before[-1].weights_checksum
    assert told == [(1, STEPS), (2, STEPS), (3, STEPS)]
    assert report.to_json()["identical"] is True
    assert world.steps() == before and not world.directory.exists(), "nothing was written"


def test_versions_that_come_out_otherwise_are_named(world: World) -> None:
    config = world.config(steps=STEPS)
    with fed(world):
        world.train(config)
    other = world.config(steps=STEPS, optimizer={"learning_rate": 2e-3})
    report = redo_run(other, world.settings)
    announced = [step.weights_checksum for step in world.steps()]
    assert not report.identical
    assert [difference.version for difference in report.differing] == [1, 2, 3]
    assert [difference.announced for difference in report.differing] == announced
    assert report.checksum == report.differing[-1].redone


def test_another_starting_model_shows_from_version_0_on(world: World, tmp_path: Path) -> None:
    with fed(world):
        world.train(world.config(steps=1))
    shutil.copytree(world.model, tmp_path / "other")
    [file] = (tmp_path / "other").glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    config = world.config(steps=1)
    policy = config.policy.model_copy(update={"model": str(tmp_path / "other")})
    report = redo_run(config.model_copy(update={"policy": policy}), world.settings)
    assert [difference.version for difference in report.differing] == [0, 1]


def test_a_run_that_has_not_begun_cannot_be_redone(world: World) -> None:
    with pytest.raises(RunError, match="has not begun"):
        redo_run(world.config(), world.settings)
