"""Which groups the batch builder picks, and how it treats trajectories of several versions."""

from dataclasses import replace

import pytest

from dora.config.trainer import LossSection
from dora.consumers.learner.batches import batch_metrics
from dora.consumers.trainer.batch_builder import (
    PARTS_KEPT,
    BatchBuilder,
    ReadyGroup,
    part_means,
    prepare_samples,
)
from dora.core import ring
from dora.core.state import RunState
from dora.core.window import Window
from dora.errors import RecordError
from dora.schemas.records import GroupRef, Trajectory, VersionRun
from tests.unit.test_batches import trajectory
from tests.unit.test_state import SIZE, admission, entry

LOSS = LossSection(drop_no_signal=True)


def mixed(*versions: int) -> Trajectory:
    mask = [0, *(1 for _ in versions)]
    made = trajectory(list(range(len(mask))), mask, 1.0)
    return replace(made, version_runs=tuple(VersionRun(version, 1) for version in versions))


def test_tokens_of_another_version_are_refused_unless_the_schedule_is_partial() -> None:
    with pytest.raises(RecordError, match=r"tokens of version 1 in a group of version 0$"):
        prepare_samples([mixed(0, 1)], 0, 40, LOSS)
    first, second = prepare_samples([mixed(0, 1, 2), mixed(0, 0)], 0, 40, LOSS, 2)
    assert (first.mixed, second.mixed) == (True, False)
    assert first.version == 0
    assert batch_metrics([first, second], 2, 1.0)["mixed_version_share"] == 0.5


def test_tokens_of_a_version_that_is_not_committed_or_older_than_the_group_are_refused() -> None:
    with pytest.raises(RecordError, match="tokens of version 3 in a group of version 0 at version"):
        prepare_samples([mixed(0, 3)], 0, 40, LOSS, 2)
    with pytest.raises(RecordError, match="tokens of version 0 in a group of version 1 at version"):
        prepare_samples([mixed(1, 0)], 1, 40, LOSS, 2)


def take(builder: BatchBuilder, ordinal: int, rewards: tuple[float, float]) -> None:
    group = ring.train_group_id(ordinal)
    for sample, reward in enumerate(rewards):
        made = trajectory([1, 2, 3], [0, 1, 1], reward, sample=sample)
        named = replace(
            made,
            group_id=group,
            ordinal=ordinal,
            trajectory_id=ring.trajectory_id(group, sample),
        )
        builder.add_trajectory(named, 0, 10 * ordinal + sample)


def test_a_streamed_step_gets_groups_as_they_finish_and_is_told_when_it_is_complete() -> None:
    state = RunState(Window(0, 2), SIZE)
    builder = BatchBuilder(state, LOSS, 40)
    state.start()
    for ordinal in range(2):
        state.admit(admission(ordinal))
    taken: list[ReadyGroup] = []
    assert builder.next_streamed(taken).blocked is not None
    take(builder, 1, (0.0, 1.0))
    first = builder.next_streamed(taken)
    assert first.blocked is None and first.next_group is not None
    assert first.next_group.ref.ordinal == 1
    taken.append(first.next_group)
    assert builder.next_streamed(taken).blocked is not None
    take(builder, 0, (1.0, 1.0))
    aside = builder.next_streamed(taken)
    assert aside.blocked is not None
    assert [ref.reason for ref in aside.set_aside] == ["no_signal"]
    aside_step = entry(0, 0, (), aside.set_aside)
    state.commit(aside_step)
    builder.drop_committed(aside_step)
    state.admit(admission(2))
    take(builder, 2, (1.0, 0.0))
    second = builder.next_streamed(taken)
    assert second.next_group is not None
    taken.append(second.next_group)
    whole = builder.next_streamed(taken)
    assert whole.blocked is None and whole.next_group is None
    assert [prepared.ref.ordinal for prepared in whole.batch] == [1, 2], "in the order taken"


def test_a_group_whose_samples_have_different_prompts_is_set_aside() -> None:
    state = RunState(Window(0, 2), SIZE)
    builder = BatchBuilder(state, LOSS, 40)
    state.start()
    state.admit(admission(0))
    for sample, prompt in enumerate((1, 5)):
        made = trajectory([prompt, 2, 3], [0, 1, 1], float(sample), sample=sample)
        identity = ring.trajectory_id("g0", sample)
        named = replace(made, group_id="g0", ordinal=0, trajectory_id=identity)
        builder.add_trajectory(named, 0, sample)
    (aside,) = builder.next_batch().set_aside
    assert aside.reason == "mixed_prompt: its 2 samples have 2 prompts"


def test_reward_parts_of_a_batch_are_means_over_the_samples_that_have_them() -> None:
    ref = GroupRef("g0", 0, 0, ())
    groups = [
        ReadyGroup(ref, (), ({"form": 1.0, "length": 2.0}, {"form": 0.0})),
        ReadyGroup(ref, (), ({"form": 0.5},)),
    ]
    assert part_means(groups) == {"reward_part_form": 0.5, "reward_part_length": 2.0}
    many = [ReadyGroup(ref, (), ({f"part{n:03}": 1.0 for n in range(100)},))]
    assert len(part_means(many)) == PARTS_KEPT
