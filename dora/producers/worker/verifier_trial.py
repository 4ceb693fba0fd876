"""A verifier's trial on real rows, before a run depends on it.

A verifier that fails for every response would set every group aside. So each worker, when it
starts, and `dora run --dry-run` have it judge a few rows in the processes that will score the run.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dora.config import Config
from dora.errors import TaskError
from dora.producers.tasks.base import Task
from dora.producers.worker.scoring import Scored, Scorer
from dora.schemas.records import Purpose

ROWS = 3
SECONDS = 60.0
"""How long a trial waits for scores. A verifier that takes longer is slow, not wrong."""
_POLL_SECONDS = 0.005
_REFERENCE, _AGAIN = "the reference answer", "the reference answer again"
_EMPTY = "an empty response"


@dataclass(frozen=True, slots=True)
class Trial:
    """What the verifier made of a response, named by `response`, to the row at `place`; `scored` is
    None if it had not answered in time."""

    place: str
    response: str
    scored: Scored | None


def try_verifier(config: Config, task: Task, *, seconds: float = SECONDS) -> tuple[Trial, ...]:
    """Has the verifier judge the first rows: the reference answer twice, where a row has one that
    is a text or a number, and an empty response.

    Raises TaskError, with row and exception, if it cannot be loaded, if a value is no finite
    number, or if no response of a kind got a score in any row. One row without a score may be a bad
    row: its groups are set aside. DeadlineError if its processes do not start.
    """
    rows: list[tuple[Purpose, int]] = [("train", ordinal) for ordinal in range(ROWS)]
    if config.evaluation.prompts:
        rows.append(("eval", 0))
    asked: dict[str, tuple[str, str, str, dict[str, Any]]] = {}
    for purpose, ordinal in rows:
        item = task.prompt(ordinal, purpose).item
        responses = [(_EMPTY, "")]
        reference = _text(item.get("answer"))
        if reference is not None:
            responses = [(_REFERENCE, reference), (_AGAIN, reference), *responses]
        for name, response in responses:
            asked[str(len(asked))] = task.place(ordinal, purpose), name, response, item
    found: dict[str, Scored] = {}
    with Scorer(config.task, config.home) as scorer:
        scorer.wait_ready()
        for key, (_, _, response, item) in asked.items():
            scorer.submit(key, response, item)
        end = time.monotonic() + seconds
        while len(found) < len(asked) and time.monotonic() < end:
            found |= {scored.key: scored for scored in scorer.poll()}
            time.sleep(_POLL_SECONDS)
    trials = tuple(Trial(place, name, found.get(k)) for k, (place, name, *_) in asked.items())
    hook = config.task.verifier
    _judge(trials, f'task.verifier = "{hook}"' if hook else f"the scorer of {config.task.name}")
    return trials


def summary(trials: Sequence[Trial]) -> str:
    """The scores, for people."""
    told = []
    for name in (_REFERENCE, _EMPTY):
        chosen = [trial for trial in trials if trial.response == name]
        if chosen:
            told.append(f"{name} scores {', '.join(map(_score, chosen))}")
    again = {t.place: _score(t) for t in trials if t.response == _AGAIN}
    differ = [t.place for t in trials if t.response == _REFERENCE and again[t.place] != _score(t)]
    if differ:
        told.append(f"the same response scored twice differs ({differ[0]})")
    return "; ".join(told)


def _text(answer: Any) -> str | None:
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        return None
    return str(answer) if str(answer).strip() else None


def _score(trial: Trial) -> str:
    if trial.scored is None:
        return "nothing in time"
    return "none" if trial.scored.reward is None else f"{trial.scored.reward:g}"


def _judge(trials: Sequence[Trial], verifier: str) -> None:
    failed = [trial for trial in trials if trial.scored and trial.scored.reward is None]
    bad = [t for t in failed if t.scored and t.scored.error_code == "verifier_bad_value"]
    refused = bad[:1]
    for name in (_REFERENCE, _EMPTY):
        kind = [trial for trial in trials if trial.response == name]
        if kind and all(trial in failed for trial in kind):
            refused += kind[:1]
    if not refused:
        return
    first = refused[0]
    assert first.scored is not None
    raise TaskError(
        f"{verifier} gives no score to {first.response} ({first.place}): {first.scored.error}",
        hint="It is called as verify(response: str, item: dict) and returns a finite number, or a "
        'dict of numbers with "reward", also for a wrong or an empty response (0, for instance). '
        "`dora run CONFIG --dry-run` tries it again.",
    )
