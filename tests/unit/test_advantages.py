"""Advantages against hand-computed values."""

import math

import numpy as np
import pytest

from dora.consumers.learner.batches import group_advantages
from dora.core.groups import has_signal


def test_grpo_divides_by_the_standard_deviation() -> None:
    # mean 1/4, population variance 3/16
    found = group_advantages([1.0, 0.0, 0.0, 0.0], divide_by_std=True)
    std = math.sqrt(3) / 4
    assert found == pytest.approx([0.75 / std, -0.25 / std, -0.25 / std, -0.25 / std], rel=1e-4)


def test_dr_grpo_only_subtracts_the_mean() -> None:
    found = group_advantages([1.0, 0.0, 0.0, 0.0], divide_by_std=False)
    assert found.tolist() == [0.75, -0.25, -0.25, -0.25]
    assert found.dtype == np.float32


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
@pytest.mark.parametrize("std", [True, False])
def test_equal_rewards_give_exactly_zero(reward: float, std: bool) -> None:
    assert not group_advantages([reward] * 7, divide_by_std=std).any()
    assert not has_signal([reward] * 7)
    assert has_signal([reward] * 6 + [reward + 1e-9])


def test_a_group_of_one_has_no_signal() -> None:
    assert group_advantages([3.0], divide_by_std=True).tolist() == [0.0]
