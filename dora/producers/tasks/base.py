"""What a task is: an endless stream of prompts that can be entered anywhere.

A prompt depends on the configuration, its ordinal and its purpose alone: not on the process, the
order of the calls, or a restart. Training and held-out prompts never share a text: a hash of the
text decides which half a prompt belongs to.
"""

import functools
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dora.config import Config, TaskSection, window_of
from dora.errors import TaskError
from dora.producers.tasks.hooks import load_hook
from dora.schemas.records import Purpose

Messages = Sequence[Mapping[str, Any]]

MOST_CACHED = 1024


def cached_prompts(config: Config) -> int:
    """How many prompts are kept: those of the groups that may be outstanding, whose samples start
    one after the other. A prompt takes 36 bytes a token, and its text."""
    return min(window_of(config).capacity, MOST_CACHED)


class TextTokenizer(Protocol):
    """What a task needs of a tokenizer; `dora.producers.tasks.tokenization.Tokenizer` has it."""

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of the text."""
        ...

    def chat(self, messages: Messages) -> str:
        """The text of a conversation, ready for the model's answer."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its text, its tokens, and the item that the verifier gets."""

    ordinal: int
    text: str
    token_ids: tuple[int, ...]
    item: dict[str, Any]


def is_held_out(content: Any, fraction: float) -> bool:
    """Whether a prompt made of `content` (a text, or what JSON can hold) is kept for evaluation.

    Stable across machines and releases. It depends on what the prompt is made of, not on chat
    template and tokenizer: a prompt must not change sides when these change.
    """
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) < fraction * 2**32


class Task(ABC):
    """An endless, seeded stream of prompts for each purpose; the last `cached` ones are kept."""

    def __init__(self, name: str, cached: int = MOST_CACHED) -> None:
        self.name = name
        self._cached = functools.lru_cache(cached)(self._prompt)

    def prompt(self, ordinal: int, purpose: Purpose) -> Prompt:
        """The prompt at `ordinal` (from 0). TaskError if there is none that fits."""
        if ordinal < 0:
            raise ValueError(f"ordinal is {ordinal}")
        return self._cached(ordinal, purpose)

    def place(self, ordinal: int, purpose: Purpose) -> str:
        """Where the prompt at `ordinal` comes from, for people."""
        kind = "held-out" if purpose == "eval" else "training"
        return f"{self.name}, {kind} prompt {ordinal}"

    @abstractmethod
    def _prompt(self, ordinal: int, purpose: Purpose) -> Prompt: ...


class PromptEncoder:
    """Turns an item's content into the text and the tokens that the model sees."""

    def __init__(self, task: TaskSection, home: Path, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._chat_template = task.chat_template
        self._render: Callable[..., Any] | None = (
            load_hook(task.render, home, "task.render") if task.render else None
        )
        self._render_name = task.render

    def text(self, item: dict[str, Any], content: Any) -> str:
        """The prompt's text; `content` is used where no render hook is configured.

        Raises TaskError, without naming the item: the caller knows where it comes from.
        """
        content = self.content(item, content)
        if self._chat_template:
            return self._tokenizer.chat(_as_messages(content))
        if not isinstance(content, str):
            raise TaskError(
                "the prompt is a list of chat messages",
                hint="Set task.chat_template = true.",
            )
        return content

    def messages(self, item: dict[str, Any], content: Any) -> Messages:
        """What the chat template makes the prompt's text of. Raises as `text` does."""
        return _as_messages(self.content(item, content))

    def content(self, item: dict[str, Any], content: Any) -> str | Messages:
        """What the prompt is made of, before any chat template: `content`, or what the render hook
        makes of the item. Raises as `text` does."""
        if self._render is not None:
            try:
                content = self._render(item)
            except Exception as exception:
                raise TaskError(
                    f"task.render = {self._render_name} failed: "
                    f"{type(exception).__name__}: {exception}"
                ) from exception
            if not isinstance(content, str):
                raise TaskError(
                    f"task.render = {self._render_name} returned {type(content).__name__}, "
                    "not a string"
                )
        if not isinstance(content, str):
            return _messages(content)
        if not content.strip():
            raise TaskError("the prompt is empty")
        return content

    def tokens(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt's text; a chat template has put its special tokens in already.

        TaskError if there are none.
        """
        found = self._tokenizer.encode(text, special_tokens=not self._chat_template)
        if not found:
            raise TaskError(
                "the tokenizer makes no token of the prompt",
                hint="The model's directory holds no tokenizer that knows this text: set "
                "policy.tokenizer.",
            )
        return found


def _as_messages(content: str | Messages) -> Messages:
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


def _messages(content: Any) -> Messages:
    if not isinstance(content, list):
        raise TaskError(
            f"the prompt is of type {type(content).__name__}, not a string or a list of messages"
        )
    if not content:
        raise TaskError("the prompt is an empty list of messages")
    for number, message in enumerate(content):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise TaskError(f'message {number} of the prompt has no "role" and "content"')
    return content
