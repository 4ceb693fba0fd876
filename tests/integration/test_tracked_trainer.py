"""A trainer that dies between a commit and its tracker, and the one that goes on."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dora.bus import ClusterSettings, TopicAdmin, topic_plan
from dora.config import Config
from dora.schemas.records import RunStarted
from dora.telemetry.lineage_events import run_uuid
from tests.lineage_receiver import receiver
from tests.training_world import World, fed

DEADLINE = 200.0


@pytest.mark.timeout(600)
def test_tensorboard_and_lineage_have_each_committed_step_once_although_the_trainer_was_killed(
    settings: ClusterSettings, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    world = World(settings, run_name, Path("emulated"), tmp_path / "runs")

    def config(steps: int) -> Config:
        given = world.emulated(steps, checkpoint_every=100).model_dump()
        given["lineage"] = {"url": taking.url}
        return Config.model_validate(given)

    with receiver() as taking, TopicAdmin(settings) as admin:
        admin.create(topic_plan(config(2)))
        with fed(world):
            # the third transaction is that of step 2: it counts, and no tracker has heard of it
            process = world.start(config(10), fault="trainer.after_transaction:kill:3")
            assert process.wait(DEADLINE) == -9, world.log.read_text()
            assert [step.version_out for step in world.steps()] == [1, 2]
            world.train(config(4))
    assert not taking.refused
    (started,) = [r for r in world.read(world.topics.steps) if isinstance(r, RunStarted)]
    told = dict.fromkeys(event["run"]["runId"] for event in taking.events)
    assert list(told) == [run_uuid(started.run_id, number) for number in (1, 2, 3, 4)]
    accumulator = EventAccumulator(str(tmp_path / "runs" / run_name / "tensorboard"))
    accumulator.Reload()
    ledger = {step.version_out: step.metrics for step in world.steps()}
    assert sorted(ledger) == [1, 2, 3, 4]
    for tag, name in (("train/reward_mean", "reward_mean"), ("time/wall_seconds", "wall_seconds")):
        shown = [(scalar.step, scalar.value) for scalar in accumulator.Scalars(tag)]
        assert [step for step, _ in shown] == [1, 2, 3, 4]
        for step, value in shown:
            assert value == pytest.approx(ledger[step][name], rel=1e-5)
