"""Prompts of a task made from rows of files.

A prompt is written once, at the place of its first occurrence; the same files give the same bytes.
Among rows of one prompt the one with the highest reward gives the answer (the first of equals);
without rewards it is the first row. A row that lacks a field or holds another type ends the import.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora.errors import UsageError
from dora.producers.tasks.import_files import FileRow, columns_of, rows_of

PROMPTS = ("prompt", "messages", "question", "prompt_token_ids")
"""Columns that are taken for the prompt, the first that is there."""
ANSWERS = ("answer", "ground_truth", "solution", "completion", "chosen", "text", "messages")
"""Columns that are taken for the answer, the first that is there."""

Decode = Callable[[Sequence[int]], str]
"""Text of the token ids of a prompt; ValueError, with why, if they are none of the tokenizer's."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns to take; None: the first known one. `keep` go along as they are."""

    prompt: str | None = None
    answer: str | None = None
    keep: tuple[str, ...] = ()


@dataclass(slots=True)
class Prompts:
    """What was made of the files. `items` are the lines of the data set, `repeated` the rows whose
    prompt was there already, `unsuited` those below the least reward or of held-out prompts,
    `conflicting` the repeated ones that had another answer."""

    items: list[dict[str, Any]] = field(default_factory=list)
    rows: int = 0
    repeated: int = 0
    conflicting: int = 0
    unsuited: int = 0

    @property
    def conversations(self) -> bool:
        """Whether prompts are lists of messages."""
        return any(not isinstance(item["prompt"], str) for item in self.items)

    def lines(self) -> Iterator[str]:
        """The data set, an object a line."""
        for item in self.items:
            yield _written(item) + "\n"


def prompts_of(
    files: Sequence[Path],
    columns: Columns,
    *,
    least: float | None = None,
    decode: Decode | None = None,
) -> Prompts:
    """The prompts of all files. Rows with a reward below `least`, or of held-out prompts, are left
    out. UsageError, with the place, for rows that cannot be used, and if there is no prompt."""
    made = Prompts()
    places: dict[str, int] = {}
    rewards: list[float] = []
    for file in files:
        there = columns_of(file)
        if there is None:
            continue
        maker = _ItemMaker(file, there, columns, decode)
        for row in rows_of(file, maker.needed):
            made.rows += 1
            reward = _reward(row)
            if row.fields.get("purpose") == "eval" or (
                least is not None and (reward is None or reward < least)
            ):
                made.unsuited += 1
                continue
            item = maker.item(row)
            key = json.dumps(item["prompt"], sort_keys=True)
            value = float("-inf") if reward is None else reward
            at = places.setdefault(key, len(made.items))
            if at == len(made.items):
                made.items.append(item)
                rewards.append(value)
                continue
            made.repeated += 1
            made.conflicting += item["answer"] != made.items[at]["answer"]
            if value > rewards[at]:
                made.items[at], rewards[at] = item, value
    if not made.items:
        why = f"{made.unsuited} of them left out" if made.unsuited else "they are empty"
        names = ", ".join(map(str, files[:3])) + (" and others" if len(files) > 3 else "")
        raise UsageError(f"{names}: no prompt in {made.rows} rows ({why})")
    return made


class _ItemMaker:
    """Makes items of the rows of one file."""

    def __init__(
        self, file: Path, there: Sequence[str], columns: Columns, decode: Decode | None
    ) -> None:
        self._keep = columns.keep
        self._decode = decode
        self._prompt = self._choose(file, there, columns.prompt, PROMPTS, "prompt")
        answers = [name for name in ANSWERS if name != "messages" or self._prompt == "messages"]
        self._answer = self._choose(file, there, columns.answer, answers, "answer")
        for name in columns.keep:
            if name in ("prompt", "answer"):
                raise UsageError(f"--keep {name}: the data set has {name} of its own")
            self._choose(file, there, name, (), "keep")
        if self._prompt == "prompt_token_ids" and decode is None:
            raise UsageError(
                f"{file} holds prompts as token ids",
                hint="Name the tokenizer that made them: --tokenizer DIRECTORY or model name.",
            )
        self.needed = [self._prompt, self._answer, "reward", "purpose", *columns.keep]
        """Columns that are read."""

    def item(self, row: FileRow) -> dict[str, Any]:
        """A line of the data set."""
        prompt: Any = row.fields.get(self._prompt)
        answer: Any = row.fields.get(self._answer)
        if self._prompt == "messages":
            prompt = _messages(row.place, self._prompt, prompt)
            # Sets for RL with verifiable rewards hold the question alone, and the answer beside it.
            if self._answer == "messages" or (prompt and prompt[-1]["role"] == "assistant"):
                prompt, said = _split(row.place, prompt)
                answer = said if self._answer == "messages" else answer
        elif self._prompt == "prompt_token_ids":
            assert self._decode is not None
            try:
                prompt = self._decode(_token_ids(row.place, self._prompt, prompt))
            except ValueError as error:
                raise UsageError(f'{row.place}: "{self._prompt}": {error}') from error
        elif not isinstance(prompt, str):
            prompt = _messages(row.place, self._prompt, prompt)
        if not prompt or (isinstance(prompt, str) and not prompt.strip()):
            raise UsageError(f'{row.place}: "{self._prompt}" is empty')
        item = {"prompt": prompt, "answer": _answer(row.place, self._answer, answer)}
        item |= {name: row.fields.get(name) for name in self._keep}
        try:
            _written(item).encode()
        except (TypeError, ValueError) as error:
            raise UsageError(f"{row.place}: cannot be written as JSON: {error}") from error
        return item

    @staticmethod
    def _choose(
        file: Path, there: Sequence[str], wanted: str | None, known: Sequence[str], what: str
    ) -> str:
        if wanted is not None:
            if wanted not in there:
                raise UsageError(
                    f'{file} has no column "{wanted}"', hint=f"It has {', '.join(there)}."
                )
            return wanted
        for name in known:
            if name in there:
                return name
        raise UsageError(
            f"{file} has no column that is known as the {what}: {', '.join(known)}",
            hint=f"It has {', '.join(there) or 'none'}. Name the right one: --{what}-field.",
        )


def _written(item: dict[str, Any]) -> str:
    return json.dumps(item, ensure_ascii=False)


def _messages(place: str, name: str, value: Any) -> list[dict[str, str]]:
    good = isinstance(value, list) and all(
        isinstance(each, dict)
        and isinstance(each.get("role"), str)
        and isinstance(each.get("content"), str)
        for each in value
    )
    if not good:
        raise UsageError(
            f'{place}: "{name}" is {_kind(value)}, neither a string nor a list of messages with '
            '"role" and "content"'
        )
    return [{"role": each["role"], "content": each["content"]} for each in value]


def _split(place: str, messages: list[dict[str, str]]) -> tuple[list[dict[str, str]], str]:
    """A conversation up to the assistant's last message, and that message."""
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise UsageError(f'{place}: "messages" does not end with the assistant\'s answer')
    return messages[:-1], messages[-1]["content"]


def _answer(place: str, name: str, value: Any) -> Any:
    """The answer: a text, also of a conversation's only message, a number, or a list of accepted
    texts and numbers."""
    if isinstance(value, list) and value:
        if all(isinstance(each, str | int | float) for each in value):
            return value
        messages = _messages(place, name, value)
        if len(messages) == 1:
            return messages[0]["content"]
    elif isinstance(value, str | int | float):
        return value
    raise UsageError(f'{place}: "{name}" is {_kind(value)}, which is no answer')


def _token_ids(place: str, name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise UsageError(f'{place}: "{name}" is {_kind(value)}, not a list of token ids')
    return value


def _reward(row: FileRow) -> float | None:
    value = row.fields.get("reward")
    if value is None or value != value:  # some write NaN for what is missing
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f'{row.place}: "reward" is {_kind(value)}, not a number')
    return float(value)


def _kind(value: Any) -> str:
    names = {type(None): "missing", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
