"""Logged steps trained again: bit-identical, with the first difference named, or with a change."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dora.bus import ClusterSettings, LogReader, LogWriter
from dora.bus.topics import TopicAdmin, topic_plan
from dora.config import Config
from dora.consumers.replay.metrics import COMPARED, NOT_COMPARED
from dora.consumers.replay.plan import make_plan
from dora.consumers.replay.replay import ReplayReport
from dora.consumers.replay.replay import replay as train_again
from dora.errors import RunError
from dora.log.run_log import RunLog
from dora.log.trained_records import fetch_steps
from dora.schemas.records import DeadLetter
from tests.small_run import dora, refused
from tests.training_world import World
from tests.written_run import RunWriter, WrittenRun

STEPS = 4


@pytest.fixture
def written(settings: ClusterSettings, run_name: str, tmp_path: Path) -> WrittenRun:
    """A log without weights: what is refused is refused before anything is loaded."""
    return RunWriter(settings, run_name, str(tmp_path / "no-model")).write()


def ends(world: World) -> dict[str, dict[int, int]]:
    with TopicAdmin(world.settings) as admin:
        return {info.name: info.end_offsets for info in admin.describe(world.name)}


def files(world: World) -> set[Path]:
    return set(world.directory.rglob("*"))


def told(world: World, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of `dora replay`."""
    address = world.settings.bootstrap_servers
    result = dora("replay", world.name, "-b", address, "--json", *options)
    assert result.exit_code in (0, 1) and result.stdout, result.output
    return result.exit_code, json.loads(result.stdout)


def redo(world: World, config: Config) -> ReplayReport:
    return train_again(
        RunLog(world.settings, world.name), config, world.settings, checkpoints=False
    )


def test_a_whole_run_is_redone_bit_by_bit_from_log_and_starting_model(
    trained: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ends(trained), files(trained)
    monkeypatch.setattr("dora.consumers.replay.replay.TRAJECTORIES_AT_ONCE", 8)
    progress: list[tuple[int, int]] = []
    config = trained.config(steps=STEPS, checkpoint_every=2)
    run = RunLog(trained.settings, trained.name)
    report = train_again(
        run,
        config,
        trained.settings,
        checkpoints=False,
        progress=lambda *counts: progress.append(counts),
    )
    assert report.identical and report.first_difference is None, report.first_difference
    assert report.base_version == 0 and report.checkpoint is None
    assert report.checksum == trained.steps()[-1].weights_checksum
    assert progress == [(count, STEPS) for count in range(1, STEPS + 1)]
    for result in report.results:
        assert {"loss", "reward_mean", "grad_norm", "learning_rate"} <= result.replayed.keys()
        assert result.replayed == result.recorded, "the same floats"
    assert (ends(trained), files(trained)) == before, "nothing was written"


def test_every_metric_of_a_trainer_is_compared_or_has_a_reason_not_to_be(trained: World) -> None:
    recorded = {name for step in trained.steps() for name in step.metrics}
    assert recorded <= {*COMPARED, *NOT_COMPARED}


def test_one_step_is_replayed_from_the_nearest_checkpoint(trained: World) -> None:
    code, report = told(trained, "--step", "4")
    assert code == 0 and report["identical"] is True and report["first_difference"] is None
    assert report["from"] == 2 and report["checkpoint"].startswith("step-00000002-")
    assert report["steps"] == 1 and report["redone_before"] == 1
    assert [(s["step"], s["asked"]) for s in report["by_step"]] == [(3, False), (4, True)]
    assert report["trajectories"] == 8 and report["trajectories_per_second"] > 0
    assert report["train_trajectories_per_second"] >= report["trajectories_per_second"]


def test_people_are_told_that_it_is_bit_identical(trained: World) -> None:
    result = dora("replay", trained.name, "-b", trained.settings.bootstrap_servers, "--steps", "3:")
    assert result.exit_code == 0, result.output
    assert "bit-identical: weights and metrics of 2 steps" in result.stdout
    assert "replayed from version 2, step-00000002-" in result.stdout


def test_a_change_is_shown_beside_the_record_from_the_recorded_weights(trained: World) -> None:
    change = "trainer.optimizer.learning_rate=0.002"
    code, report = told(trained, "--step", "4", "--set", change)
    assert code == 0 and report["identical"] is None and report["sets"] == [change]
    before, step = report["by_step"]
    assert before["differing"] == [], "the step before it is redone as recorded"
    assert step["recorded"]["learning_rate"] == 1e-3
    assert step["replayed"]["learning_rate"] == 2e-3
    assert step["recorded"]["reward_mean"] == step["replayed"]["reward_mean"]
    assert step["recorded"]["loss"] == step["replayed"]["loss"], "the weights before are the same"
    assert step["checksum"] != step["recorded_checksum"]
    assert "takes hold at the end of step 4" in report["notes"][-1]
    assert "--steps" not in report["notes"][-1], "there is no step 5"


def test_a_change_of_the_optimizer_takes_hold_after_a_checkpoint(trained: World) -> None:
    _, same = told(trained, "--step", "3", "--set", "trainer.optimizer.learning_rate=0.001")
    _, other = told(trained, "--step", "3", "--set", "trainer.optimizer.betas=[0.5, 0.6]")
    assert same["checkpoint"] and same["by_step"][0]["differing"] == []
    assert other["by_step"][0]["differing"] == ["weights"]
    assert "Those of step 4 differ: --steps 3:4" in other["notes"][-1]


def test_the_first_difference_is_named_and_the_exit_code_is_1(trained: World) -> None:
    config = trained.config(steps=STEPS)
    colder = config.rollout.model_copy(update={"temperature": 0.5})
    report = redo(trained, config.model_copy(update={"rollout": colder}))
    first = report.first_difference
    assert report.identical is False and first is not None
    assert (first.step, first.what) == (1, "loss")
    assert first.recorded == trained.steps()[0].metrics["loss"] != first.replayed
    announced = [step.weights_checksum for step in trained.steps()]
    assert [each.version for each in report.differing] == [1, 2, 3, 4]
    assert [each.announced for each in report.differing] == announced
    assert report.checksum == report.differing[-1].redone
    assert report.to_json()["first_difference"]["what"] == "loss"


def test_another_starting_model_shows_from_version_0_on(trained: World, tmp_path: Path) -> None:
    shutil.copytree(trained.model, tmp_path / "other")
    [file] = (tmp_path / "other").glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    config = trained.config(steps=STEPS)
    policy = config.policy.model_copy(update={"model": str(tmp_path / "other")})
    report = redo(trained, config.model_copy(update={"policy": policy}))
    assert report.first_difference is not None
    assert (report.first_difference.step, report.first_difference.what) == (0, "weights")
    assert [each.version for each in report.differing] == list(range(STEPS + 1))


def test_weights_that_differ_are_measured_against_the_stored_ones(
    trained: World, tmp_path: Path
) -> None:
    """The checkpoint of version 2 is damaged in place of one: its weights are those of another
    run, as if they had been changed since."""
    copied = tmp_path / "runs"
    shutil.copytree(trained.directory, copied)
    [checkpoint] = (copied / trained.name / "checkpoints").glob("step-00000002-*")
    newest = next((copied / trained.name / "checkpoints").glob("step-00000004-*"))
    shutil.rmtree(checkpoint)
    shutil.copytree(newest, checkpoint)
    code, report = told(trained, "--step", "3", "--set", f"run.directory={copied}")
    assert code == 1 and report["identical"] is False and report["sets"] == []
    first = report["first_difference"]
    assert (first["step"], first["what"]) == (2, "weights")
    assert first["largest"] > 0 and first["tensor"]


def test_a_damaged_checkpoint_is_passed_over(trained: World, tmp_path: Path) -> None:
    copied = tmp_path / "runs"
    shutil.copytree(trained.directory, copied)
    [checkpoint] = (copied / trained.name / "checkpoints").glob("step-00000002-*")
    (checkpoint / "learner.json").write_text("{}")
    code, report = told(trained, "--step", "3", "--set", f"run.directory={copied}")
    assert code == 0 and report["from"] == 0 and report["identical"] is True
    assert any("is not whole" in note for note in report["notes"])


def test_checkpoints_of_several_ranks_are_passed_over(trained: World) -> None:
    config = trained.config(steps=STEPS, ranks=2)
    plan = make_plan(RunLog(trained.settings, trained.name), config, trained.settings, 4, 4)
    assert plan.base.checkpoint is None and len(plan.steps) == 4
    assert "2 ranks" in plan.passed_over[0]


@pytest.mark.parametrize(
    ("options", "code", "parts"),
    [
        (["--step", "9"], 1, ["has no step 9", "steps 1 to 4"]),
        (["--step", "0"], 1, ["has no step 0", "steps 1 to 4"]),
        (["--steps", "2:7"], 1, ["has no step 7", "steps 1 to 4"]),
        (["--step", "1", "--steps", "1:2"], 2, ["exclude one another"]),
        (["--set", "window.max_staleness=2"], 2, ["window.max_staleness", "trainer.*"]),
        (["--set", "trainer.loss.knid=gspo"], 2, ["trainer.loss.knid", "kind"]),
        (["--as", "other"], 2, ["--serve"]),
        (["--trajectory", "g0/0", "--step", "1"], 2, ["goes with none of the others"]),
        (["--serve"], 2, ["--as NEWRUN"]),
    ],
)
def test_what_makes_no_sense_is_refused(
    trained: World, options: list[str], code: int, parts: list[str]
) -> None:
    address = trained.settings.bootstrap_servers
    refused(dora("replay", trained.name, "-b", address, *options), code, *parts)


def test_an_unknown_run_is_refused(trained: World) -> None:
    address = trained.settings.bootstrap_servers
    refused(dora("replay", trained.name + "x", "-b", address), 1, trained.name)


def test_another_window_or_model_than_recorded_is_refused(
    written: WrittenRun, tmp_path: Path
) -> None:
    file = tmp_path / "other.toml"
    file.write_text(
        f'[run]\nname = "{written.run}"\n[policy]\nmodel = "other"\n'
        '[task]\nkind = "reasoning-gym"\nname = "x"\nmax_prompt_tokens = 8\n[trainer]\nsteps = 3\n'
        "[window]\nmax_staleness = 2\ngroups_per_step = 2\ngroup_size = 2\n"
        "[rollout]\nmax_new_tokens = 16\n"
    )
    address = written.settings.bootstrap_servers
    refused(
        dora("replay", written.run, "-b", address, "--config", str(file)),
        1,
        "window.max_staleness: recorded 1, given 2",
        "given 'other'",
    )


def test_what_retention_deleted_is_named_with_the_steps_that_need_it(written: WrittenRun) -> None:
    topic, address = written.topics.trajectories, written.settings.bootstrap_servers
    written.delete(topic, 1, 2)
    refused(
        dora("replay", written.run, "-b", address),
        1,
        f"{topic} partition 1 begins at offset 2, but 0 to 1 are needed (step 2)",
        "begin at a checkpoint of version 2 or later, and there is none",
    )
    refused(
        dora("replay", written.run, "-b", address, "--serve", "--as", written.run + "-2"),
        1,
        f"{topic} partition 1 begins at offset 2, but 0 to 1 are needed (step 2)",
    )
    refused(dora("replay", written.run, "-b", address, "--steps", ":1"), 1, "no-model")


def test_foreign_records_are_passed_over_unless_the_ledger_names_them(
    trained: World, written: WrittenRun
) -> None:
    foreign = DeadLetter(trained.name, "foreign", "does not belong here", "test", 0)
    with LogWriter(trained.settings, client_id="test") as writer:
        for topic in (trained.topics.steps, trained.topics.policies, trained.topics.trajectories):
            writer.send(topic, foreign, key="x", partition=0)
    code, report = told(trained, "--step", "3")
    assert code == 0 and report["identical"] is True
    assert any("DeadLetter" in note for note in report["log_notes"])


def test_a_run_that_never_committed_a_step_or_has_not_begun(
    written: WrittenRun, settings: ClusterSettings, run_name: str
) -> None:
    begun = f"{run_name}-b"
    config = Config.model_validate(
        {
            "run": {"name": begun},
            "policy": {"model": "x"},
            "task": {"kind": "reasoning-gym", "name": "x"},
            "trainer": {"steps": 1},
        }
    )
    with TopicAdmin(settings) as admin:
        admin.create(topic_plan(config))
    address = settings.bootstrap_servers
    refused(dora("replay", begun, "-b", address), 1, "has not begun")
    started = RunLog(settings, written.run).started
    with LogWriter(settings, client_id="test") as writer:
        writer.send(f"{begun}.steps", started, key="x", partition=0)
    refused(dora("replay", begun, "-b", address), 1, "has not committed a step")


def test_a_ledger_that_names_a_foreign_record_is_an_error(written: WrittenRun) -> None:
    run = RunLog(written.settings, written.run)
    ref = run.ledger[0].trained[0].samples[0]
    with LogWriter(written.settings, client_id="test") as writer:
        foreign = DeadLetter(written.run, "foreign", "does not belong here", "test", 0)
        writer.send(written.topics.trajectories, foreign, key="x", partition=ref.partition)
    with TopicAdmin(written.settings) as admin:
        infos = {info.name: info for info in admin.describe(written.run)}
    at = infos[written.topics.trajectories].end_offsets[ref.partition] - 1
    group = replace(run.ledger[0].trained[0], samples=(replace(ref, offset=at),))
    step = replace(run.ledger[0], trained=(group,))
    with (
        LogReader(written.settings, client_id="test") as reader,
        pytest.raises(RunError, match=f"offset {at}, which the ledger trained, holds a DeadLetter"),
    ):
        fetch_steps(reader, written.topics.trajectories, [step], 30.0)
