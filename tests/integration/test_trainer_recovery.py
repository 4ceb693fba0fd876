"""What the trainer does after it was killed at any point, and with what it finds on disk."""

import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora.bus.topics import TopicAdmin, topic_plan
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.errors import RunError
from dora.schemas.records import Policy, Status, Step
from dora.weights.store import WeightStore
from tests import factories
from tests.training_world import K, World, fed
from tests.waiting import until

KILLS = [
    "trainer.weights_stored:kill:1",  # of version 0
    "trainer.inside_transaction:kill:2",  # the run's begin, then the first step
    "trainer.checkpoint_stored:kill:1",
    "trainer.before_transaction:kill:2",
    "trainer.after_transaction:kill:1",
]


def another(world: World, name: str) -> World:
    """A run of its own with the same model and the same groups."""
    other = replace(world, name=f"{world.name}-{name}", directory=world.directory / name)
    TopicAdmin(world.settings).create(topic_plan(other.config()))
    return other


def checkpoints(world: World) -> Path:
    return world.directory / world.name / "checkpoints"


def trained(steps: list[Step]) -> list[str]:
    return [ref.group_id for step in steps for ref in step.trained]


def test_a_kill_at_every_point_of_the_commit_changes_nothing(world: World) -> None:
    config = world.emulated(4, checkpoint_every=2)
    with fed(world):
        for fault in KILLS:
            process = world.start(config, fault=fault)
            assert process.wait(120) == -signal.SIGKILL, world.log.read_text()[-4000:]
            assert f"fault: kill at {fault.partition(':')[0]}" in world.log.read_text()
        world.train(config)
    steps = world.steps()
    assert [s.version_out for s in steps] == [1, 2, 3, 4]
    assert trained(steps) == [f"g{i}" for i in range(8)], "each exactly once, in order"
    undisturbed = another(world, "undisturbed")
    with fed(undisturbed):
        undisturbed.train(undisturbed.emulated(4, checkpoint_every=2))
    assert [s.weights_checksum for s in steps] == [s.weights_checksum for s in undisturbed.steps()]
    store = WeightStore.of(config)
    assert len(store.versions()) == 4 and not list(Path(world.directory).rglob(".unfinished-*"))
    assert sorted(p.name for p in checkpoints(world).iterdir()) == [
        s.checkpoint for s in steps if s.checkpoint
    ]


def test_the_data_cursor_ahead_of_the_trained_frontier_after_resume_skips_nothing(
    world: World,
) -> None:
    from confluent_kafka import Consumer, TopicPartition

    with fed(world, most=4):
        world.train(world.config(steps=1))
    consumer = Consumer(
        {
            "bootstrap.servers": world.settings.bootstrap_servers,
            "group.id": f"{world.name}.trainer",
        }
    )
    places = [
        TopicPartition(topic, partition)
        for topic, count in ((world.topics.trajectories, K + 2), (world.topics.dispatch, 1))
        for partition in range(count)
    ]
    for place in places:
        place.offset = consumer.get_watermark_offsets(place, timeout=10.0)[1]
    consumer.commit(offsets=places, asynchronous=False)
    consumer.close()
    world.train(world.config(steps=2))
    assert trained(world.steps()) == ["g0", "g1", "g2", "g3"]


def test_a_batch_finished_but_not_yet_consumed_at_the_crash_is_trained_exactly_once(
    world: World,
) -> None:
    with fed(world, most=4):
        world.train(world.config(steps=1))
    assert trained(world.steps()) == ["g0", "g1"]
    world.train(world.config(steps=2))  # nobody generates: g2 and g3 come from the log alone
    assert trained(world.steps()) == ["g0", "g1", "g2", "g3"]


def test_the_checkpoint_still_being_written_when_resume_looks_is_not_loaded(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with fed(world):
        world.train(world.config(steps=3))
        newest = sorted(checkpoints(world).iterdir())[-1]
        unfinished = newest.with_name(f".unfinished-{newest.name}-01234567")
        newest.rename(unfinished)
        (unfinished / "manifest.json").unlink()
        with caplog.at_level("INFO"):
            world.train(world.config(steps=4))
    assert "recovered version 3 from checkpoint step-00000002-" in caplog.text
    assert "1 steps redone" in caplog.text
    assert not unfinished.exists()
    assert [s.version_out for s in world.steps()] == [1, 2, 3, 4]


def test_damaged_checkpoints_are_passed_over_as_long_as_the_log_can_make_up_for_them(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def damage(checkpoint: Path) -> None:
        states = next(checkpoint.rglob("*model_states.pt"))
        data = bytearray(states.read_bytes())
        data[len(data) // 2] ^= 1
        states.write_bytes(data)

    with fed(world):
        world.train(world.config(steps=3))
        older, newer = sorted(checkpoints(world).iterdir())
        damage(newer)
        with caplog.at_level("INFO"):
            world.train(world.config(steps=4))
        assert f"checkpoint {newer.name} is damaged" in caplog.text
        assert f"recovered version 3 from checkpoint {older.name}, 1 steps redone" in caplog.text
        assert not newer.exists()
        for checkpoint in checkpoints(world).iterdir():
            damage(checkpoint)
        caplog.clear()
        with caplog.at_level("INFO"):
            world.train(world.config(steps=5))
    assert "no checkpoint is left: redoing the run from version 0" in caplog.text
    assert "recovered version 4 from the starting model, 4 steps redone" in caplog.text
    assert [s.version_out for s in world.steps()] == [1, 2, 3, 4, 5]


def test_a_trainer_asked_to_end_during_a_redo_ends_at_once_and_leaves_the_run_as_it_was(
    world: World,
) -> None:
    # a step takes two seconds, and the starting model is the only place to begin from
    config = world.emulated(2, checkpoint_every=100, emulated={"step_seconds": 2000.0})
    with fed(world):
        world.train(config)
    ledger = world.steps()
    process = world.start(
        world.emulated(3, checkpoint_every=100, emulated={"step_seconds": 2000.0})
    )
    until(lambda: "redoing step 0 -> 1, 1 of 2" in world.log.read_text(), "the redo", 60.0)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0, world.log.read_text()[-4000:]
    log = world.log.read_text()
    assert "redoing 2 steps, 8 trajectories, from the starting model" in log
    assert "stopped while redoing committed steps: the next start redoes them" in log
    assert "recovered version" not in log, "it did not redo to the end"
    last = [s for s in world.read(world.topics.workers) if isinstance(s, Status)][-1]
    assert last.state == "stopped"
    assert world.steps() == ledger
    assert not list(Path(world.directory).rglob(".unfinished-*")) and not any(
        checkpoints(world).glob("*")
    )


def test_other_weights_after_a_redo_stop_the_run_or_are_accepted_with_the_figures(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(steps: int, **recovery: Any) -> Config:
        plain = world.config(steps=steps, checkpoint_every=8)
        section = plain.recovery.model_validate(recovery)
        return plain.model_copy(update={"recovery": section})

    with fed(world):
        world.train(config(2))
        # as another version of the program would: from the second update on
        monkeypatch.setattr(
            "dora.consumers.learner.microbatches.learning_rate",
            lambda settings, update, total: 9e-4 if update else settings.learning_rate,
        )
        with pytest.raises(
            RunError, match=r"redoing step 1 -> 2.*largest difference is .* in \w+(.|\n)*version"
        ):
            world.train(config(9))
        assert len(world.steps()) == 2
        with caplog.at_level("WARNING"):
            world.train(config(3, on_mismatch="accept"))
        assert re.search(r"accepted: redoing step 1 -> 2.*the largest difference is", caplog.text)
        last = world.steps()[-1]
        assert 0.0 < last.metrics["redo_difference_max"] < 1.0
        assert last.checkpoint is not None, "no later redo goes through the difference again"
        said = [s.message for s in world.read(world.topics.workers) if isinstance(s, Status)]
        assert any(message.startswith("accepted: redoing step 1 -> 2") for message in said)
        world.train(config(4, on_mismatch="stop"))
    assert "redo_difference_max" not in world.steps()[-1].metrics


def test_weights_that_a_live_worker_uses_or_loads_are_kept_until_it_is_gone(
    world: World,
) -> None:
    def say(writer: LogWriter, **fields: Any) -> None:
        status = factories.status("w0", run=world.name, **fields)
        writer.send(world.topics.workers, status, key="w0")
        writer.flush(10.0)

    def stored() -> list[int]:
        return [int(name[1:9]) for name in WeightStore.of(world.config()).versions()]

    with fed(world), LogWriter(world.settings, client_id="test") as writer:
        say(writer, version=1, loading=-1)
        world.train(world.config(steps=7))
        assert stored() == [1, 4, 5, 6, 7]
        say(writer, version=1, loading=4)
        world.train(world.config(steps=9))
        assert stored() == [1, 4, 6, 7, 8, 9]
        say(writer, state="stopped", version=1, loading=4)
        world.train(world.config(steps=10))
    assert stored() == [7, 8, 9, 10]


def test_weights_of_the_newest_version_that_are_gone_are_stored_again(world: World) -> None:
    with fed(world):
        world.train(world.config(steps=3))
        store = WeightStore.of(world.config())
        policy = [p for p in world.read(world.topics.policies) if isinstance(p, Policy)][-1]
        store.delete(store.versions()[-1])
        world.train(world.config(steps=4))
    assert store.fetch(policy, world.directory).name.startswith("v00000003-")
