"""Tasks of the reasoning-gym library, as an endless stream.

Invariant: prompt `i` of a seed is the same in every process. The stream is cut into pages of
`size / 2` ordinals; each page has a data set of its own seed with `size` items, of which every
ordinal draws by hash until one lies in the right half and fits. So any ordinal is reached without
going through those before it, and tasks with tables of `size` entries work as well.
"""

import hashlib
import os
from typing import Any

from dora.config import Config
from dora.errors import TaskError
from dora.producers.tasks.base import (
    Prompt,
    PromptEncoder,
    Purpose,
    Task,
    TextTokenizer,
    is_held_out,
)
from dora.producers.tasks.gym_library import load_dataset

# The reasoning-gym library, loaded no further than a task needs it.
#
# Invariant: importing this module and loading one task imports neither dora's configuration nor
# the rest of the library, so that verifier processes start in tenths of a second. Parameters that
# a task does not have or accept, and names that the library does not know, are TaskErrors.


DEFAULT_SIZE = 10_000
ATTEMPTS = 4_000
KEPT_PAGES = 4
HASH_DEPENDENT = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note"})
"""Tasks of reasoning-gym 0.1.25 that iterate over sets of strings while they make an item."""


class ReasoningGymTask(Task):
    """Prompts of one reasoning-gym task.

    The item is the library's entry: `question`, `answer` and `metadata`. The prompt is the
    question unless `task.render` makes another.
    """

    def __init__(self, config: Config, tokenizer: TextTokenizer) -> None:
        assert config.task.name is not None
        super().__init__(config.task.name)
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
            if is_held_out(text, self._section.held_out_fraction) != (purpose == "eval"):
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
