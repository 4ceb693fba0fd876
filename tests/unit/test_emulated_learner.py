"""The trainer that waits instead of computing."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dora.config import Config
from dora.consumers.learner.batches import Sample
from dora.consumers.learner.emulated_learner import EmulatedLearner
from dora.errors import PolicyError, WeightsError
from dora.weights.models import emulated_vocabulary
from dora.weights.tensors import plain_checksum, write_plain

SCALE = 0.5


class VirtualTime:
    def __init__(self) -> None:
        self.now = 10.0
        self.beats = 0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def beat(self) -> None:
        self.beats += 1


def configured(**changes: object) -> Config:
    sections: dict[str, object] = {
        "run": {"name": "r"},
        "policy": {"model": "emulated"},
        "task": {"kind": "synthetic"},
        "window": {"groups_per_step": 4, "group_size": 2},
        "rollout": {"engine": "emulated", "emulated": {"time_scale": SCALE}},
        "trainer": {
            "steps": 1,
            "engine": "emulated",
            "emulated": {"step_seconds": 8.0, "seconds_per_token": 0.01, "publish_seconds": 3.0},
        },
    }
    return Config.model_validate(sections | changes)


def learner_of(time: VirtualTime, config: Config | None = None) -> EmulatedLearner:
    return EmulatedLearner(
        config or configured(), progress=time.beat, clock=time.clock, sleep=time.sleep
    )


def sample(name: str, tokens: int, reward: float = 1.0) -> Sample:
    return Sample(
        trajectory_id=name,
        version=3,
        token_ids=np.zeros(tokens + 1, dtype=np.int32),
        positions=np.arange(1, tokens + 1),
        behaviour=np.zeros(tokens, dtype=np.float32),
        reward=reward,
        advantage=0.0,
        truncated=False,
    )


GROUPS: Sequence[Sequence[Sample]] = [
    [sample("a/0", 100), sample("a/1", 300)],
    [sample("b/0", 200), sample("b/1", 200)],
]


def test_a_step_takes_its_time_with_signs_of_life() -> None:
    time = VirtualTime()
    learner = learner_of(time)
    metrics = learner.update(GROUPS, 3)
    assert time.now - 10.0 == pytest.approx(SCALE * (8.0 + 800 * 0.01))
    assert time.beats >= 32
    assert (metrics["tokens"], metrics["trajectories"], metrics["staleness_max"]) == (800, 4, 0)
    assert learner.updates == 1


def test_a_streamed_step_takes_the_same_time_group_by_group_and_ends_in_the_same() -> None:
    time, whole = VirtualTime(), learner_of(VirtualTime())
    learner = learner_of(time)
    whole.update(GROUPS, 3)
    learner.begin(3)
    learner.add(GROUPS[0])
    assert time.now - 10.0 == pytest.approx(SCALE * (8.0 / 4 + 4.0))
    learner.add(GROUPS[1])
    learner.finish()
    assert time.now - 10.0 == pytest.approx(SCALE * (8.0 + 8.0))
    assert learner.weights_checksum() == whole.weights_checksum()


def test_weights_tell_what_was_trained_and_in_which_order() -> None:
    checksums = set()
    for groups in (GROUPS, GROUPS[::-1], GROUPS[:1], [[sample("a/0", 100, reward=0.0)]]):
        learner = learner_of(VirtualTime())
        checksums.add(learner.weights_checksum())
        learner.update(groups, 0)
        checksums.add(learner.weights_checksum())
    assert len(checksums) == 5


def test_weights_tell_with_which_learning_rate_and_loss_they_were_trained() -> None:
    checksums = set()
    for change in ({}, {"optimizer": {"learning_rate": 0.5}}, {"loss": {"kind": "gspo"}}):
        learner = learner_of(VirtualTime())
        learner.configure(configured(trainer={"steps": 1, "engine": "emulated", **change}))
        metrics = learner.update(GROUPS, 0)
        assert metrics["learning_rate"] == (0.5 if "optimizer" in change else 1e-6)
        checksums.add(learner.weights_checksum())
    assert len(checksums) == 3


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    one, other = learner_of(VirtualTime()), learner_of(VirtualTime())
    one.update(GROUPS, 0)
    one.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    assert other.updates == 1
    fresh = learner_of(VirtualTime())
    fresh.load_checkpoint(tmp_path, updates=0)
    assert fresh.updates == 0 and fresh.weights_checksum() == other.weights_checksum()
    one.update(GROUPS, 1)
    other.update(GROUPS, 1)
    assert one.weights_checksum() == other.weights_checksum()


@pytest.mark.parametrize("content", [None, "{", '{"state": "ab", "updates": 1}', "[]"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "emulated.json").write_text(content)
    with pytest.raises(WeightsError, match=r"emulated\.json"):
        learner_of(VirtualTime()).load_checkpoint(tmp_path)


def test_log_probabilities_are_uniform_and_publishing_takes_its_time() -> None:
    time = VirtualTime()
    learner = learner_of(time)
    assert learner.sequence_logprobs([1, 2, 3]) == pytest.approx([-math.log(32_000)] * 2)
    assert time.now == 10.0
    (tensor,) = learner.export_state().values()
    assert tensor.size == learner.parameters
    assert time.now - 10.0 == pytest.approx(SCALE * 3.0)


def test_weights_that_no_engine_could_load_are_not_trained() -> None:
    with pytest.raises(ValueError, match=r"rollout\.engine = vllm could load"):
        configured(rollout={"engine": "vllm"}, task={"kind": "reasoning-gym", "name": "x"})


def test_a_vocabulary_is_all_that_is_needed_of_a_model(tmp_path: Path) -> None:
    assert emulated_vocabulary("emulated") == 32_000
    (tmp_path / "config.json").write_text('{"vocab_size": 77}')
    assert emulated_vocabulary(str(tmp_path)) == 77
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(PolicyError, match="no usable vocab_size"):
        emulated_vocabulary(str(tmp_path))
    with pytest.raises(PolicyError, match=r"config\.json"):
        emulated_vocabulary(str(tmp_path / "none"))


def test_plain_tensors_are_stored_as_those_of_torch_are(tmp_path: Path) -> None:
    import torch

    from dora.weights import tensors

    state = learner_of(VirtualTime()).export_state()
    same = {name: torch.from_numpy(array.copy()) for name, array in state.items()}
    assert plain_checksum(state) == tensors.weights_checksum(same)
    write_plain(tmp_path, state)
    stored = tensors.read_tensors(tmp_path)
    assert tensors.weights_checksum(stored) == plain_checksum(state)
