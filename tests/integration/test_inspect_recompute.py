"""`dora inspect --recompute`: the trainer's log-probabilities under the weights that generated."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result

from dora.consumers.inspect.recomputation import PolicyScorer, Recomputation
from dora.consumers.learner.batches import sample_of
from dora.consumers.learner.deepspeed_learner import DeepSpeedLearner
from dora.consumers.learner.losses import token_entropies
from dora.errors import RunError, WeightsError
from dora.log.run_log import RunLog
from dora.schemas.records import Trajectory, VersionRun, unpack_logprobs
from tests.integration.test_learner import config as learner_settings
from tests.integration.test_lora_learner import settings as lora_settings
from tests.small_run import VOCABULARY, dora, make_model, refused
from tests.training_world import World, trajectory

STEPS = 4


def look(world: World, *options: str) -> Result:
    return dora("inspect", world.name, "-b", world.settings.bootstrap_servers, *options)


def of_version(log: RunLog, version: int) -> list[Trajectory]:
    return [placed.record for placed in log.trajectories({version})]


def stored(world: World, version: int) -> Path:
    [found] = (world.directory / world.name / "weights").glob(f"v{version:08d}-*")
    return found


@pytest.mark.parametrize("lora", [False, True])
def test_they_are_those_of_the_learner_with_the_same_weights(model: Path, lora: bool) -> None:
    config = lora_settings(model) if lora else learner_settings(model)
    groups = [[trajectory("r", 0, ordinal, sample, 0.0) for sample in (0, 1)] for ordinal in (0, 1)]
    samples = [sample_of(t, 1.0 - 2 * t.sample) for group in groups for t in group]
    learner = DeepSpeedLearner(model, config)
    learner.update([samples[:2], samples[2:]], 0)
    scorer = PolicyScorer(model, config)
    untrained = scorer.score(samples)
    scorer.load(learner.export_state())
    found = scorer.score(samples)
    for one, logprobs in zip(found, learner.logprobs(samples), strict=True):
        assert np.array_equal(one.logprobs, logprobs), "bit by bit"
        assert (one.entropy > 0).all() and (one.entropy < np.log(VOCABULARY) + 1e-6).all()
    assert not np.array_equal(untrained[0].logprobs, found[0].logprobs)
    state = dict(learner.export_state())
    name, tensor = state.popitem()
    with pytest.raises(WeightsError, match="the weights lack"):
        scorer.load(state)
    with pytest.raises(WeightsError, match="is no tensor of this model"):
        scorer.load({name + "x": tensor})
    with pytest.raises(WeightsError, match="has shape"):
        scorer.load({name: tensor[:1]})


def test_a_trajectory_shows_engine_against_trainer(trained: World) -> None:
    shown = json.loads(look(trained, "--trajectory", "g2/1", "--recompute", "--json").stdout)
    made = [token for token in shown["tokens"] if token["generated"]]
    gaps = [abs(token["trainer_logprob"] - token["logprob"]) for token in made]
    assert shown["mismatch"]["mean"] == pytest.approx(np.mean(gaps))
    assert shown["mismatch"]["largest"] == pytest.approx(max(gaps))
    people = look(trained, "--trajectory", "g2/1", "--recompute", "--logprobs")
    assert "engine against trainer" in people.output and "entropy" in people.output
    group = json.loads(look(trained, "--group", "g2", "--recompute", "--json").stdout)
    assert all(view["mismatch"] for view in group["trajectories"])


def test_lists_are_sorted_and_filtered_by_mismatch(trained: World) -> None:
    options = ("--version", "1", "--recompute", "--json")
    rows = json.loads(look(trained, *options, "--sort", "mismatch").stdout)["trajectories"]
    values = [row["mismatch"] for row in rows]
    assert len(values) >= 2 and values == sorted(values)
    bound = values[-1]
    few = json.loads(look(trained, *options, "--filter", f"mismatch<{bound}").stdout)
    assert [row["id"] for row in few["trajectories"]] != []
    assert all(row["mismatch"] < bound for row in few["trajectories"])
    groups = json.loads(look(trained, *options, "--groups", "--limit", "1").stdout)["groups"]
    own = [row["mismatch"] for row in rows if row["group"] == groups[0]["id"]]
    assert groups[0]["mismatch"] == pytest.approx(np.mean(own))


def test_weights_that_are_not_stored_any_more_are_redone_from_the_log(
    trained: World, tmp_path: Path
) -> None:
    log = RunLog(trained.settings, trained.name)
    config = trained.config(steps=STEPS)
    records = [record for version in (0, 1, 2) for record in of_version(log, version)]
    expected = Recomputation(log, config, trained.settings).scores(records)
    run = trained.directory / trained.name
    before = sorted(path.name for path in run.rglob("*"))
    moved = [(stored(trained, v), tmp_path / str(v)) for v in (0, 1, 2)]
    for source, target in moved:
        shutil.move(source, target)
    said: list[str] = []
    try:
        again = Recomputation(log, config, trained.settings, said.append)
        found = again.scores(records)
        assert again.notes == []
        shutil.move(run / "checkpoints", tmp_path / "checkpoints")
        try:  # without checkpoints, from version 0
            [other] = Recomputation(log, config, trained.settings).scores(records[-1:])
        finally:
            shutil.move(tmp_path / "checkpoints", run / "checkpoints")
        absent = {"policy": config.policy.model_copy(update={"model": str(tmp_path / "none")})}
        gone = Recomputation(log, config.model_copy(update=absent), trained.settings)
        with pytest.raises(RunError, match="the weights of version 2 are gone") as told:
            gone.scores(records[-1:])
        assert "they cannot be redone" in told.value.message
        later = replace(records[0], version_runs=(VersionRun(9, records[0].generated_tokens),))
        with pytest.raises(RunError, match="has no version 9: it has versions 0 to 4"):
            again.scores([later])
    finally:
        for source, target in moved:
            shutil.move(target, source)
    assert sorted(path.name for path in run.rglob("*")) == before, "nothing was written"
    for one, two in zip(expected, found, strict=True):
        assert np.array_equal(one.logprobs, two.logprobs)
        assert np.array_equal(one.entropy, two.entropy)
    assert np.allclose(other.logprobs, expected[-1].logprobs, atol=1e-6)
    assert any("redoing step 1 of" in text for text in said)
    assert not any("redoing step 2 of" in text for text in said), "version 2 has a checkpoint"


def test_other_starting_weights_are_noted(trained: World, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", width=16)
    from safetensors.torch import load_file, save_file

    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] += 1e-3
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    source = stored(trained, 0)
    shutil.move(source, tmp_path / "v0")
    try:
        result = look(
            trained, "--trajectory", "g1/0", "--recompute", "--set", f"policy.model={other}"
        )
    finally:
        shutil.move(tmp_path / "v0", source)
    assert result.exit_code == 0, result.output
    assert "have checksum" in result.stderr and "other weights" in result.stderr


def test_an_emulated_trainer_has_nothing_to_compare_with(trained: World) -> None:
    config = trained.emulated(STEPS)
    with pytest.raises(RunError, match="emulated trainer"):
        Recomputation(RunLog(trained.settings, trained.name), config, trained.settings)
    refused(
        look(
            trained,
            *("--trajectory", "g1/0", "--recompute", "--set", "trainer.engine=emulated"),
            *("--set", "rollout.engine=emulated"),
        ),
        1,
        "emulated trainer",
    )


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.7, 0), (1.0, 3), (0.6, 4)])
def test_entropy_is_that_of_the_distribution_sampled_from(top_p: float, top_k: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 9) * 3
    found = token_entropies(logits, temperature=0.5, top_p=top_p, top_k=top_k)
    for row, entropy in zip(logits.double(), found.tolist(), strict=True):
        p = np.sort((row / 0.5).softmax(-1).numpy())[::-1]
        if top_k:
            p = p[:top_k] / p[:top_k].sum()
        if top_p < 1:
            p = p[: int(np.searchsorted(np.cumsum(p), top_p)) + 1]
            p = p / p.sum()
        assert entropy == pytest.approx(float(-(p * np.log(p)).sum()), abs=1e-5)


def test_recorded_values_are_not_touched(trained: World) -> None:
    log = RunLog(trained.settings, trained.name)
    record = of_version(log, 1)[0]
    shown = json.loads(look(trained, "--trajectory", record.trajectory_id, "--json").stdout)
    recorded = unpack_logprobs(record.logprobs)[np.frombuffer(record.mask, np.uint8).astype(bool)]
    assert [t["logprob"] for t in shown["tokens"] if t["generated"]] == recorded.tolist()
    assert shown["mismatch"] is None
