"""One trajectory as people read it: its tokens, its chunks and attempts in time, its reward.

A view is made of records alone and holds plain values. What the log does not say is None
or not in the view, and `notes` say why; nothing is guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dora.consumers.inspect.rows import Fate
from dora.schemas.records import Purpose

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Scores:
    """The trainer's view of a trajectory's m generated tokens, under the weights that generated
    them: log-probability of each and entropy of the distribution that it was drawn from (nats)."""

    logprobs: Floats
    entropy: Floats


@dataclass(frozen=True, slots=True)
class Token:
    """A token; `text` is None without a tokenizer and empty where the character that it begins ends
    in a later token. What is not generated has no log-probability."""

    id: int
    text: str | None
    generated: bool
    logprob: float | None = None
    version: int | None = None
    trainer_logprob: float | None = None
    entropy: float | None = None

    @property
    def difference(self) -> float | None:
        """The trainer's log-probability less the engine's, if it was recomputed."""
        if self.trainer_logprob is None or self.logprob is None:
            return None
        return self.trainer_logprob - self.logprob


@dataclass(frozen=True, slots=True)
class ChunkView:
    """A chunk record: `at_ms` after the beginning, `position` counts generated tokens."""

    attempt: int
    sequence: int
    worker: str
    version: int
    at_ms: int
    position: int
    tokens: int
    resumed_tokens: int
    last: bool
    text: str | None
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class CommandView:
    """A command about the trajectory."""

    kind: str
    attempt: int
    worker: str
    at_ms: int
    prefix_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class AttemptView:
    """One attempt: who, when (ms after the beginning), how many tokens, and how it ended."""

    attempt: int
    worker: str
    from_ms: int
    until_ms: int
    tokens: int
    resumed_tokens: int
    counts: bool
    end: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Engine against trainer over the generated tokens, in nats: mean and largest absolute
    difference, where the largest is (counted from the first generated token), and the trainer's
    exact entropy."""

    mean: float
    largest: float
    at: int
    entropy_mean: float
    entropy_largest: float


@dataclass(frozen=True, slots=True)
class TrajectoryView:
    """Everything; times are ms after `began_ms` (Unix time). `advantage` is None where the group is
    not complete, has no reward or evaluates."""

    run: str
    id: str
    group: str
    sample: int
    purpose: Purpose
    version: int
    ordinal: int
    fate: Fate
    finished: bool
    reward: float | None
    reward_parts: Mapping[str, float]
    advantage: float | None
    error: str | None
    finish: str | None
    worker: str | None
    engine: str | None
    sampling: Mapping[str, Any]
    began_ms: int
    generated_ms: int | None
    finished_ms: int | None
    tokens: tuple[Token, ...]
    recorded_text: str | None
    logprob: float | None
    mismatch: Mismatch | None
    attempts: tuple[AttemptView, ...]
    chunks: tuple[ChunkView, ...]
    commands: tuple[CommandView, ...]
    partition: int | None
    offset: int | None
    notes: tuple[str, ...] = ()

    @property
    def prompt(self) -> tuple[Token, ...]:
        """The tokens before the first generated one."""
        return self.tokens[: self._begin]

    @property
    def response(self) -> tuple[Token, ...]:
        """The tokens from the first generated one on, those of an environment included."""
        return self.tokens[self._begin :]

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return sum(token.generated for token in self.tokens)

    @property
    def _begin(self) -> int:
        for index, token in enumerate(self.tokens):
            if token.generated:
                return index
        return len(self.tokens)

    def to_json(self) -> dict[str, Any]:
        """The view as JSON-able values."""
        values = asdict(self)
        values |= values.pop("fate")
        for each, token in zip(values["tokens"], self.tokens, strict=True):
            each["difference"] = token.difference
        values["prompt_tokens"] = len(self.prompt)
        values["length"] = self.generated
        values["prompt_text"] = text_of(self.prompt)
        values["response_text"] = text_of(self.response)
        return values


def text_of(tokens: Sequence[Token]) -> str | None:
    """The tokens' text; None without a tokenizer."""
    parts = [token.text for token in tokens if token.text is not None]
    return "".join(parts) if len(parts) == len(tokens) else None


def with_scores(view: TrajectoryView, scores: Scores) -> TrajectoryView:
    """The view with what the trainer says of its generated tokens."""
    if len(scores.logprobs) != view.generated:
        raise ValueError(f"{len(scores.logprobs)} scores for {view.generated} generated tokens")
    if not view.generated:
        return view
    pairs = iter(zip(scores.logprobs.tolist(), scores.entropy.tolist(), strict=True))
    tokens = []
    for token in view.tokens:
        if token.generated:
            logprob, entropy = next(pairs)
            token = replace(token, trainer_logprob=logprob, entropy=entropy)
        tokens.append(token)
    recorded = [token.logprob for token in tokens if token.logprob is not None]
    return replace(view, tokens=tuple(tokens), mismatch=mismatch_of(scores, np.array(recorded)))


def mismatch_of(scores: Scores, recorded: npt.NDArray[np.float64]) -> Mismatch:
    """What the trainer says against what was recorded of the same tokens, one at least."""
    gaps = np.abs(scores.logprobs - recorded)
    return Mismatch(
        mean=float(gaps.mean()),
        largest=float(gaps.max()),
        at=int(gaps.argmax()),
        entropy_mean=float(scores.entropy.mean()),
        entropy_largest=float(scores.entropy.max()),
    )
