"""The learner with real DeepSpeed on a small model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dora.config import Config
from dora.consumers.learner.batches import Sample, group_advantages
from dora.consumers.learner.deepspeed_learner import DeepSpeedLearner
from dora.errors import PolicyError, WeightsError
from dora.weights.tensors import read_tensors, weights_checksum, write_tensors

VOCABULARY = 40


def make_model(directory: Path, *, tied: bool = False) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    settings = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attention_dropout=0.1,
        initializer_range=0.2,
    )
    Qwen2ForCausalLM(settings).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def config(model: Path, trainer: dict[str, Any] | None = None, **rollout: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "learner", "seed": 3},
            "policy": {"model": str(model)},
            "task": {"kind": "reasoning-gym", "name": "x"},
            "window": {"groups_per_step": 4, "group_size": 4},
            "rollout": {"max_new_tokens": 16, **rollout},
            "trainer": {
                "steps": 8,
                "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.01},
                **(trainer or {}),
            },
        }
    )


def groups(seed: int, count: int = 4, version: int = 0) -> list[list[Sample]]:
    """Groups with behaviour log-probabilities that are near the model's own only by chance."""
    random = np.random.default_rng(seed)
    result = []
    for group in range(count):
        prompt = random.integers(0, VOCABULARY, 3 + group)
        rewards = [1.0, 0.0, 0.0, float(group % 2)] if group else [1.0] * 4
        advantages = group_advantages(rewards, divide_by_std=True)
        members = []
        for index, length in enumerate(random.integers(1, 17, 4)):
            tokens = np.concatenate([prompt, random.integers(0, VOCABULARY, length)])
            members.append(
                Sample(
                    trajectory_id=f"g{group}/{index}",
                    version=version,
                    token_ids=tokens.astype(np.int32),
                    positions=np.arange(len(prompt), len(tokens)),
                    behaviour=random.normal(-3.6, 0.2, length).astype(np.float32),
                    reward=rewards[index],
                    advantage=float(advantages[index]),
                    truncated=False,
                )
            )
        result.append(members)
    return result


def direct_logprobs(model: Path, sample: Sample, temperature: float) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model).eval()
    tokens = torch.tensor(sample.token_ids.astype(np.int64))
    with torch.no_grad():
        logits = network(tokens[None]).logits[0] / temperature
    scores = logits.log_softmax(-1)
    return torch.stack([scores[p - 1, tokens[p]] for p in sample.positions])


def test_log_probabilities_equal_those_of_the_unpadded_model(model: Path) -> None:
    learner = DeepSpeedLearner(
        model, config(model, {"max_tokens_per_micro_batch": 60}, temperature=0.7)
    )
    samples = [sample for group in groups(0) for sample in group]
    found = learner.logprobs(samples)
    for sample, scores in list(zip(samples, found, strict=True))[::5]:
        expected = direct_logprobs(model, sample, 0.7)
        assert np.allclose(scores, expected.numpy(), atol=1e-5)
    canary = learner.sequence_logprobs(samples[0].token_ids.tolist())
    assert len(canary) == len(samples[0].token_ids) - 1


def deltas(model: Path, settings: Config, batch: Sequence[Sequence[Sample]]) -> tuple[Any, Any]:
    learner = DeepSpeedLearner(model, settings)
    before = {name: tensor.clone() for name, tensor in learner.export_state().items()}
    metrics = learner.update(batch, version=0)
    after = learner.export_state()
    return metrics, {name: after[name] - before[name] for name in before}


@pytest.mark.parametrize("loss", [{}, {"kind": "gspo", "normalization": "sequence"}])
def test_the_update_does_not_depend_on_how_the_batch_is_cut(model: Path, loss: Any) -> None:
    cuts = ((1, False), (50, False), (1, True), (50, True), (100_000, False))
    trainers = [{"max_tokens_per_micro_batch": b, "packing": p, "loss": loss} for b, p in cuts]
    results = [deltas(model, config(model, trainer), groups(1)) for trainer in trainers]
    reference_metrics, reference = results[-1]
    assert max(float(d.abs().max()) for d in reference.values()) > 1e-4
    for metrics, found in results[:-1]:
        assert metrics == pytest.approx(reference_metrics, rel=1e-4, abs=1e-6)
        # Adam's first update is lr * sign(g) where |g| >> eps: compare where it is.
        for name, expected in reference.items():
            close = torch.isclose(found[name], expected, atol=2e-5)
            assert close.float().mean() > 0.995, name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_zero_stage_gives_the_same_update_with_logits_by_chunks(
    tmp_path: Path, stage: int, tied: bool
) -> None:
    model = make_model(tmp_path, tied=tied)
    settings: dict[str, Any] = {"max_tokens_per_micro_batch": 60}
    plain_metrics, plain = deltas(model, config(model, settings), groups(1))
    settings |= {"deepspeed": {"zero_optimization": {"stage": stage}}}
    settings["logits_mib"] = 5 * 4 * VOCABULARY / 2**20  # five tokens
    metrics, found = deltas(model, config(model, settings), groups(1))
    assert metrics == pytest.approx(plain_metrics, rel=1e-4, abs=1e-6)
    for name, expected in plain.items():
        assert torch.isclose(found[name], expected, atol=2e-5).float().mean() > 0.995, name


@pytest.mark.parametrize("stage", [0, 1])
def test_the_gradient_is_clipped_to_what_is_configured(model: Path, stage: int) -> None:
    def moved(clip: float) -> tuple[float, float]:
        trainer = {
            "loss": {"normalization": "constant", "constant_length": 1},
            "optimizer": {"learning_rate": 1.0, "eps": 1e3, "gradient_clip": clip},
            "deepspeed": {"zero_optimization": {"stage": stage}},
        }
        metrics, found = deltas(model, config(model, trainer), groups(1))
        return metrics["grad_norm"], sum(float(d.square().sum()) for d in found.values()) ** 0.5

    norm, whole = moved(1e6)
    assert norm > 4.0, "with such an eps Adam's update is proportional to the gradient"
    for clip in (0.5, 2.0):
        assert moved(clip)[1] == pytest.approx(whole * clip / norm, rel=0.02)


def test_another_configuration_on_the_way_gives_what_one_from_the_start_gives(model: Path) -> None:
    given = {
        "loss": {"kl_coefficient": 0.1, "clip_low": 0.1},
        "optimizer": {"learning_rate": 3e-3, "betas": (0.5, 0.7), "gradient_clip": 0.01},
        "updates_per_step": 2,
    }
    for stage in (0, 1, 2):
        zero = {"deepspeed": {"zero_optimization": {"stage": stage}}}
        first = DeepSpeedLearner(model, config(model, given | zero))
        later = DeepSpeedLearner(model, config(model, zero))
        later.configure(config(model, given | zero))
        for seed in (1, 2):
            assert later.update(groups(seed), version=0) == first.update(groups(seed), version=0)
        assert later.weights_checksum() == first.weights_checksum()


def first_moments(learner: DeepSpeedLearner) -> torch.Tensor:
    """Adam's means of the gradient after an update, in float64."""
    optimizer = learner._engine.optimizer
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    return torch.cat([state["exp_avg"].double().flatten() for state in states])


@pytest.mark.parametrize(
    ("stage", "streamed"), [(0, False), (1, True), (2, False), (2, True), (3, False)]
)
def test_bfloat16_gradients_of_many_passes_add_up_in_float32(
    model: Path, stage: int, streamed: bool
) -> None:
    def mean_gradient(copies: int) -> torch.Tensor:
        trainer = {
            "max_tokens_per_micro_batch": 1,
            "streamed": streamed,
            "deepspeed": {"zero_optimization": {"stage": stage}},
            "optimizer": {"gradient_clip": 1e9},
        }
        values = config(model, trainer).model_dump()
        values["policy"]["dtype"] = "bfloat16"
        values["window"]["groups_per_step"] = 1
        learner = DeepSpeedLearner(model, Config.model_validate(values))
        learner.update([[groups(1)[1][0]] * copies], version=0)
        return first_moments(learner)

    # each of 128 equal passes gives 1 / 128 of the gradient, exactly, and so does their exact sum
    exact, summed = mean_gradient(1), mean_gradient(128)
    error = float((summed - exact).norm() / exact.norm())
    assert error < 1e-5


def test_the_optimizer_may_be_offloaded_and_attention_be_chosen(
    model: Path, tmp_path: Path
) -> None:
    _, plain = deltas(model, config(model), groups(1))
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    values = config(model, {"deepspeed": {"zero_optimization": zero}}).model_dump()
    values["policy"]["attention"] = "eager"
    _, found = deltas(model, Config.model_validate(values), groups(1))
    for name, expected in plain.items():
        assert torch.isclose(found[name], expected, atol=2e-5).float().mean() > 0.995, name
    values["policy"]["attention"] = "sdpaa"
    with pytest.raises(PolicyError, match="sdpaa"):
        DeepSpeedLearner(model, Config.model_validate(values))


def test_a_redo_from_a_checkpoint_is_bit_identical(model: Path, tmp_path: Path) -> None:
    settings = config(model, {"updates_per_step": 2, "loss": {"importance_cap": 2.0}})
    learner = DeepSpeedLearner(model, settings)
    learner.update(groups(1), version=0)
    learner.save_checkpoint(tmp_path)
    first = learner.update(groups(2), version=1)
    checksum = learner.weights_checksum()
    redo = DeepSpeedLearner(model, settings)
    assert redo.weights_checksum() != checksum
    redo.load_checkpoint(tmp_path)
    assert redo.updates == 2
    again = redo.update(groups(2), version=1)
    # the weights of version 0, on which the mismatch is measured, are no part of a checkpoint
    assert again == {k: v for k, v in first.items() if not k.startswith("logprob_mismatch")}
    assert redo.weights_checksum() == checksum


def test_training_makes_rewarded_tokens_likelier(model: Path) -> None:
    learner = DeepSpeedLearner(model, config(model, {"optimizer": {"learning_rate": 3e-3}}))
    batch = groups(4)
    flat = [sample for group in batch for sample in group]
    before = learner.logprobs(flat)
    for _ in range(3):
        learner.update(batch, version=0)
    gain = [
        float((b - a).mean()) * s.advantage
        for a, b, s in zip(before, learner.logprobs(flat), flat, strict=True)
    ]
    assert sum(gain) > 0.1


def test_mismatch_is_measured_under_the_weights_that_generated(model: Path) -> None:
    settings = config(model)
    fresh = DeepSpeedLearner(model, settings)
    flat = [sample for group in groups(5) for sample in group]
    exact = [s.behaviour for s in flat]
    for sample, scores in zip(flat, fresh.logprobs(flat), strict=True):
        sample.behaviour[:] = scores + 0.25
    batch = [flat[i : i + 4] for i in range(0, 16, 4)]
    assert len(exact) == 16
    metrics = DeepSpeedLearner(model, settings).update(batch, version=0)
    assert metrics["logprob_mismatch_mean"] == pytest.approx(0.25, abs=1e-4)
    assert metrics["logprob_mismatch_max"] == pytest.approx(0.25, abs=1e-4)
    assert "logprob_drift_mean" not in metrics
    stale = DeepSpeedLearner(model, settings).update(batch, version=1)
    assert stale["logprob_drift_mean"] == pytest.approx(0.25, abs=1e-4)
    assert "logprob_mismatch_mean" not in stale
    assert (stale["staleness_mean"], stale["staleness_max"]) == (1.0, 1.0)
    trained = DeepSpeedLearner(model, settings)
    trained.update(batch, version=0)
    kept = trained.update(batch, version=1)
    assert kept["logprob_mismatch_mean"] == pytest.approx(0.25, abs=1e-4), "under its own weights"
    assert abs(kept["logprob_drift_mean"] - 0.25) > 1e-3, "training moved the policy"
    probes = groups(6, version=1)[1]
    probed = DeepSpeedLearner(model, settings).update(batch, version=1, probes=probes)
    assert probed["logprob_mismatch_mean"] > 0.0


def test_a_batch_without_signal_changes_nothing(model: Path) -> None:
    learner = DeepSpeedLearner(model, config(model))
    learner.update(groups(1), version=0)
    checksum = learner.weights_checksum()
    quiet = [[*groups(seed)[0]] for seed in range(4)]
    metrics = learner.update(quiet, version=1)
    assert learner.weights_checksum() == checksum
    assert metrics["optimizer_updates"] == 0 and metrics["signal_fraction"] == 0


def test_a_gradient_that_is_no_number_stops_the_step_before_the_weights_change(
    model: Path,
) -> None:
    learner = DeepSpeedLearner(model, config(model))
    checksum = learner.weights_checksum()
    batch = groups(1)
    batch[1][0] = replace(batch[1][0], advantage=float("nan"))
    with pytest.raises(PolicyError, match=r"step 1: the gradient .* 0 is nan"):
        learner.update(batch, version=0)
    assert learner.weights_checksum() == checksum


def test_the_reference_policy_holds_the_policy_back(model: Path) -> None:
    loss = {"kl_coefficient": 0.5}
    learner = DeepSpeedLearner(model, config(model, {"loss": loss}))
    assert learner.update(groups(1), version=0)["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert learner.update(groups(1), version=1)["reference_kl"] > 1e-6


def test_tied_embeddings_are_exported_once_and_load_again(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "tied", tied=True)
    learner = DeepSpeedLearner(directory, config(directory))
    state = learner.export_state()
    assert "lm_head.weight" not in state and "model.embed_tokens.weight" in state
    assert weights_checksum(read_tensors(directory)) == weights_checksum(state)


def test_an_unusable_model_is_refused_with_the_reason(model: Path, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"no config\.json"):
        DeepSpeedLearner(tmp_path, config(model))
    partial = tmp_path / "partial"
    partial.mkdir()
    (partial / "config.json").write_bytes((model / "config.json").read_bytes())
    state = read_tensors(model)
    del state["model.layers.1.mlp.up_proj.weight"]
    write_tensors(partial, state)
    with pytest.raises(PolicyError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        DeepSpeedLearner(partial, config(model))
    (partial / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(PolicyError, match=r"damaged|cannot be loaded"):
        DeepSpeedLearner(partial, config(model))
    (partial / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(PolicyError, match="cannot be loaded"):
        DeepSpeedLearner(partial, config(model))


def test_an_incomplete_checkpoint_is_refused(model: Path, tmp_path: Path) -> None:
    learner = DeepSpeedLearner(model, config(model))
    with pytest.raises(WeightsError, match="cannot be read"):
        learner.load_checkpoint(tmp_path)
    learner.save_checkpoint(tmp_path)
    states = next(tmp_path.rglob("*model_states.pt"))
    states.write_bytes(states.read_bytes()[:100])
    with pytest.raises(WeightsError, match="damaged"):
        learner.load_checkpoint(tmp_path)


def test_settings_that_dora_owns_are_refused_in_deepspeeds_configuration(model: Path) -> None:
    with pytest.raises(ValueError, match=r"deepspeed\.optimizer: set trainer\.optimizer"):
        config(model, {"deepspeed": {"optimizer": {"type": "Adam"}}})
