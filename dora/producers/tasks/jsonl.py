"""Prompts from a JSONL file: one JSON object a line.

Invariant: a task that exists has read every line of its file and found it usable; a file that
changes afterwards is noticed. Only line positions are kept in memory, so that the file may be
larger than it. The lines of each half come in a new seeded order every epoch, and any ordinal is
reached without going through those before it.
"""

import hashlib
import zlib
from array import array

from dora.config import Config
from dora.errors import TaskError
from dora.json_lines import parse_json_object
from dora.producers.tasks.base import (
    Prompt,
    PromptEncoder,
    Purpose,
    Task,
    TextTokenizer,
    is_held_out,
)


class _Half:
    """Line positions of one half of the file: offsets in bytes, line numbers, checksums."""

    def __init__(self) -> None:
        self.offsets = array("q")
        self.numbers = array("q")
        self.checksums = array("L")

    def __len__(self) -> int:
        return len(self.offsets)


class JsonlTask(Task):
    """Prompts of a JSONL file.

    The item that the verifier gets is the line's object, with the reference answer as `answer`.

    Raises TaskError with file and line number for a line that is no JSON object, misses a field,
    has a prompt that cannot be rendered, or one that is longer than `task.max_prompt_tokens`.
    """

    def __init__(self, config: Config, tokenizer: TextTokenizer) -> None:
        assert config.task.path is not None
        self._path = config.home / config.task.path
        super().__init__(self._path.stem)
        self._section = config.task
        self._seed = config.run.seed
        self._encoder = PromptEncoder(config.task, config.home, tokenizer)
        self._halves = {"train": _Half(), "eval": _Half()}
        try:
            self._file = self._path.open("rb")
        except OSError as exception:
            raise TaskError(
                f"task.path: {self._path} cannot be opened: {exception.strerror}",
                hint="A relative path is looked for beside the configuration file.",
            ) from exception
        self._read_through()
        needed = {"train": True, "eval": config.evaluation.prompts > 0}
        for purpose, half in self._halves.items():
            if needed[purpose] and not half:
                lines = sum(map(len, self._halves.values()))
                raise TaskError(
                    f"{self._path}: none of its {lines} prompts is a {purpose} prompt "
                    f"(task.held_out_fraction = {self._section.held_out_fraction})"
                    if lines
                    else f"{self._path} holds no prompts",
                    hint="Change task.held_out_fraction or add lines." if lines else None,
                )

    def lines(self, purpose: Purpose) -> int:
        """How many lines of the file this purpose has: the length of its epoch."""
        return len(self._halves[purpose])

    def _read_through(self) -> None:
        offset = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                text = self._examine(number, line)
                held_out = is_held_out(text, self._section.held_out_fraction)
                half = self._halves["eval" if held_out else "train"]
                half.offsets.append(offset)
                half.numbers.append(number)
                half.checksums.append(zlib.crc32(line))
            offset += len(line)

    def _examine(self, number: int, line: bytes) -> str:
        prompt = self._parse(0, number, line)
        tokens = len(prompt.token_ids)
        if tokens > self._section.max_prompt_tokens:
            raise TaskError(
                f"{self._path}, line {number}: the prompt has {tokens} tokens, "
                f"task.max_prompt_tokens allows {self._section.max_prompt_tokens}",
                hint="Raise task.max_prompt_tokens or remove the line.",
            )
        return prompt.text

    def _parse(self, ordinal: int, number: int, line: bytes) -> Prompt:
        place = f"{self._path}, line {number}"
        try:
            item = parse_json_object(line)
        except ValueError as error:
            raise TaskError(f"{place}: {error}") from error
        needed = [self._section.answer_field]
        if self._section.render is None:
            needed.insert(0, self._section.prompt_field)
        for name in needed:
            if name not in item:
                raise TaskError(
                    f'{place}: has no field "{name}"',
                    hint=f"It has {', '.join(sorted(item)) or 'none'}. Field names are set with "
                    "task.prompt_field and task.answer_field.",
                )
        # Verifiers find the reference answer in one place, whatever the data set calls it.
        item["answer"] = item[self._section.answer_field]
        try:
            text = self._encoder.text(item, item.get(self._section.prompt_field))
            return Prompt(ordinal, text, self._encoder.tokens(text), item)
        except TaskError as error:
            raise TaskError(f"{place}: {error.message}", hint=error.hint) from error

    def _prompt(self, ordinal: int, purpose: Purpose) -> Prompt:
        half = self._halves[purpose]
        if not half:
            raise TaskError(f"{self._path} has no {purpose} prompts")
        epoch, position = divmod(ordinal, len(half))
        if self._section.shuffle:
            position = permuted(position, len(half), f"{self._seed}/{purpose}/{epoch}")
        number = half.numbers[position]
        self._file.seek(half.offsets[position])
        line = self._file.readline()
        if zlib.crc32(line) != half.checksums[position]:
            raise TaskError(
                f"{self._path}, line {number}: changed while the run was going on",
                hint="Put the file back as it was; data sets must not change during a run.",
            )
        return self._parse(ordinal, number, line)


def permuted(position: int, size: int, key: str) -> int:
    """Where `position` goes in the permutation of range(size) that `key` names.

    A Feistel network with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002): constant memory and, on average, less than four rounds of walking.
    """
    if not 0 <= position < size:
        raise ValueError(f"position {position} is not in range({size})")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = position >> half_bits, position & mask
        for number in range(4):
            digest = hashlib.blake2b(f"{key}/{number}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest) & mask)
        position = left << half_bits | right
        if position < size:
            return position
