"""Which responses of a group are worth imitating, or preferring one to the other.

Nothing is taken from held-out prompts, from responses without a score, and, as
what is to be imitated, from responses that were cut off. Every group that gives no example is
counted under its reason. Of equals the first one wins: the same run gives the same examples.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["sft", "dpo"]
Form = Literal["text", "chat", "tokens"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes an example.

    `sft`: the best response of a group, if its reward is at least `min_reward`. `dpo`: the best and
    the worst one, if their rewards are more than 0 and at least `min_margin` apart and the best is
    at least `min_reward`.
    """

    kind: Kind
    form: Form = "text"
    min_reward: float | None = None
    min_margin: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A response of a group. `whole` unless it was cut off at its length limit; `mask` tells tokens
    of the policy from those of others, `stops` are the tokens that end a response."""

    trajectory_id: str
    sample: int
    ordinal: int
    reward: float
    prompt: list[int]
    response: list[int]
    mask: list[bool]
    whole: bool
    stops: tuple[int, ...]

    @property
    def content(self) -> list[int]:
        """The response without the token that ended it, which trainers put there themselves."""
        ended = self.whole and self.response and self.response[-1] in self.stops
        return self.response[:-1] if ended else self.response


@dataclass(slots=True)
class Group:
    """What of a group is kept: at most two responses, whatever its size."""

    best: Candidate | None = None
    worst: Candidate | None = None
    turns: bool = False
    """Whether a response was passed over because others speak in it."""

    def add(self, candidate: Candidate) -> None:
        """Keep it if it is the best whole one or the worst one so far; the first of equals wins."""
        reward, sample = candidate.reward, candidate.sample
        best, worst = self.best, self.worst
        if worst is None or (reward, sample) < (worst.reward, worst.sample):
            self.worst = candidate
        if candidate.whole and (best is None or (reward, -sample) > (best.reward, -best.sample)):
            self.best = candidate

    def pick(self, choice: Choice) -> tuple[Candidate, ...] | str:
        """What the group gives, or the reason why nothing."""
        best, worst = self.best, self.worst
        if worst is None:
            return "with_turns_of_others" if self.turns else "not_scored"
        if best is None:
            return "all_cut_off"
        margin = best.reward - worst.reward
        if choice.kind == "dpo":
            if margin <= 0 or best.content == worst.content:
                return "without_difference"
            if margin < choice.min_margin:
                return "below_min_margin"
        if choice.min_reward is not None and best.reward < choice.min_reward:
            return "below_min_reward"
        return (best,) if choice.kind == "sft" else (best, worst)


class Chosen:
    """The groups of a version."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._groups: dict[str, Group] = {}

    def take(
        self, row: Mapping[str, Any], prompt: list[int], response: list[int], mask: list[bool]
    ) -> None:
        """A row of an export, its tokens, and which of the response the policy generated."""
        if row["purpose"] != "train":
            return
        group = self._groups.setdefault(row["group_id"], Group())
        if row["reward"] is None:
            return
        if self._choice.form != "tokens" and not all(mask):
            group.turns = True
            return
        group.add(
            Candidate(
                row["trajectory_id"],
                row["sample"],
                row["ordinal"],
                row["reward"],
                prompt,
                response,
                mask,
                row["finish_reason"] == "stop",
                tuple(row["sampling"]["stop_token_ids"]),
            )
        )

    def examples(self, reasons: Counter[str]) -> list[tuple[str, tuple[Candidate, ...]]]:
        """Each group's id with what it gives, in the order of their prompts; the reasons of the
        others are counted."""
        found = []
        for name, group in self._groups.items():
            picked = group.pick(self._choice)
            if isinstance(picked, str):
                reasons[picked] += 1
            else:
                found.append((name, picked))
        return sorted(found, key=lambda example: example[1][0].ordinal)
