"""Whether redone weights are accepted, and what is said about them."""

import math
from typing import Any

import pytest
import torch

from dora.config.trainer import RecoverySection, TrainerSection
from dora.consumers.trainer.recovery import Deviation, check_allowed, largest_difference
from dora.errors import RunError

ANNOUNCED = {"a": torch.tensor([1.0, -2.0]), "b": torch.zeros(2), "c": torch.zeros(0)}


def check(
    largest: float | None,
    *,
    deterministic: bool,
    recovery: dict[str, Any] | None = None,
) -> None:
    deviation = Deviation(4, "a" * 64, "b" * 64, largest, "lm_head.weight")
    trainer = TrainerSection.model_validate({"steps": 9, "deterministic": deterministic})
    check_allowed(deviation, trainer, RecoverySection.model_validate(recovery or {}))


def test_a_deterministic_redo_must_give_the_announced_weights_bit_by_bit() -> None:
    with pytest.raises(
        RunError,
        match=r"redoing step 3 -> 4.*bbbb.*aaaa.* 1e-09 of the largest.*lm_head\.weight.*"
        r"bit-identical(.|\n)*recovery\.on_mismatch",
    ):
        check(1e-9, deterministic=True)
    with pytest.raises(RunError, match="the announced ones are not kept"):
        check(None, deterministic=True)
    check(0.5, deterministic=True, recovery={"on_mismatch": "accept"})


def test_other_redos_are_accepted_within_the_tolerance() -> None:
    check(0.009, deterministic=False)
    with pytest.raises(RunError, match=r"0\.02 of the largest.*0\.01 is allowed"):
        check(0.02, deterministic=False)
    check(0.02, deterministic=False, recovery={"tolerance": 0.05})
    check(math.inf, deterministic=False, recovery={"on_mismatch": "accept"})
    with pytest.raises(RunError):
        check(math.inf, deterministic=False, recovery={"tolerance": 1e6})


def test_the_largest_difference_is_relative_to_the_largest_weight_of_its_tensor() -> None:
    near = ANNOUNCED | {"a": torch.tensor([1.001, -2.0])}
    assert largest_difference(near, ANNOUNCED) == (pytest.approx(0.0005, rel=1e-2), "a")
    assert largest_difference(ANNOUNCED, ANNOUNCED) == (0.0, None)
    broken = ANNOUNCED | {"a": torch.tensor([float("nan"), -2.0])}
    assert largest_difference(broken, ANNOUNCED) == (math.inf, "a")
    with pytest.raises(RunError, match="b is in only one"):
        largest_difference({"a": ANNOUNCED["a"], "c": ANNOUNCED["c"]}, ANNOUNCED)
