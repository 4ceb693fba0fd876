"""Whether a redone step is accepted."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dora.consumers.recovery import check_close, check_redone
from dora.errors import RunError
from dora.weights.tensors import write_tensors
from tests import run_records


def test_a_deterministic_redo_must_give_the_announced_weights() -> None:
    group = run_records.admission(0, 0)
    places = run_records.places_of([run_records.trajectory(group, s) for s in range(2)])
    step = replace(run_records.step(0, 0, [group], places), weights_checksum="a" * 64)
    assert check_redone(step, "a" * 64, deterministic=True, schedule="constant")
    assert not check_redone(step, "b" * 64, deterministic=False, schedule="constant")
    with pytest.raises(RunError, match=r"redoing step 0 -> 1.*bbbb.*aaaa"):
        check_redone(step, "b" * 64, deterministic=True, schedule="constant")
    with pytest.raises(RunError, match=r"the cosine schedule depends on it"):
        check_redone(step, "b" * 64, deterministic=True, schedule="cosine")


def test_other_redos_are_accepted_within_a_tolerance_of_the_published_weights(
    tmp_path: Path,
) -> None:
    published = {"a": torch.tensor([1.0, -2.0]), "b": torch.zeros(2)}
    write_tensors(tmp_path, published)
    near = {"a": torch.tensor([1.001, -2.0]), "b": torch.zeros(2)}
    assert check_close(near, tmp_path, 3) == pytest.approx(0.0005, rel=1e-2)
    far = {"a": torch.tensor([1.1, -2.0]), "b": torch.zeros(2)}
    with pytest.raises(RunError, match=r"version 3 differ from the published ones by 0\.05"):
        check_close(far, tmp_path, 3)
    broken = {"a": torch.tensor([float("nan"), -2.0]), "b": torch.zeros(2)}
    with pytest.raises(RunError, match="version 3 differ"):
        check_close(broken, tmp_path, 3)
    with pytest.raises(RunError, match="has b, the trainer does not"):
        check_close({"a": published["a"]}, tmp_path, 3)
