"""Numbers that follow from the steps' metrics, worked out by hand."""

import pytest

from dora.core.step_metrics import Success, idle_share, mismatch_mean, success, total


def test_success_is_that_of_evaluations_where_there_are_any() -> None:
    steps = [{"success_rate": 0.25}, {}, {"success_rate": 0.75}]
    assert success([0.1, 0.5, 0.4], steps) == Success(0.1, 0.4, "evaluation")
    assert success([0.1], []) == Success(0.1, 0.1, "evaluation")
    assert success([], steps) == Success(0.25, 0.75, "training")
    assert success([], steps[:2]) == Success(0.25, None, "training")
    assert success([], []) == Success(None, None, "training")


def test_the_idle_share_is_of_waiting_training_and_publishing() -> None:
    steps = [{"idle_seconds": 2.0, "train_seconds": 5.0}, {"publish_seconds": 1.0}]
    assert idle_share(steps) == pytest.approx(0.25)
    assert idle_share([]) is None
    assert total(steps, "train_seconds") == 5.0


def test_the_mismatch_is_weighted_by_tokens() -> None:
    steps = [
        {"logprob_mismatch_mean": 0.1, "tokens": 10.0},
        {"tokens": 1_000.0},
        {"logprob_mismatch_mean": 0.4, "tokens": 30.0},
    ]
    assert mismatch_mean(steps) == pytest.approx(0.325)
    assert mismatch_mean(steps[1:2]) is None
