"""Texts and conversations of a run's prompts, from tokens and from its task."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dora.config import Config
from dora.errors import TaskError
from dora.producers.tasks.prompts import RunTexts, prompt_text
from tests.factories import G

FRONT = 1
"""Token that the tokenizer puts before every text."""


class Marked:
    """A tokenizer of letters that begins every text with a token, and chats with tags."""

    name = "marked"

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        return ((FRONT,) if special_tokens else ()) + tuple(map(ord, text))

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        return "".join("<s>" if token == FRONT else chr(token) for token in token_ids)

    def chat(self, messages: Any) -> str:
        return "".join(f"[{m['role']}] {m['content']} " for m in messages) + "[assistant] "


def texts(tmp_path: Path, **task: Any) -> RunTexts:
    items = [{"prompt": "sun", "answer": "nus"}, {"prompt": "moon", "answer": "noom"}]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    settings = {
        "kind": "jsonl", "path": str(tmp_path / "words.jsonl"), "verifier": "scoring:verify",
        "held_out_fraction": 0.0, "shuffle": False, "chat_template": True,
    }  # fmt: skip
    config = Config.model_validate(
        {
            "run": {"name": "words"},
            "policy": {"model": "none"},
            "task": settings | task,
            "window": {"max_staleness": 1, "groups_per_step": 2, "group_size": G},
            "trainer": {"steps": 1},
        }
    )
    config = config.model_copy(update={"home": tmp_path})
    return RunTexts(config, Marked())  # type: ignore[arg-type]


def test_a_text_has_not_what_the_tokenizer_puts_before_it(tmp_path: Path) -> None:
    tokenizer: Any = Marked()
    assert prompt_text(tokenizer, tokenizer.encode("sun")) == "sun"
    assert prompt_text(tokenizer, tokenizer.encode("sun", special_tokens=False)) == "sun"
    made = texts(tmp_path)
    assert made.tokens(made.prompt(tokenizer.encode("sun"))) == tokenizer.encode("sun")
    assert made.response([*map(ord, "nus"), FRONT]) == "nus<s>"


def test_a_conversation_is_the_one_that_the_tokens_were_made_of(tmp_path: Path) -> None:
    made = texts(tmp_path)
    prompt = Marked().encode("[user] moon [assistant] ", special_tokens=False)
    assert made.messages(1, prompt) == [{"role": "user", "content": "moon"}]
    assert made.messages(3, prompt) == [{"role": "user", "content": "moon"}]  # next epoch
    with pytest.raises(TaskError, match="now gives another prompt at ordinal 0"):
        made.messages(0, prompt)


def test_a_prompt_that_was_rendered_is_rendered_again(tmp_path: Path) -> None:
    module = tmp_path / "rendering_twice.py"
    module.write_text("def f(item):\n    return item['prompt'] * 2\n")
    made = texts(tmp_path, render="rendering_twice:f")
    prompt = Marked().encode("[user] sunsun [assistant] ", special_tokens=False)
    assert made.messages(0, prompt) == [{"role": "user", "content": "sunsun"}]


def test_without_a_chat_template_the_prompt_is_what_a_user_said(tmp_path: Path) -> None:
    made = texts(tmp_path, chat_template=False)
    prompt = Marked().encode("anything")
    assert made.messages(7, prompt) == [{"role": "user", "content": "anything"}]
