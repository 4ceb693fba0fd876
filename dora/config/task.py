"""The section `task`: prompts, and how answers are scored."""

from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dora.config.section import Hook, Positive, Seconds, Section


class TaskSection(Section):
    """Prompts and how answers are scored."""

    kind: Literal["reasoning-gym", "jsonl", "synthetic"]
    """Where prompts come from: a task of the reasoning-gym library, a JSONL file, or for emulated
    engines `synthetic`: token ids without a text, which need no tokenizer."""
    name: str | None = None
    """reasoning-gym: name of the task, such as `spell_backward`."""
    parameters: dict[str, Any] = {}
    """reasoning-gym: parameters of the task, passed through."""
    path: Path | None = None
    """jsonl: the file, one JSON object a line; relative to the configuration file."""
    prompt_field: str = "prompt"
    """jsonl: field with the prompt: a string, or a list of chat messages."""
    answer_field: str = "answer"
    """jsonl: field with the reference answer, handed to the verifier."""
    shuffle: bool = True
    """jsonl: go through the file in a new seeded order each epoch."""
    held_out_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the prompts kept apart for evaluation (chosen by hash of the text, stable)."""
    chat_template: bool = False
    """Put prompts through the tokenizer's chat template."""
    template_date: date = date(2026, 1, 1)
    """What a chat template that inserts the current date takes for it: the same on every day of a
    run."""
    render: Hook | None = None
    """`module:function(item: dict) -> str`: makes the prompt text of an item."""
    verifier: Hook | None = None
    """`module:function(response: str, item: dict) -> float | dict[str, float]`: the reward; a dict
    holds named parts with the total under `reward`. By default reasoning-gym's own scorer.
    `dora.producers.tasks.verifiers:math` is math-verify."""
    verifier_timeout_seconds: Seconds = 10.0
    """A verifier that takes longer is stopped and its group set aside."""
    verifier_processes: Positive = 1
    """Processes per worker that run the verifier beside the generation."""
    success_threshold: float = 1.0
    """A trajectory with at least this reward counts as a success."""
    max_prompt_tokens: Positive = 1024
    """Longer prompts are refused when the data set is read."""
    synthetic_prompts: Positive = 1024
    """synthetic: number of different prompts, gone through again and again."""
    synthetic_prompt_tokens: Positive = 256
    """synthetic: length of each prompt in tokens."""

    @model_validator(mode="after")
    def _fields_fit_the_kind(self) -> "TaskSection":
        if self.kind == "reasoning-gym" and self.name is None:
            raise ValueError("task.name is needed: the reasoning-gym task, such as spell_backward")
        if self.kind == "jsonl" and self.path is None:
            raise ValueError("task.path is needed: the JSONL file with the prompts")
        if self.kind == "jsonl" and self.verifier is None:
            raise ValueError("task.verifier is needed: module:function that scores a response")
        return self
