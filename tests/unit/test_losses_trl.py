"""Each preset against the loss function of TRL: value and gradient."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dora.config.trainer import LossSection
from dora.consumers.learner.batches import Sample, token_weights
from dora.consumers.learner.losses import TokenTerms, policy_loss

LENGTHS = [3, 7, 1, 5, 6, 2]
LONGEST = 16
MASK = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


def drawn(seed: int, spread: float) -> torch.Tensor:
    """Numbers around 0, [sequences, longest], float64."""
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(MASK.shape, generator=generator, dtype=torch.float64)


def trl_loss(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    engine: torch.Tensor,
    reference: torch.Tensor,
    advantages: torch.Tensor,
    settings: LossSection,
    **options: Any,
) -> torch.Tensor:
    """What GRPOTrainer computes of these log-probabilities; `options` are its arguments."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    apart = (old - engine) * MASK
    if settings.importance_level == "sequence":
        apart = apart.sum(-1, keepdim=True)
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
    )
    trainer = SimpleNamespace(
        accelerator=accelerator,
        args=SimpleNamespace(
            delta=options.get("delta"), use_bias_correction_kl=False, steps_per_generation=1
        ),
        model=SimpleNamespace(training=True),
        beta=settings.kl_coefficient,
        loss_type=options["loss_type"],
        importance_sampling_level=options.get("importance_sampling_level", "token"),
        epsilon_low=options.get("epsilon", 0.2),
        epsilon_high=options["epsilon_high"],
        use_vllm="clip_max" in options,
        vllm_importance_sampling_correction=True,
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, torch.ones_like(old), None),
    )
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.zeros(MASK.shape, dtype=torch.long),
        "completion_mask": MASK.long(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "importance_sampling_ratio": apart.exp().clamp(max=options.get("clip_max", torch.inf)),
        "num_items_in_batch": MASK.sum(),
    }
    found: torch.Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return found


@pytest.mark.parametrize("kl_coefficient", [0.0, 0.1])
@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"preset": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
        ({"preset": "dr_grpo"}, {"loss_type": "dr_grpo", "epsilon_high": 0.2}),
        (
            {"preset": "gspo"},
            {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon": 3e-4,
                "epsilon_high": 4e-4,
            },
        ),
        ({"preset": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
        (
            {"preset": "longcat"},
            {"loss_type": "dr_grpo", "epsilon_high": 0.2, "delta": 3.0, "clip_max": 2.0},
        ),
        (
            {"kind": "gspo", "importance_cap": 2.0, "clip_low": 0.1, "clip_high": 0.1},
            {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon": 0.1,
                "epsilon_high": 0.1,
                "clip_max": 2.0,
            },
        ),
    ],
    ids=lambda each: each.get("preset", each.get("kind")) if "loss_type" not in each else "",
)
def test_a_preset_is_what_trl_computes(
    settings: dict[str, Any], options: dict[str, Any], kl_coefficient: float
) -> None:
    loss = LossSection(**settings, kl_coefficient=kl_coefficient)
    old = drawn(0, 0.3) - 2.0
    # log-ratios around the bounds: some tokens, or sequences, are clipped on either side
    logprobs = (old + drawn(1, 5e-4 if loss.clip_low < 0.01 else 2.0)).requires_grad_()
    engine, reference = old + drawn(2, 0.7), old + drawn(3, 0.3)
    advantages = torch.tensor([1.0, -1.0, -0.5, 1.5, -2.0, 0.7], dtype=torch.float64)
    expected = trl_loss(logprobs, old, engine, reference, advantages, loss, **options)
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)

    samples = [
        Sample(str(i), 0, np.zeros(n + 1, np.int32), np.arange(1, n + 1), np.zeros(n, np.float32),
               0.0, float(a), False)
        for i, (n, a) in enumerate(zip(LENGTHS, advantages, strict=True))
    ]  # fmt: skip
    sequences = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    weights = torch.tensor(token_weights(samples, loss, LONGEST), dtype=torch.float64)
    capped = loss.importance_cap is not None
    terms = TokenTerms(
        behaviour=(engine if capped else old)[MASK],
        advantages=advantages[sequences],
        weights=weights[sequences],
        sequences=sequences,
        proximal=old[MASK] if capped else None,
        reference=reference[MASK],
    )
    parts = policy_loss(logprobs[MASK], terms, loss)
    (gradient,) = torch.autograd.grad(parts.loss, logprobs)
    assert parts.clipped > 0
    assert float(parts.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-9)


def test_a_key_beside_a_preset_or_kind_is_stronger() -> None:
    assert LossSection(preset="dapo", clip_high=0.3).clip_high == 0.3
    gspo = LossSection(kind="gspo")
    assert (gspo.normalization, gspo.clip_low, gspo.clip_high) == ("sequence", 3e-4, 4e-4)
    assert LossSection(kind="cispo").clip_low == 1.0
    recorded = LossSection(preset="longcat", clip_dual=None).model_dump()
    assert LossSection.model_validate(recorded).model_dump() == recorded
