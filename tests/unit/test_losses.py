"""The loss against values worked out by hand, with their gradients."""

import math

import pytest
import torch

from dora.config.trainer import LossSection
from dora.consumers.learner.losses import TokenTerms, policy_loss, token_logprobs

RATIOS = [0.5, 0.9, 1.0, 1.1, 1.5, 4.0]


def run(
    settings: LossSection,
    ratios: list[float],
    advantages: list[float],
    *,
    sequences: list[int] | None = None,
    weights: list[float] | None = None,
    proximal_drift: list[float] | None = None,
    reference: list[float] | None = None,
) -> tuple[float, list[float], float]:
    """Loss, d loss / d logprob, and clipped tokens for ratios to the behaviour policy of p = 0.1
    (to the proximal one, itself `proximal_drift` times the behaviour policy, if given)."""
    behaviour = torch.full((len(ratios),), math.log(0.1), dtype=torch.float64)
    old = behaviour
    if proximal_drift is not None:
        old = behaviour + torch.tensor(proximal_drift, dtype=torch.float64).log()
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    terms = TokenTerms(
        behaviour=behaviour,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.tensor(weights or [1.0] * len(ratios), dtype=torch.float64),
        sequences=torch.tensor(sequences or list(range(len(ratios)))),
        proximal=old if proximal_drift is not None else None,
        reference=None if reference is None else torch.tensor(reference, dtype=torch.float64),
    )
    parts = policy_loss(logprobs, terms, settings)
    (gradient,) = torch.autograd.grad(parts.loss, logprobs)
    return float(parts.loss.detach()), gradient.tolist(), float(parts.clipped)


def test_grpo_clips_gains_of_positive_and_negative_advantages() -> None:
    settings = LossSection(clip_low=0.2, clip_high=0.2)
    loss, gradient, clipped = run(settings, RATIOS, [1.0] * 6)
    assert loss == pytest.approx(-(0.5 + 0.9 + 1.0 + 1.1 + 1.2 + 1.2))
    assert gradient == pytest.approx([-0.5, -0.9, -1.0, -1.1, 0.0, 0.0])
    assert clipped == 2
    loss, gradient, clipped = run(settings, RATIOS, [-1.0] * 6)
    assert loss == pytest.approx(0.8 + 0.9 + 1.0 + 1.1 + 1.5 + 4.0)
    assert gradient == pytest.approx([0.0, 0.9, 1.0, 1.1, 1.5, 4.0])
    assert clipped == 1


def test_clip_higher_widens_only_the_upper_bound() -> None:
    loss, gradient, _ = run(LossSection(clip_low=0.2, clip_high=0.6), RATIOS, [1.0] * 6)
    assert loss == pytest.approx(-(0.5 + 0.9 + 1.0 + 1.1 + 1.5 + 1.6))
    assert gradient == pytest.approx([-0.5, -0.9, -1.0, -1.1, -1.5, 0.0])


def test_triplet_clipping_bounds_the_ratio_of_negative_advantages_from_above() -> None:
    settings = LossSection(clip_low=0.2, clip_high=0.2, clip_dual=3.0)
    loss, gradient, clipped = run(settings, RATIOS, [-2.0] * 6)
    assert loss == pytest.approx(2 * (0.8 + 0.9 + 1.0 + 1.1 + 1.5 + 3.0))
    assert gradient == pytest.approx([0.0, 1.8, 2.0, 2.2, 3.0, 0.0])
    assert clipped == 2
    positive = run(settings, RATIOS, [1.0] * 6)
    assert positive == run(LossSection(clip_low=0.2, clip_high=0.2), RATIOS, [1.0] * 6)


def test_the_truncated_importance_weight_multiplies_the_objective_of_the_proximal_ratio() -> None:
    settings = LossSection(importance_cap=2.0)
    loss, gradient, _ = run(
        settings, [1.0, 1.1, 1.5], [1.0, 1.0, 1.0], proximal_drift=[0.5, 3.0, 1.5]
    )
    assert loss == pytest.approx(-(0.5 * 1.0 + 2.0 * 1.1 + 1.5 * 1.2))
    assert gradient == pytest.approx([-0.5, -2.2, 0.0])
    with pytest.raises(ValueError, match="proximal"):
        run(settings, [1.0], [1.0])


def test_gspo_uses_one_geometric_mean_ratio_for_a_sequence() -> None:
    settings = LossSection(kind="gspo", clip_low=0.2, clip_high=0.2)
    # Sequence 0: sqrt(0.9 * 1.6) = 1.2 exactly at the bound; sequence 1: 0.5.
    ratios, sequences = [0.9, 1.5, 0.5], [0, 0, 1]
    mean = math.sqrt(0.9 * 1.5)
    loss, gradient, clipped = run(
        settings, ratios, [1.0, 1.0, -1.0], sequences=sequences, weights=[0.25, 0.25, 0.5]
    )
    assert loss == pytest.approx(-(0.5 * mean) + 0.5 * 0.8)
    assert gradient == pytest.approx([-0.25 * mean, -0.25 * mean, 0.0])
    assert clipped == 1


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    settings = LossSection(kind="cispo", clip_low=0.2, clip_high=0.2)
    loss, gradient, clipped = run(settings, RATIOS, [1.0] * 6)
    bounded = [0.8, 0.9, 1.0, 1.1, 1.2, 1.2]
    assert gradient == pytest.approx([-b for b in bounded])
    expected = -sum(b * math.log(0.1 * r) for b, r in zip(bounded, RATIOS, strict=True))
    assert loss == pytest.approx(expected)
    assert clipped == 3


def test_the_kl_penalty_is_the_k3_estimate() -> None:
    settings = LossSection(kl_coefficient=0.1)
    reference = [math.log(0.2), math.log(0.05)]
    loss, gradient, _ = run(settings, [1.0, 1.0], [0.0, 0.0], reference=reference)
    up, down = 2 - math.log(2) - 1, 0.5 - math.log(0.5) - 1
    assert loss == pytest.approx(0.1 * (up + down))
    assert gradient == pytest.approx([0.1 * (1 - 2), 0.1 * (1 - 0.5)])
    with pytest.raises(ValueError, match="reference"):
        run(settings, [1.0], [1.0])


def test_an_absurd_ratio_stays_finite() -> None:
    behaviour = torch.tensor([-500.0, -0.1])
    logprobs = torch.tensor([-0.1, -500.0], requires_grad=True)
    terms = TokenTerms(behaviour, torch.tensor([-1.0, 1.0]), torch.ones(2), torch.arange(2))
    parts = policy_loss(logprobs, terms, LossSection())
    parts.loss.backward()
    assert torch.isfinite(parts.loss) and logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_log_probabilities_follow_temperature_top_k_and_top_p() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    plain = token_logprobs(logits.clone(), torch.tensor([3]))
    assert float(plain) == pytest.approx(math.log(0.4), abs=1e-6)
    hot = token_logprobs(logits.clone(), torch.tensor([3]), temperature=2.0)
    total = sum(math.sqrt(p) for p in (0.1, 0.2, 0.3, 0.4))
    assert float(hot) == pytest.approx(math.log(math.sqrt(0.4) / total), abs=1e-6)
    top2 = token_logprobs(logits.clone(), torch.tensor([3]), top_k=2)
    assert float(top2) == pytest.approx(math.log(0.4 / 0.7), abs=1e-6)
    nucleus = token_logprobs(logits.clone(), torch.tensor([2]), top_p=0.6)
    assert float(nucleus) == pytest.approx(math.log(0.3 / 0.7), abs=1e-6)
    narrow = token_logprobs(logits.clone(), torch.tensor([3]), top_p=1e-9)
    assert float(narrow) == pytest.approx(0.0, abs=1e-6)


def test_a_sampled_token_outside_the_trainers_truncated_set_is_kept() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().requires_grad_()
    found = token_logprobs(logits.clone(), torch.tensor([0]), top_k=2)
    assert float(found.detach()) == pytest.approx(math.log(0.1 / 0.8), abs=1e-6)
    found.sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
