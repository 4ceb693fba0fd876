"""A verifier is tried on real rows, in its real processes, before a run depends on it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dora.errors import TaskError
from dora.producers.tasks.kinds import JsonlTask
from dora.producers.worker.verifier_trial import Trial, summary, try_verifier
from tests.configurations import emulated

VERIFIERS = """
import time

def good(response, item):
    return {"reward": float(response == str(item["answer"])), "length": len(response)}

def raises(response, item):
    return item["no_such_field"]

def wrong_signature(response):
    return 1.0

def none_if_wrong(response, item):
    return 1.0 if response == item["answer"] else None

def not_a_number(response, item):
    return float("nan")

def text(response, item):
    return "1.0"

def one_bad_row(response, item):
    if item["answer"] == "1":
        raise ValueError("this row cannot be read")
    return 0.0

def slow(response, item):
    time.sleep(30)
    return 1.0
"""


class Bytes:
    """Every byte is a token."""

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        return tuple(text.encode())

    def chat(self, messages: Any) -> str:
        raise AssertionError("no task here has a chat template")


def trial_of(
    home: Path, verifier: str, answers: Sequence[object] = ("0", "1", "2"), seconds: float = 60.0
) -> tuple[Trial, ...]:
    (home / "tried_verifiers.py").write_text(VERIFIERS)
    rows = [{"prompt": f"say {answer}", "answer": answer} for answer in answers]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = emulated(
        home,
        task={
            "kind": "jsonl",
            "path": "rows.jsonl",
            "prompt_field": "prompt",
            "verifier": f"tried_verifiers:{verifier}",
            "shuffle": False,
            "held_out_fraction": 0.0,
        },
        evaluation={"prompts": 0},
    ).model_copy(update={"home": home})
    return try_verifier(config, JsonlTask(config, Bytes()), seconds=seconds)


def test_a_verifiers_scores_of_reference_and_empty_response_are_shown(tmp_path: Path) -> None:
    trials = trial_of(tmp_path, "good", ["a", 1.5, ["no", "text"]])
    assert summary(trials) == ("the reference answer scores 1, 1; an empty response scores 0, 0, 0")
    assert trials[0].place == f"{tmp_path / 'rows.jsonl'}, line 1"


@pytest.mark.parametrize(
    ("verifier", "said"),
    [
        ("raises", "the reference answer (ROWS, line 1): KeyError: 'no_such_field'"),
        ("wrong_signature", "TypeError: wrong_signature() takes 1 positional argument"),
        ("none_if_wrong", "an empty response (ROWS, line 1): the verifier returned None"),
        ("not_a_number", "the verifier returned nan, not a finite number"),
        ("text", "the verifier returned '1.0', not a finite number"),
    ],
)
def test_a_verifier_that_always_fails_is_refused_with_row_and_exception(
    tmp_path: Path, verifier: str, said: str
) -> None:
    with pytest.raises(TaskError) as refused:
        trial_of(tmp_path, verifier)
    assert said.replace("ROWS", str(tmp_path / "rows.jsonl")) in refused.value.message
    assert "verify(response: str, item: dict)" in (refused.value.hint or "")
    assert refused.value.permanent


def test_one_row_that_cannot_be_scored_refuses_no_verifier(tmp_path: Path) -> None:
    trials = trial_of(tmp_path, "one_bad_row")
    assert "an empty response scores 0, none, 0" in summary(trials)


def test_a_slow_verifier_is_not_waited_for_and_not_refused(tmp_path: Path) -> None:
    trials = trial_of(tmp_path, "slow", ["0"], seconds=0.2)
    assert {trial.scored for trial in trials} == {None}
    assert "nothing in time" in summary(trials)
