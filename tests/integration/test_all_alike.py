"""A run in which every group fails alike says why, and stops."""

from dora.bus import ClusterSettings
from dora.schemas.records import Step
from tests.integration.test_fencing import world_of
from tests.processes import process, until
from tests.small_run import SmallRun, small, small_model
from tests.training_world import fed

__all__ = ["small", "small_model"]


def test_a_trainer_that_only_sets_aside_stops_with_the_commonest_reason(
    small: SmallRun, settings: ClusterSettings
) -> None:
    small.emulate_training()
    world = world_of(small, settings)
    sets = ("--set", "trainer.max_set_aside_in_row=6")
    with process(small, "trainer", "train", *sets) as trainer, fed(world, lambda *_: None):
        until(lambda: trainer.code is not None, "the trainer to stop", trainer)
    assert trainer.code == 1, trainer.said
    assert "groups in a row were set aside and none was trained" in trainer.said
    assert "because of:" in trainer.said and "trainer.max_set_aside_in_row" in trainer.said
    entries = [entry for entry in world.read(world.topics.steps) if isinstance(entry, Step)]
    assert sum(len(entry.set_aside) for entry in entries) >= 6


def test_a_run_without_any_signal_ends_by_itself_and_is_not_started_again(small: SmallRun) -> None:
    small.emulate_training()
    sets = (
        "trainer.steps=50", "trainer.loss.drop_no_signal=true", "trainer.max_set_aside_in_row=8",
        "rollout.workers=1", "rollout.emulated.success_rate=0.0",
    )  # fmt: skip
    options = [part for each in sets for part in ("--set", each)]
    with process(small, "run", "run", "--plain", *options) as run:
        until(lambda: run.code is not None, "the run to end", run)
    assert run.code == 1, run.said
    assert "because of: no_signal" in run.said and "drop_no_signal = false" in run.said
    assert "started again" not in run.said, run.said
