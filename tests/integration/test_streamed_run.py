"""A streamed trainer on a real Kafka with real DeepSpeed; a thread plays the rest of the run."""

import shutil
import threading

from dora.consumers.trainer.trainer import Trainer
from dora.schemas.records import Status
from tests.training_world import K, World, fed
from tests.waiting import until


def rewards(ordinal: int, sample: int) -> float | None:
    """Some groups have no signal, and one fails."""
    if ordinal == 3:
        return None
    return 1.0 if ordinal % 4 == 1 else float(sample)


def test_a_streamed_run_sets_groups_aside_and_is_redone_bit_identically(world: World) -> None:
    settings = {"streamed": True, "updates_per_step": 2, "loss": {"drop_no_signal": True}}
    with fed(world, rewards):
        world.train(world.config(steps=3, **settings))
        shutil.rmtree(world.directory / world.name / "checkpoints")
        world.train(world.config(steps=4, **settings))
    entries = world.steps()
    steps = [entry for entry in entries if entry.kind == "step"]
    assert [step.version_out for step in steps] == [1, 2, 3, 4]
    trained = [ref for step in steps for ref in step.trained]
    assert len({ref.group_id for ref in trained}) == 8
    assert all(ref.ordinal % 4 != 1 and ref.ordinal != 3 for ref in trained)
    assert all(0 <= step.version_in - ref.version <= K for step in steps for ref in step.trained)
    aside = {ref.group_id: ref.reason for entry in entries for ref in entry.set_aside}
    assert aside["g1"] == "no_signal" and aside["g3"] == "verifier timed out"
    for metrics in (step.metrics for step in steps):
        assert 0 < metrics["streamed_seconds"] <= metrics["train_seconds"]
        assert metrics["idle_seconds"] >= 0
        parts = metrics["idle_seconds"] + metrics["train_seconds"] + metrics["publish_seconds"]
        assert abs(parts - metrics["step_seconds"]) < 1e-6
    assert steps[-1].metrics["optimizer_updates"] == 2


def test_a_streamed_step_that_is_stopped_half_way_changes_nothing(world: World) -> None:
    settings = world.config(steps=1, streamed=True)
    stop = threading.Event()
    trainer = Trainer(settings, world.settings)
    thread = threading.Thread(target=trainer.run, args=(stop,))
    with fed(world, most=1):
        thread.start()

        def taken() -> bool:
            statuses = [s for s in world.read(world.topics.workers) if isinstance(s, Status)]
            return any("1 of 2 groups finished" in s.message for s in statuses)

        until(taken, "what was taken", 60)
        stop.set()
        thread.join(60.0)
    assert not thread.is_alive()
    assert world.steps() == []
    with fed(world):
        world.train(settings)
    (step,) = world.steps()
    assert [ref.group_id for ref in step.trained] == ["g0", "g1"]
