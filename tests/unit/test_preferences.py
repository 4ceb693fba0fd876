"""Of each group its best response, or its best and its worst; the others are counted."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dora.consumers.export.preferences import Messages, PreferenceTarget, choose, schema_of
from dora.core.preferences import Choice
from dora.errors import TaskError, UsageError
from dora.schemas.records import Trajectory, pack_tokens
from tests.exported_rows import Broken, broken_rows, group, rows_of, source
from tests.factories import run_started

EOS = 2
"""The token at which the runs of `factories` stop."""


class Letters:
    """A text of a letter for each token."""

    def prompt(self, token_ids: Sequence[int]) -> str:
        return self.response(token_ids)

    def response(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)

    def tokens(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def messages(self, ordinal: int, prompt: Sequence[int]) -> Messages:
        if ordinal == 99:
            raise TaskError("another prompt")
        return [{"role": "user", "content": f"question {ordinal}"}]


def silent(text: str) -> None:
    """Nobody listens."""


def answered(of: Trajectory, tokens: Sequence[int], finish: str = "stop") -> Trajectory:
    """The trajectory with another response of three tokens."""
    return replace(of, token_ids=pack_tokens([7, 8, *tokens]), finish_reason=finish)  # type: ignore[arg-type]


def picked(
    trajectories: Sequence[Trajectory], choice: Choice
) -> tuple[dict[str, tuple[str, ...]], Counter[str]]:
    """By group the trajectories of its example, and the reasons of the groups without one."""
    reasons: Counter[str] = Counter()
    found = dict(choose(iter([rows_of(trajectories)]), choice).examples(reasons))
    return {name: tuple(c.trajectory_id for c in each) for name, each in found.items()}, reasons


def test_the_best_response_is_imitated_and_the_first_of_equals() -> None:
    rows = [*group(0, 1, [0.0, 1.0, 1.0]), *group(0, 0, [0.5, 0.25])]
    found, reasons = picked(rows, Choice("sft"))
    assert list(found.items()) == [("g0", ("g0/0",)), ("g1", ("g1/1",))]  # by their prompts
    assert not reasons


def test_a_pair_is_the_best_and_the_worst() -> None:
    rows = group(0, 0, [0.5, 0.0, 1.0, 0.0])
    rows = [answered(each, [1, 1 + index, 2]) for index, each in enumerate(rows)]
    found, _ = picked(rows, Choice("dpo"))
    assert found == {"g0": ("g0/2", "g0/1")}


@pytest.mark.parametrize(
    ("choice", "rewards", "reason"),
    [
        (Choice("dpo"), [1.0, 1.0], "without_difference"),
        (Choice("dpo", min_margin=0.5), [0.6, 0.2], "below_min_margin"),
        (Choice("dpo", min_reward=0.7), [0.6, 0.2], "below_min_reward"),
        (Choice("sft", min_reward=0.7), [0.6, 0.2], "below_min_reward"),
        (Choice("sft"), [None, None], "not_scored"),
    ],
)
def test_a_group_that_gives_no_example_is_counted_under_its_reason(
    choice: Choice, rewards: list[float | None], reason: str
) -> None:
    rows = [answered(each, [1, 1 + i, 2]) for i, each in enumerate(group(0, 0, rewards))]
    rows = [
        replace(each, finish_reason="stop" if each.reward is not None else "error") for each in rows
    ]
    found, reasons = picked(rows, choice)
    assert not found and reasons == {reason: 1}


def test_the_same_response_with_two_rewards_is_no_preference() -> None:
    found, reasons = picked(group(0, 0, [0.0, 1.0]), Choice("dpo"))
    assert not found and reasons == {"without_difference": 1}


def test_responses_that_differ_only_in_their_end_are_no_preference() -> None:
    best, worst = group(0, 0, [1.0, 0.0])
    rows = [answered(best, [1, 3, EOS]), replace(
        worst, token_ids=pack_tokens([7, 8, 1, 3]), mask=b"\0\0\1\1", finish_reason="length",
        logprobs=worst.logprobs[:16], version_runs=(replace(worst.version_runs[0], tokens=2),),
    )]  # fmt: skip
    found, reasons = picked(rows, Choice("dpo"))
    assert not found and reasons == {"without_difference": 1}


def test_a_response_that_was_cut_off_is_not_imitated_but_may_be_rejected() -> None:
    first, second, third = group(0, 0, [0.5, 1.0, 0.0])
    rows = [
        answered(first, [1, 1, 2]),
        answered(second, [1, 2, 3], "length"),
        answered(third, [4, 5, 6], "length"),
    ]
    assert picked(rows, Choice("sft"))[0] == {"g0": ("g0/0",)}
    assert picked(rows, Choice("dpo"))[0] == {"g0": ("g0/0", "g0/2")}
    assert picked(rows[1:], Choice("sft"))[1] == {"all_cut_off": 1}


def test_held_out_prompts_are_never_trained_on() -> None:
    rows = [replace(each, purpose="eval") for each in group(0, 0, [0.0, 1.0])]
    assert picked(rows, Choice("sft")) == ({}, Counter())


def test_turns_of_an_environment_are_imitated_by_nobody() -> None:
    of = group(0, 0, [1.0])[0]
    turns = replace(of, mask=b"\0\0\1\0\1", version_runs=(replace(of.version_runs[0], tokens=2),))
    assert picked([turns], Choice("sft"))[1] == {"with_turns_of_others": 1}
    found = dict(choose(iter([rows_of([turns])]), Choice("sft", "tokens")).examples(Counter()))
    assert found["g0"][0].mask == [True, False, True]


def target(directory: Path, choice: Choice) -> PreferenceTarget:
    return PreferenceTarget(directory, run_started(), silent, choice=choice, texts=Letters())


def examples(directory: Path, version: int = 0) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = pq.read_table(
        directory / f"version={version}" / "train.parquet", partitioning=None
    ).to_pylist()
    return rows


def best_and_worst() -> list[Trajectory]:
    worst, best = group(0, 0, [0.0, 1.0])
    return [answered(worst, [9, 9, 9], "length"), answered(best, [1, 3, EOS])]


def test_a_data_set_of_texts_ends_before_the_token_that_ends_a_response(tmp_path: Path) -> None:
    with target(tmp_path, Choice("dpo")) as made:
        made.write(source(0), iter([rows_of(best_and_worst())]))
        assert made.details == {"examples": 1}
    assert examples(tmp_path) == [
        {
            "prompt": "hi", "chosen": "bd", "rejected": "jjj",
            "run": "r", "policy_version": 0, "group_id": "g0",
            "chosen_trajectory_id": "g0/1", "chosen_reward": 1.0,
            "rejected_trajectory_id": "g0/0", "rejected_reward": 0.0,
        }
    ]  # fmt: skip


def test_a_conversation_ends_with_the_assistant(tmp_path: Path) -> None:
    with target(tmp_path, Choice("sft", "chat")) as made:
        made.write(source(0), iter([rows_of(best_and_worst())]))
    (row,) = examples(tmp_path)
    assert row["prompt"] == [{"role": "user", "content": "question 0"}]
    assert row["completion"] == [{"role": "assistant", "content": "bd"}]


def test_token_ids_are_those_of_the_policy_with_labels_where_it_generated(tmp_path: Path) -> None:
    choice = Choice("sft", "tokens")
    with PreferenceTarget(tmp_path, run_started(), silent, choice=choice, texts=None) as made:
        made.write(source(0), iter([rows_of(best_and_worst())]))
    (row,) = examples(tmp_path)
    assert row["input_ids"] == [7, 8, 1, 3, EOS]
    assert row["labels"] == [-100, -100, 1, 3, EOS]


def test_texts_that_give_other_tokens_are_counted(tmp_path: Path) -> None:
    class Merging(Letters):
        def tokens(self, text: str) -> list[int]:
            return [ord(letter) - ord("a") for letter in text.replace("bd", "z")]

    made = PreferenceTarget(tmp_path, run_started(), silent, choice=Choice("sft"), texts=Merging())
    with made:
        made.write(source(0), iter([rows_of(best_and_worst())]))
    assert made.details == {"examples": 1, "tokenised_otherwise": 1}


def test_a_version_that_cannot_be_read_to_its_end_is_not_there(tmp_path: Path) -> None:
    with target(tmp_path, Choice("sft")) as made, pytest.raises(Broken):
        made.write(source(0), broken_rows(0))
    assert list(tmp_path.rglob("*.parquet")) == []
    with target(tmp_path, Choice("sft", "chat")) as made:
        rows = [replace(each, ordinal=99) for each in best_and_worst()]
        with pytest.raises(TaskError, match="another prompt"):
            made.write(source(0), iter([rows_of(rows)]))
    assert list(tmp_path.rglob("*.parquet")) == []


def test_a_directory_never_mixes_two_choices(tmp_path: Path) -> None:
    with target(tmp_path, Choice("dpo")) as made:
        made.write(source(0), iter([rows_of(best_and_worst())]))
    with pytest.raises(UsageError, match=r"chosen otherwise: min_margin = 0\.0"):
        target(tmp_path, Choice("dpo", min_margin=0.5))
    with pytest.raises(UsageError, match="kind = dpo"):
        target(tmp_path, Choice("sft"))
    with target(tmp_path, Choice("dpo")) as made:
        assert made.exported == {0: source(0)}


def test_a_version_without_an_example_is_a_file_without_rows(tmp_path: Path) -> None:
    with target(tmp_path, Choice("dpo")) as made:
        made.write(source(0), iter([rows_of(group(0, 0, [1.0, 1.0]))]))
        assert made.details == {"examples": 0, "without_difference": 1}
    assert examples(tmp_path) == []
    file = tmp_path / "version=0" / "train.parquet"
    assert pq.read_schema(file).remove_metadata() == schema_of(Choice("dpo"))
    assert json.loads(pq.read_schema(file).metadata[b"dora.choice"])["kind"] == "dpo"


def test_versions_without_examples_are_loaded_with_the_others(tmp_path: Path) -> None:
    from datasets import load_dataset

    home = tmp_path / "dpo"
    with target(home, Choice("dpo")) as made:
        made.write(source(0), iter([rows_of(group(0, 0, [1.0, 1.0]))]))
        made.write(source(1), iter([rows_of(best_and_worst())]))
        made.write(source(2), iter([rows_of(group(2, 1, [0.0, 0.0]))]))
    loaded = load_dataset(str(home), cache_dir=str(tmp_path / "cache"))["train"]
    assert loaded["group_id"][:] == ["g0"]
