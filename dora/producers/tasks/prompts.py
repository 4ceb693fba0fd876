"""The texts and conversations that a run's prompts were made of.

A conversation is given out only if the tokenizer makes of it the tokens that the trajectory was
generated for.
"""

import functools
import zlib
from collections.abc import Sequence
from functools import cached_property

from dora.config import Config
from dora.core.scheduling.estimates import PromptOf
from dora.errors import TaskError
from dora.producers.tasks.base import PromptEncoder, Task, cached_prompts
from dora.producers.tasks.kinds import create_task
from dora.producers.tasks.tokenization import Tokenizer, tokenizer_of
from dora.schemas.records import pack_tokens


def prompt_identity(config: Config) -> PromptOf:
    """Identity of the prompt at an ordinal of the run's training stream: equal for equal tokens, in
    every process. TaskError if the task cannot be loaded as on a rollout worker."""
    task = create_task(config, tokenizer_of(config))

    @functools.lru_cache(cached_prompts(config))
    def identity(ordinal: int) -> int:
        try:
            return zlib.crc32(pack_tokens(task.prompt(ordinal, "train").token_ids))
        except TaskError:  # the worker that is to generate for it will report it
            return -1 - ordinal

    return identity


Messages = list[dict[str, str]]


def prompt_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Text of a prompt's tokens, without those that the tokenizer puts before every text."""
    front = tokenizer.encode("")
    own = front and tuple(token_ids[: len(front)]) == front
    return tokenizer.decode(token_ids[len(front) :] if own else token_ids, special_tokens=True)


class RunTexts:
    """What tokenizer and task of `config`'s run say of tokens.

    The task is opened when a conversation is asked for; TaskError if it cannot be.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer

    def prompt(self, token_ids: Sequence[int]) -> str:
        """Their text, without what the tokenizer puts before every text."""
        return prompt_text(self._tokenizer, token_ids)

    def response(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens included."""
        return self._tokenizer.decode(token_ids, special_tokens=True)

    def tokens(self, text: str) -> Sequence[int]:
        """The tokens of a whole text."""
        return self._tokenizer.encode(text)

    def messages(self, ordinal: int, prompt: Sequence[int]) -> Messages:
        """The conversation that the training prompt at `ordinal` was made of.

        TaskError if the task gives another one there now. Where the run used no chat template, the
        prompt is what a user said.
        """
        section = self._config.task
        if not section.chat_template:
            return [{"role": "user", "content": self.prompt(prompt)}]
        item = self._task.prompt(ordinal, "train").item
        field = section.prompt_field if section.kind == "jsonl" else "question"
        said = self._encoder.messages(item, item.get(field))
        messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in said]
        if self._encoder.tokens(self._tokenizer.chat(messages)) != tuple(prompt):
            raise TaskError(
                f"the task {self._task.name} now gives another prompt at ordinal {ordinal} than "
                "the run's trajectories were generated for",
                hint="The data set, its library, a task setting or the tokenizer differs from the "
                "run's. --form text needs the tokenizer only.",
            )
        return messages

    @cached_property
    def _task(self) -> Task:
        return create_task(self._config, self._tokenizer)

    @cached_property
    def _encoder(self) -> PromptEncoder:
        return PromptEncoder(self._config.task, self._config.home, self._tokenizer)
