"""Which prompts of the training stream are the same one.

Invariant: two ordinals with the same prompt tokens have the same identity, in every process.
"""

import functools
import zlib

from dora.config import Config
from dora.core.history import PromptOf
from dora.errors import TaskError
from dora.producers.tasks.base import create_task
from dora.producers.tokenization import tokenizer_of
from dora.schemas.records import pack_tokens

_CACHED = 65_536


def prompt_identity(config: Config) -> PromptOf:
    """Identity of the prompt at an ordinal of the run's training stream. The task must be at hand
    as on a rollout worker: TaskError if it is not."""
    task = create_task(config, tokenizer_of(config))

    @functools.lru_cache(_CACHED)
    def identity(ordinal: int) -> int:
        try:
            return zlib.crc32(pack_tokens(task.prompt(ordinal, "train").token_ids))
        except TaskError:  # the worker that is to generate for it will report it
            return -1 - ordinal

    return identity
