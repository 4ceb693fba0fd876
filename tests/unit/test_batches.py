"""Samples from records, and micro-batches whose weights hold the whole batch's denominators."""

import numpy as np
import pytest

from dora.config.trainer import LossSection, OptimizerSection
from dora.consumers.learner.batches import (
    MicroBatch,
    Sample,
    build_shard,
    denominator,
    ends_part,
    group_samples,
    learning_rate,
    micro_batches,
    pack,
    plan_update,
    split_groups,
    token_weights,
    unit_weights,
)
from dora.errors import RecordError
from dora.schemas.records import Trajectory, VersionRun, pack_logprobs, pack_tokens
from tests import factories


def trajectory(
    tokens: list[int], mask: list[int], reward: float | None, finish: str = "stop", sample: int = 0
) -> Trajectory:
    return factories.trajectory(
        factories.admission(0),
        sample,
        token_ids=pack_tokens(tokens),
        mask=bytes(mask),
        logprobs=pack_logprobs([-0.5 * i * m for i, m in enumerate(mask)]),
        version_runs=(VersionRun(0, sum(mask)),),
        finish_reason=finish,
        reward=reward,
        error=None if reward is not None else "verifier failed",
    )


def sample(length: int, generated: int, advantage: float = 1.0, truncated: bool = False) -> Sample:
    positions = np.arange(length - generated, length)
    return Sample(
        trajectory_id=f"{length}",
        version=0,
        token_ids=np.arange(length, dtype=np.int32),
        positions=positions,
        behaviour=-np.ones(generated, dtype=np.float32),
        reward=1.0,
        advantage=advantage,
        truncated=truncated,
    )


def whole(
    samples: list[Sample], settings: LossSection, budget: int = 1000
) -> tuple[MicroBatch, ...]:
    """The micro-batches of a single rank."""
    plan = plan_update(samples, settings, budget, 16, world=1)
    return build_shard(plan.ranks[0], samples, plan.weights).batches


def test_a_sample_holds_only_generated_tokens_of_every_turn() -> None:
    first, second = group_samples(
        [
            trajectory([5, 6, 7, 8, 9, 4], [0, 1, 1, 0, 0, 1], 1.0),
            trajectory([5, 6, 7], [0, 0, 1], 0.0, "length", sample=1),
        ],
        LossSection(advantage_std=False),
    )
    assert first.positions.tolist() == [1, 2, 5]
    assert first.behaviour.tolist() == [-0.5, -1.0, -2.5]
    assert (first.advantage, second.advantage) == (0.5, -0.5)
    assert second.truncated and not first.truncated


def test_trajectories_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(RecordError, match="g0/0 has no reward"):
        group_samples([trajectory([1, 2], [0, 1], None)], LossSection())
    with pytest.raises(RecordError, match="starts with a generated token"):
        group_samples([trajectory([1, 2], [1, 1], 1.0)], LossSection())


def test_packing_respects_the_budget_with_padding_and_is_deterministic() -> None:
    lengths = [5, 9, 3, 9, 40, 4, 1]
    batches = pack(lengths, 20)
    assert batches == [[4], [1, 3], [0, 5, 2, 6]]
    assert pack(lengths, 10_000) == [[4, 1, 3, 0, 5, 2, 6]]
    assert pack([], 10) == []


@pytest.mark.parametrize("budget", [1, 16, 30, 1000])
def test_weights_add_up_to_one_whatever_the_micro_batches(budget: int) -> None:
    samples = [sample(8, 3), sample(10, 5), sample(6, 2)]
    for normalization, total in (("token", 1.0), ("sequence", 1.0), ("constant", 10 / (3 * 16))):
        settings = LossSection(normalization=normalization)
        parts = whole(samples, settings, budget)
        found = sum(float(part.weights.astype(np.float64).sum()) for part in parts)
        assert found == pytest.approx(total, rel=1e-6)


def test_each_normalisation_weighs_tokens_as_its_paper_says() -> None:
    samples = [sample(8, 3), sample(10, 5)]
    token = token_weights(samples, LossSection(normalization="token"), 16)
    assert token == [1 / 8, 1 / 8]
    sequence = token_weights(samples, LossSection(normalization="sequence"), 16)
    assert sequence == [1 / (2 * 3), 1 / (2 * 5)]
    constant = token_weights(samples, LossSection(normalization="constant"), 16)
    assert constant == [1 / 32, 1 / 32]


def test_samples_without_signal_are_not_computed_but_count_in_the_denominator() -> None:
    samples = [sample(8, 3), sample(10, 5, advantage=0.0)]
    (batch,) = whole(samples, LossSection())
    assert batch.samples == (0,)
    assert batch.weights.tolist() == pytest.approx([1 / 8] * 3)
    with_kl = whole(samples, LossSection(kl_coefficient=0.1))
    assert sorted(with_kl[0].samples) == [0, 1]


def test_masked_overlong_samples_count_nowhere() -> None:
    samples = [sample(8, 3), sample(10, 5, truncated=True)]
    settings = LossSection(mask_overlong=True)
    (batch,) = whole(samples, settings)
    assert batch.samples == (0,) and batch.weights.tolist() == pytest.approx([1 / 3] * 3)
    assert whole(samples[1:], settings) == ()


def test_a_micro_batch_points_at_the_logits_that_predict_each_generated_token() -> None:
    samples = [sample(4, 2), sample(6, 1)]
    (batch,) = micro_batches(samples, 1000)
    assert batch.samples == (1, 0)
    assert batch.token_ids.shape == (2, 6) and batch.token_ids[1].tolist() == [0, 1, 2, 3, 0, 0]
    where = zip(batch.rows.tolist(), batch.places.tolist(), batch.targets.tolist(), strict=True)
    assert list(where) == [(0, 4, 5), (1, 6 + 1, 2), (1, 6 + 2, 3)]


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
def test_weights_without_the_denominator_are_those_of_the_batch_once_divided(
    normalization: str,
) -> None:
    samples = [sample(8, 3), sample(10, 5, truncated=True), sample(6, 2, advantage=0.0)]
    for masked in (False, True):
        settings = LossSection(normalization=normalization, mask_overlong=masked)
        divided = np.array(unit_weights(samples, settings, 16)) / denominator(samples, settings)
        assert divided == pytest.approx(token_weights(samples, settings, 16))


def test_groups_divide_into_nearly_equal_updates() -> None:
    assert split_groups([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]
    assert split_groups([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert split_groups([1], 2) == [[1]]
    with pytest.raises(ValueError, match="do not divide"):
        split_groups([], 2)


def streamed_parts(tokens: list[int], updates: int, most: int, budget: int | None) -> list[int]:
    sizes, part, seen = [0], 0, 0
    for count, each in enumerate(tokens, 1):
        sizes[-1] += 1
        seen += each
        if ends_part(part, updates, (count, most), (seen, budget)):
            sizes.append(0)
            part += 1
    return [size for size in sizes if size]


def test_a_streamed_step_has_the_same_optimizer_batches_as_a_whole_one() -> None:
    for updates in (1, 2, 3):
        whole_parts = [len(part) for part in split_groups(range(6), updates)]
        assert streamed_parts([1] * 6, updates, 6, None) == whole_parts


def test_a_streamed_step_with_a_budget_ends_a_part_at_its_share_of_the_tokens() -> None:
    assert streamed_parts([10, 10, 10, 10], 2, 6, 40) == [2, 2]
    assert streamed_parts([30, 5, 5], 2, 6, 40) == [1, 2]
    assert streamed_parts([5, 5, 5, 30], 2, 6, 40) == [3, 1]
    assert streamed_parts([50], 2, 6, 40) == [1]
    assert streamed_parts([50, 1, 1], 3, 6, 40) == [1, 1, 1]


def test_the_learning_rate_warms_up_and_decays() -> None:
    def rates(**settings: object) -> list[float]:
        section = OptimizerSection.model_validate({"learning_rate": 1.0, **settings})
        return [learning_rate(section, update, 8) for update in range(8)]

    assert rates() == [1.0] * 8
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(warmup_steps=4, schedule="linear")[4:] == [1.0, 0.75, 0.5, 0.25]
    cosine = rates(schedule="cosine")
    assert cosine[0] == 1.0 and cosine[4] == pytest.approx(0.5) and cosine == sorted(cosine)[::-1]
