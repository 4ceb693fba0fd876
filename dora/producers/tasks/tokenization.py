"""The tokenizer of the policy, and the tokens that end its responses.

A `Tokenizer` that was loaded fits its model: every id that it encodes has a row in the model's
embeddings.
"""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from dora.config import Config, PolicySection, TaskSection
from dora.errors import PolicyError, TaskError, WeightsError, first_line
from dora.weights.models import (
    emulated_vocabulary,
    eos_token_ids,
    looks_like_path,
    vocabulary_of,
)

TEMPLATE_DATE = TaskSection.model_fields["template_date"].default
"""What a chat template takes for the current date unless `task.template_date` says another."""


class Tokenizer:
    """A Hugging Face tokenizer, reduced to what a run needs of it."""

    def __init__(
        self, backend: Any, name: str, vocabulary: int | None = None, today: date = TEMPLATE_DATE
    ) -> None:
        self._backend = backend
        self.name = name
        ids = backend.get_vocab().values()
        self.highest_id = max(ids, default=-1)
        """Largest token id that the tokenizer can produce."""
        self.eos_token_id: int | None = backend.eos_token_id
        """Token that ends a text."""
        self._bos_token_id: int | None = backend.bos_token_id
        self._vocabulary = vocabulary
        self._today = today

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids; `special_tokens` adds those that the model expects around a text.

        A text that begins with the beginning-of-sequence token already gets no second one.
        TaskError for a text that the tokenizer refuses, and for a token that the model has no
        embedding for.
        """
        try:
            ids = tuple(self._backend.encode(text, add_special_tokens=special_tokens))
        except (TypeError, ValueError) as error:  # half of a surrogate pair, for instance
            raise TaskError(
                f"the tokenizer {self.name} cannot encode the text: {first_line(error)}"
            ) from error
        if special_tokens and self._bos_token_id is not None:
            bos = self._bos_token_id
            if ids[:2] == (bos, bos):
                ids = ids[1:]
        if self._vocabulary is not None and ids and max(ids) >= self._vocabulary:
            token = self._backend.convert_ids_to_tokens(max(ids))
            raise TaskError(
                f"the text holds the token {token} (id {max(ids)}) of the tokenizer {self.name}, "
                f"which the model has no embedding for: its vocabulary is {self._vocabulary}"
            )
        return ids

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Text of the token ids, by default without end-of-sequence and the like."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=not special_tokens))

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation in the model's own chat format, up to where its answer starts.

        A template that inserts the current date gets `today`, so that a prompt is the same on every
        day of a run. PolicyError without a chat template, TaskError for a conversation that it
        refuses.
        """
        if not getattr(self._backend, "chat_template", None):
            raise PolicyError(
                f"task.chat_template is on, but the tokenizer {self.name} has no chat template",
                hint="Use an instruction-tuned model, or set task.chat_template = false.",
            )
        try:
            return str(
                self._backend.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=True,
                    strftime_now=self._today.strftime,
                )
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise TaskError(
                f"the chat template of {self.name} refuses the conversation: {first_line(error)}"
            ) from error


class NoTokenizer(Tokenizer):
    """Stands where a tokenizer stands when prompts and responses are token ids without a text: the
    last id of the vocabulary ends a response."""

    def __init__(self, vocabulary: int) -> None:
        self.name = "(none)"
        self.highest_id = vocabulary - 1
        self.eos_token_id = vocabulary - 1

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        """TaskError: there is no text."""
        raise TaskError("task.kind = synthetic has no tokenizer to encode a text with")

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """No text."""
        return ""

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """TaskError: there is no text."""
        raise TaskError("task.kind = synthetic has no tokenizer with a chat template")


def tokenizer_of(config: Config) -> Tokenizer:
    """What the task of the configuration needs: the policy's tokenizer, or none at all. Raises as
    `load_tokenizer` does."""
    if config.task.kind == "synthetic":
        return NoTokenizer(emulated_vocabulary(config.policy.model))
    return load_tokenizer(config.policy, config.task.template_date)


def load_tokenizer(policy: PolicySection, today: date = TEMPLATE_DATE) -> Tokenizer:
    """The tokenizer of the policy, checked against the model's vocabulary.

    Raises PolicyError when it cannot be loaded, has no vocabulary, or has ids that the model has no
    embedding for.
    """
    name = policy.tokenizer or policy.model
    setting = "policy.tokenizer" if policy.tokenizer else "policy.model"
    kind = "PreTrainedTokenizerFast" if _is_plain(Path(name)) else "AutoTokenizer"
    backend = _from_pretrained(kind, name, setting, policy.trust_remote_code)
    vocabulary: int | None
    try:
        vocabulary = vocabulary_of(Path(policy.model))
    except WeightsError:  # no directory, or its class knows the size
        trust = policy.trust_remote_code
        model = _from_pretrained("AutoConfig", policy.model, "policy.model", trust)
        vocabulary = getattr(model.get_text_config(), "vocab_size", None)
    tokenizer = Tokenizer(backend, name, vocabulary, today)
    added = set(backend.get_added_vocab().values())
    if not backend.get_vocab().keys() - backend.get_added_vocab().keys():
        raise PolicyError(
            f"{setting}: there is no tokenizer in {name}, or one without a vocabulary",
            hint="Set policy.tokenizer to the tokenizer that the model was trained with.",
        )
    # Models of text only may share a tokenizer with added tokens for images, which no text holds.
    if vocabulary is not None and any(
        token >= vocabulary for token in backend.get_vocab().values() if token not in added
    ):
        raise PolicyError(
            f"the tokenizer {name} has token ids up to {tokenizer.highest_id}, but the model "
            f"{policy.model} has a vocabulary of {vocabulary}",
            hint="policy.tokenizer and policy.model do not belong together.",
        )
    return tokenizer


def stop_token_ids(config: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end a response: `rollout.stop_token_ids`, or else the tokenizer's
    end-of-sequence token and every `eos_token_id` that config.json and generation_config.json of
    the model name, smallest first.

    PolicyError if there is none, or one that is no token.
    """
    configured = config.rollout.stop_token_ids
    for token in configured:
        if not 0 <= token <= tokenizer.highest_id:
            raise PolicyError(
                f"rollout.stop_token_ids: {token} is not a token of {tokenizer.name} "
                f"(0 to {tokenizer.highest_id})"
            )
    if configured:
        return configured
    found = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    if config.task.kind != "synthetic":
        found |= eos_token_ids(config.policy.model)
    if not found:
        raise PolicyError(
            f"neither the tokenizer {tokenizer.name} nor the model names an end-of-sequence token",
            hint="Set rollout.stop_token_ids.",
        )
    return tuple(sorted(found))


# The library's Auto classes import torch, which takes seconds; processes that only read and write
# text do without where the files say themselves what they are.


def _is_plain(directory: Path) -> bool:
    """Whether tokenizer.json alone says all about the tokenizer, by its own account."""
    try:
        settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (
        isinstance(settings, dict)
        and settings.get("tokenizer_class") == "TokenizersBackend"
        and "auto_map" not in settings
        and (directory / "tokenizer.json").is_file()
    )


def _from_pretrained(kind: str, name: str, setting: str, trust_remote_code: bool) -> Any:
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file() and kind == "AutoConfig":
            raise PolicyError(f"{setting} = {name}: the directory has no config.json")
    elif looks_like_path(name):
        raise PolicyError(
            f"{setting} = {name}: no such directory",
            hint=f"Relative paths start from the current directory, {os.getcwd()}.",
        )
    import transformers

    try:
        return getattr(transformers, kind).from_pretrained(
            name, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as exception:
        what = "model configuration" if kind == "AutoConfig" else "tokenizer"
        raise PolicyError(
            f"{setting} = {name}: the {what} cannot be loaded: {type(exception).__name__}: "
            f"{first_line(exception)}",
            hint="Name a directory that holds it, or a Hugging Face model that this machine can "
            "reach or has downloaded. With policy.prepare, the directory is made by the run.",
        ) from exception
