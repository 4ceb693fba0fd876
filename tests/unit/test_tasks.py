"""Prompt streams: the same everywhere, disjoint halves, and bad data refused by name."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora.config import Config
from dora.errors import ChangedDataError, TaskError
from dora.producers.tasks.base import Task, is_held_out
from dora.producers.tasks.gym_library import load_dataset
from dora.producers.tasks.kinds import create_task, permuted


class Characters:
    """A tokenizer with one token per character, and a visible chat format."""

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        return (1, *map(ord, text)) if special_tokens else tuple(map(ord, text))

    def chat(self, messages: Any) -> str:
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]"


def configure(home: Path, seed: int = 0, evaluation: int = 0, **task: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "tasks", "seed": seed},
            "policy": {"model": "unused"},
            "task": task,
            "trainer": {"steps": 1},
            "evaluation": {"prompts": evaluation},
            "home": home,
        }
    )


def gym(home: Path = Path(), seed: int = 0, evaluation: int = 0, **task: Any) -> Task:
    section = {"kind": "reasoning-gym", "name": "spell_backward", **task}
    return create_task(configure(home, seed, evaluation, **section), Characters())


def lines(path: Path, items: list[Any]) -> None:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))


def jsonl(home: Path, seed: int = 0, evaluation: int = 0, **task: Any) -> Task:
    section = {"kind": "jsonl", "path": "data.jsonl", "verifier": "unused:unused", **task}
    return create_task(configure(home, seed, evaluation, **section), Characters())


def numbered(home: Path, count: int) -> list[dict[str, str]]:
    items = [{"prompt": f"question {n}", "answer": str(n)} for n in range(count)]
    lines(home / "data.jsonl", items)
    return items


def test_a_reasoning_gym_prompt_is_its_question() -> None:
    prompt = gym().prompt(0, "train")
    word = prompt.item["metadata"]["word"]
    assert prompt.text == f"Spell this word backward (example: sun -> nus): {word}"
    assert prompt.item["answer"] == word[::-1]
    assert prompt.token_ids == (1, *map(ord, prompt.text))


def test_two_instances_give_the_same_prompts_in_any_order() -> None:
    first, second = gym(), gym()
    ordinals = [0, 1, 4_999, 5_000, 123_456]
    forward = [first.prompt(n, "train") for n in ordinals]
    assert [second.prompt(n, "train") for n in reversed(ordinals)] == forward[::-1]


def test_seeds_give_different_prompts() -> None:
    tasks = [gym(seed=0), gym(seed=1)]
    texts = [[task.prompt(n, "train").text for n in range(50)] for task in tasks]
    assert len(set(texts[0]) & set(texts[1])) < 10


def test_training_and_held_out_prompts_share_no_text() -> None:
    task = gym(evaluation=1)
    train = {task.prompt(n, "train").text for n in range(500)}
    held_out = {task.prompt(n, "eval").text for n in range(200)}
    assert len(train) > 450
    assert not train & held_out


@settings(deadline=None)
@given(st.text(max_size=40), st.floats(0, 0.99), st.floats(0, 0.99))
def test_a_larger_held_out_share_only_adds_prompts(text: str, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert is_held_out(text, large) or not is_held_out(text, small)


def test_evaluation_without_a_held_out_share_is_refused() -> None:
    with pytest.raises(TaskError, match=r"held_out_fraction is 0"):
        gym(evaluation=8, held_out_fraction=0)


def test_an_evaluation_larger_than_its_held_out_prompts_is_refused(tmp_path: Path) -> None:
    numbered(tmp_path, 40)
    held_out = jsonl(tmp_path, evaluation=1, held_out_fraction=0.3).lines("eval")  # type: ignore[attr-defined]
    jsonl(tmp_path, evaluation=held_out, held_out_fraction=0.3)
    with pytest.raises(TaskError, match=f"has {held_out} held-out prompts") as caught:
        jsonl(tmp_path, evaluation=held_out + 1, held_out_fraction=0.3)
    assert f"evaluation.prompts = {held_out}," in str(caught.value.hint)


def test_an_unknown_task_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(TaskError, match="no such task") as caught:
        gym(name="spel_backwards")
    assert "spell_backward" in str(caught.value)


def test_an_unknown_parameter_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TaskError, match=r"task\.parameters\.longest") as caught:
        gym(parameters={"longest": 3})
    assert "max_word_len" in str(caught.value)


def test_a_parameter_out_of_range_is_refused() -> None:
    with pytest.raises(TaskError, match="max_word_len must be >= min_word_len"):
        gym(parameters={"min_word_len": 5, "max_word_len": 3})


def test_a_seed_among_the_parameters_is_refused() -> None:
    with pytest.raises(TaskError, match=r"seeded by run\.seed"):
        gym(parameters={"seed": 3})


def test_prompts_that_are_too_long_are_passed_over() -> None:
    task = gym(max_prompt_tokens=53)
    assert all(len(task.prompt(n, "train").token_ids) <= 53 for n in range(50))


def test_a_task_whose_prompts_are_all_too_long_is_refused() -> None:
    with pytest.raises(TaskError, match=r"longer than task\.max_prompt_tokens = 10"):
        gym(max_prompt_tokens=10, parameters={"size": 10}).prompt(0, "train")


def test_a_task_that_precomputes_its_items_works_too() -> None:
    task = gym(name="list_functions", max_prompt_tokens=100_000)
    assert task.prompt(70_000, "train") == gym(
        name="list_functions", max_prompt_tokens=100_000
    ).prompt(70_000, "train")


@pytest.mark.parametrize(("hash_seed", "refused"), [(None, True), ("random", True), ("0", False)])
def test_a_task_that_depends_on_the_hash_seed_needs_a_fixed_one(
    monkeypatch: pytest.MonkeyPatch, hash_seed: str | None, refused: bool
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if hash_seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
    if refused:
        with pytest.raises(TaskError, match="hash seed"):
            gym(name="ransom_note")
    else:
        assert gym(name="ransom_note").prompt(0, "train").text


def test_the_whole_library_still_imports_after_one_task_was_loaded_alone() -> None:
    alone = load_dataset("spell_backward", {"seed": 1})
    import reasoning_gym

    whole = reasoning_gym.create_dataset("spell_backward", seed=1)
    assert type(whole) is type(alone)
    assert whole[3] == alone[3]


def test_a_render_hook_makes_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "render_word.py").write_text("def f(item):\n    return item['metadata']['word']\n")
    prompt = gym(tmp_path, render="render_word:f").prompt(0, "train")
    assert prompt.text == prompt.item["metadata"]["word"]


@pytest.mark.parametrize(
    ("body", "message"),
    [("return item['absent']", "KeyError"), ("return 3", "returned int"), ("return ' '", "empty")],
)
def test_a_render_hook_that_fails_is_named(tmp_path: Path, body: str, message: str) -> None:
    module = f"render_{message.split()[0].lower()}"
    (tmp_path / f"{module}.py").write_text(f"def f(item):\n    {body}\n")
    with pytest.raises(TaskError, match=message):
        gym(tmp_path, render=f"{module}:f").prompt(0, "train")


def test_a_jsonl_epoch_holds_every_line_once_and_the_next_another_order(tmp_path: Path) -> None:
    items = numbered(tmp_path, 40)
    task = jsonl(tmp_path, held_out_fraction=0)
    epochs = [[task.prompt(40 * e + n, "train").text for n in range(40)] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(i["prompt"] for i in items)
    assert epochs[0] != epochs[1]
    assert [jsonl(tmp_path, held_out_fraction=0).prompt(n, "train").text for n in range(40)] == (
        epochs[0]
    )


def test_without_shuffling_jsonl_lines_come_in_file_order(tmp_path: Path) -> None:
    items = numbered(tmp_path, 5)
    task = jsonl(tmp_path, held_out_fraction=0, shuffle=False)
    assert [task.prompt(n, "train").text for n in range(7)] == [
        items[n % 5]["prompt"] for n in range(7)
    ]


def test_jsonl_halves_are_disjoint_and_complete(tmp_path: Path) -> None:
    items = numbered(tmp_path, 200)
    task = jsonl(tmp_path, evaluation=1, held_out_fraction=0.3)
    sizes = [task.lines("train"), task.lines("eval")]  # type: ignore[attr-defined]
    train = {task.prompt(n, "train").text for n in range(sizes[0])}
    held_out = {task.prompt(n, "eval").text for n in range(sizes[1])}
    assert not train & held_out
    assert train | held_out == {item["prompt"] for item in items}
    assert 30 < len(held_out) < 90


def test_the_verifier_finds_the_reference_answer_under_one_name(tmp_path: Path) -> None:
    lines(tmp_path / "data.jsonl", [{"q": "two?", "gold": "2", "answer": "a draft"}])
    task = jsonl(tmp_path, held_out_fraction=0, prompt_field="q", answer_field="gold")
    assert task.prompt(0, "train").item == {"q": "two?", "gold": "2", "answer": "2"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken", "line 3: not JSON"),
        (b'"text"', "line 3: holds str, not an object"),
        (b"[" * 100_000, "line 3: nested too deeply"),
        (b'{"answer": "1"}', 'line 3: has no field "prompt"'),
        (b'{"prompt": "x"}', 'line 3: has no field "answer"'),
        (b'{"prompt": 7, "answer": "1"}', "line 3: the prompt is of type int"),
        (b'{"prompt": "", "answer": "1"}', "line 3: the prompt is empty"),
        (b'{"prompt": [], "answer": "1"}', "line 3: the prompt is an empty list"),
        (b'{"prompt": [{"role": "user"}], "answer": "1"}', "line 3: message 0"),
        (b'{"prompt": "\xff", "answer": "1"}', "line 3: not UTF-8"),
        (b'{"prompt": "' + b"x" * 99 + b'", "answer": "1"}', "line 3: the prompt has 100 tokens"),
    ],
)
def test_a_bad_jsonl_line_is_refused_with_its_number(
    tmp_path: Path, line: bytes, message: str
) -> None:
    good = b'{"prompt": "x", "answer": "1"}\n'
    (tmp_path / "data.jsonl").write_bytes(good + b"\n" + line + b"\n" + good)
    with pytest.raises(TaskError, match=message) as caught:
        jsonl(tmp_path, held_out_fraction=0, max_prompt_tokens=50)
    assert "data.jsonl" in str(caught.value)


def test_an_empty_data_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("\n")
    with pytest.raises(TaskError, match="holds no prompts"):
        jsonl(tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot be opened: No such file"):
        jsonl(tmp_path)


@pytest.mark.parametrize("content", ['{"prompt": "Question 0"', ""])
def test_a_file_that_is_overwritten_or_truncated_during_the_run_ends_it(
    tmp_path: Path, content: str
) -> None:
    numbered(tmp_path, 3)
    task = jsonl(tmp_path, held_out_fraction=0, shuffle=False)
    with (tmp_path / "data.jsonl").open("r+") as file:
        file.write(content)
        file.truncate()
    with pytest.raises(ChangedDataError, match="line 1: changed") as changed:
        task.prompt(0, "train")
    assert changed.value.permanent


def test_a_file_that_is_deleted_or_replaced_during_the_run_is_read_as_it_was(
    tmp_path: Path,
) -> None:
    numbered(tmp_path, 3)
    task = jsonl(tmp_path, held_out_fraction=0, shuffle=False)
    (tmp_path / "data.jsonl").unlink()
    lines(tmp_path / "data.jsonl", [{"prompt": "another", "answer": "1"}])
    assert [task.prompt(n, "train").text for n in range(3)] == [f"question {n}" for n in range(3)]


def test_a_tokenizer_that_makes_no_token_of_a_prompt_is_refused(tmp_path: Path) -> None:
    class Nothing(Characters):
        def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
            return ()

    numbered(tmp_path, 3)
    section = {"kind": "jsonl", "path": "data.jsonl", "verifier": "unused:unused"}
    with pytest.raises(TaskError, match="line 1: the tokenizer makes no token") as refused:
        create_task(configure(tmp_path, held_out_fraction=0, **section), Nothing())
    assert "policy.tokenizer" in str(refused.value)


def test_chat_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    lines(tmp_path / "data.jsonl", [{"prompt": messages, "answer": "1"}])
    prompt = jsonl(tmp_path, held_out_fraction=0, chat_template=True).prompt(0, "train")
    assert prompt.text == "[system]be brief[user]hi[assistant]"
    assert prompt.token_ids == tuple(map(ord, prompt.text))


def test_a_string_becomes_the_users_message_of_a_chat(tmp_path: Path) -> None:
    numbered(tmp_path, 1)
    prompt = jsonl(tmp_path, held_out_fraction=0, chat_template=True).prompt(0, "train")
    assert prompt.text == "[user]question 0[assistant]"


def test_chat_messages_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    lines(tmp_path / "data.jsonl", [{"prompt": [{"role": "user", "content": "x"}], "answer": ""}])
    with pytest.raises(TaskError, match="list of chat messages"):
        jsonl(tmp_path)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 100), st.text(max_size=5))
def test_a_permutation_reaches_every_place_once(size: int, key: str) -> None:
    assert sorted(permuted(n, size, key) for n in range(size)) == list(range(size))


def test_a_permutation_mixes_evenly() -> None:
    firsts = Counter(permuted(0, 10, f"key {n}") for n in range(1000))
    assert min(firsts.values()) > 50
