"""The kinds of tasks: JSONL files, the reasoning-gym library, and synthetic prompts.

Any ordinal of a task is reached without going through those before it, and gives the same prompt in
every process.
"""

import hashlib
import os
import zlib
from array import array
from typing import Any

import numpy as np

from dora.config import Config
from dora.errors import ChangedDataError, TaskError
from dora.json_lines import parse_json_object
from dora.producers.tasks.base import (
    Prompt,
    PromptEncoder,
    Task,
    TextTokenizer,
    cached_prompts,
    is_held_out,
)
from dora.producers.tasks.gym_library import load_dataset
from dora.schemas.records import Purpose
from dora.weights.models import emulated_vocabulary


class _Half:
    """Line positions of one half of the file: offsets in bytes, line numbers, checksums."""

    def __init__(self) -> None:
        self.offsets = array("q")
        self.numbers = array("q")
        self.checksums = array("L")

    def __len__(self) -> int:
        return len(self.offsets)


class JsonlTask(Task):
    """Prompts of a JSONL file, one JSON object a line.

    Every line is read and checked at the start. A line that changes afterwards ends the process
    (ChangedDataError); a file that is deleted or replaced stays open as it was. Only line positions
    are kept, so the file may be larger than the memory. The lines of each half (training, held out)
    come in a new seeded order every epoch.

    The item that the verifier gets is the line's object, with the reference answer as `answer`.

    Raises TaskError with file and line number for a line that is no JSON object, misses a field,
    has a prompt that cannot be rendered, or one that is longer than `task.max_prompt_tokens`.
    """

    def __init__(self, config: Config, tokenizer: TextTokenizer) -> None:
        assert config.task.path is not None
        self._path = config.home / config.task.path
        super().__init__(self._path.stem, cached_prompts(config))
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

        wanted, there = config.evaluation.prompts, len(self._halves["eval"])
        if there < wanted:
            raise TaskError(
                f"{self._path} has {there} held-out prompts (task.held_out_fraction = "
                f"{self._section.held_out_fraction}); evaluation.prompts = {wanted} would count "
                "some of them several times",
                hint=f"Set evaluation.prompts = {there}, raise task.held_out_fraction or add "
                "lines.",
            )

    def lines(self, purpose: Purpose) -> int:
        """How many lines of the file this purpose has: the length of its epoch."""
        return len(self._halves[purpose])

    def _read_through(self) -> None:
        offset = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                held_out = is_held_out(self._examine(number, line), self._section.held_out_fraction)
                half = self._halves["eval" if held_out else "train"]
                half.offsets.append(offset)
                half.numbers.append(number)
                half.checksums.append(zlib.crc32(line))
            offset += len(line)

    def _examine(self, number: int, line: bytes) -> Any:
        """Checks a line; returns what decides on its half: what its prompt is made of."""
        prompt = self._parse(0, number, line)
        tokens = len(prompt.token_ids)
        if tokens > self._section.max_prompt_tokens:
            raise TaskError(
                f"{self._path}, line {number}: the prompt has {tokens} tokens, "
                f"task.max_prompt_tokens allows {self._section.max_prompt_tokens}",
                hint="Raise task.max_prompt_tokens or remove the line.",
            )
        item = prompt.item
        return self._encoder.content(item, item.get(self._section.prompt_field))

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

    def place(self, ordinal: int, purpose: Purpose) -> str:
        """File and line of the prompt."""
        number = self._halves[purpose].numbers[self._position(ordinal, purpose)]
        return f"{self._path}, line {number}"

    def _position(self, ordinal: int, purpose: Purpose) -> int:
        half = self._halves[purpose]
        if not half:
            raise TaskError(f"{self._path} has no {purpose} prompts")
        epoch, position = divmod(ordinal, len(half))
        if self._section.shuffle:
            position = permuted(position, len(half), f"{self._seed}/{purpose}/{epoch}")
        return position

    def _prompt(self, ordinal: int, purpose: Purpose) -> Prompt:
        half, position = self._halves[purpose], self._position(ordinal, purpose)
        number = half.numbers[position]
        self._file.seek(half.offsets[position])
        line = self._file.readline()
        if zlib.crc32(line) != half.checksums[position]:
            raise ChangedDataError(
                f"{self._path}, line {number}: changed while the run was going on",
                hint="Put the file back as it was, and start the same command again: the run goes "
                "on where its log ends.",
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


DEFAULT_SIZE = 10_000
ATTEMPTS = 4_000
KEPT_PAGES = 4
HASH_DEPENDENT = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note"})
"""Tasks of reasoning-gym 0.1.25 that iterate over sets of strings while they make an item."""


class ReasoningGymTask(Task):
    """Prompts of one reasoning-gym task.

    The stream is cut into pages of `size / 2` ordinals. Each page has a data set of its own seed
    with `size` items, of which every ordinal draws by hash until one lies in the right half and
    fits. So tasks with tables of `size` entries work as well.

    The item is the library's entry: `question`, `answer` and `metadata`. The prompt is the
    question unless `task.render` makes another.
    """

    def __init__(self, config: Config, tokenizer: TextTokenizer) -> None:
        assert config.task.name is not None
        super().__init__(config.task.name, cached_prompts(config))
        if self.name in HASH_DEPENDENT and os.environ.get("PYTHONHASHSEED", "random") == "random":
            raise TaskError(
                f"the prompts of {self.name} depend on Python's hash seed, so that every process "
                "would see others",
                hint="Set the environment variable PYTHONHASHSEED=0 wherever dora runs.",
            )
        self._seed = config.run.seed
        self._section = config.task
        self._encoder = PromptEncoder(config.task, config.home, tokenizer)
        self._parameters = dict(config.task.parameters)
        if "seed" in self._parameters:
            raise TaskError(
                "task.parameters.seed: the prompts are seeded by run.seed",
                hint="Remove it, and set run.seed.",
            )
        self._size = self._parameters.setdefault("size", DEFAULT_SIZE)
        if not isinstance(self._size, int) or self._size < 2:
            raise TaskError(f"task.parameters.size = {self._size!r} must be a whole number from 2")
        self._pages: dict[int, Any] = {}
        self._page(0)

    def _prompt(self, ordinal: int, purpose: Purpose) -> Prompt:
        page = self._page(ordinal // (self._size // 2))
        too_long = 0
        for attempt in range(ATTEMPTS):
            index = _draw(f"{self._seed}/{ordinal}/{attempt}") % self._size
            item = page[index]
            try:
                text = self._encoder.text(item, item["question"])
            except TaskError as error:
                raise TaskError(
                    f"{self.name}, prompt {ordinal}: {error.message}", hint=error.hint
                ) from error
            content = self._encoder.content(item, item["question"])
            held_out = is_held_out(content, self._section.held_out_fraction)
            if held_out != (purpose == "eval"):
                continue
            token_ids = self._encoder.tokens(text)
            if len(token_ids) > self._section.max_prompt_tokens:
                too_long += 1
                continue
            return Prompt(ordinal, text, token_ids, item)
        if too_long:
            raise TaskError(
                f"{self.name}: {too_long} prompts drawn for ordinal {ordinal} are all longer than "
                f"task.max_prompt_tokens = {self._section.max_prompt_tokens}",
                hint="Raise task.max_prompt_tokens, or make the task easier in task.parameters.",
            )
        half = "held-out" if purpose == "eval" else "training"
        raise TaskError(
            f"{self.name}: {ATTEMPTS} prompts drawn for ordinal {ordinal}, none of them {half} "
            f"(task.held_out_fraction = {self._section.held_out_fraction})",
            hint="The task has too few different prompts: change task.held_out_fraction or "
            "task.parameters.",
        )

    def _page(self, number: int) -> Any:
        if number not in self._pages:
            seed = _draw(f"{self._seed}/page/{number}") % 2**31
            self._pages[number] = load_dataset(self.name, self._parameters | {"seed": seed})
            if len(self._pages) > KEPT_PAGES:
                del self._pages[next(iter(self._pages))]
        return self._pages[number]


def _draw(label: str) -> int:
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest())


class SyntheticTask(Task):
    """Random token ids below `highest_id`, which ends a response; no text and nothing to verify.

    A prompt depends on the run's seed, its place in the cycle of `task.synthetic_prompts` and its
    purpose.
    """

    def __init__(self, config: Config, highest_id: int) -> None:
        super().__init__("synthetic", cached_prompts(config))
        task = config.task
        if task.synthetic_prompt_tokens > task.max_prompt_tokens:
            raise TaskError(
                f"task.synthetic_prompt_tokens ({task.synthetic_prompt_tokens}) is more than "
                f"task.max_prompt_tokens ({task.max_prompt_tokens}) allows"
            )
        self._seed = config.run.seed
        self._prompts = task.synthetic_prompts
        self._length = task.synthetic_prompt_tokens
        self._highest_id = highest_id

    def _prompt(self, ordinal: int, purpose: Purpose) -> Prompt:
        number = ordinal % self._prompts
        generator = np.random.default_rng([self._seed, zlib.crc32(purpose.encode()), number])
        tokens = generator.integers(0, max(1, self._highest_id), self._length)
        return Prompt(ordinal, "", tuple(tokens.tolist()), {"number": number})


def create_task(config: Config, tokenizer: TextTokenizer) -> Task:
    """The task that the configuration describes; TaskError says what is wrong with it."""
    if config.task.kind == "synthetic":
        return SyntheticTask(config, emulated_vocabulary(config.policy.model) - 1)
    if config.evaluation.prompts and not config.task.held_out_fraction:
        raise TaskError(
            f"evaluation.prompts = {config.evaluation.prompts} needs held-out prompts, but "
            "task.held_out_fraction is 0",
            hint="Set task.held_out_fraction, for instance to 0.1.",
        )
    if config.task.kind == "jsonl":
        return JsonlTask(config, tokenizer)
    return ReasoningGymTask(config, tokenizer)
