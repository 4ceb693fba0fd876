"""Prompts that are token ids without a text, for emulated engines.

Invariant: a prompt depends on the run's seed, its place in the cycle of `task.synthetic_prompts`
and its purpose; those for training and for evaluation are made apart from one another.
"""

import zlib

import numpy as np

from dora.config import Config
from dora.errors import TaskError
from dora.producers.tasks.base import Prompt, Purpose, Task


class SyntheticTask(Task):
    """Random token ids below `highest_id`, which ends a response; no text and nothing to verify."""

    def __init__(self, config: Config, highest_id: int) -> None:
        super().__init__("synthetic")
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
