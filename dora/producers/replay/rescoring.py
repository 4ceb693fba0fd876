"""Scores responses of the log again.

A response is scored as by a rollout worker: by the same processes under the same time limits,
against the item of its prompt. If the task gives another prompt now, nothing is scored.
"""

import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from dora.config import Config
from dora.errors import TaskError, UsageError
from dora.producers.tasks.base import Task
from dora.producers.worker.scoring import EmulatedScorer, Scored, Scorer
from dora.schemas.records import Purpose, Trajectory, pack_tokens

PENDING = 2048
"""Responses handed over at once."""
_POLL_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Logged:
    """What is needed of a finished trajectory to score it again; `prompt` is the CRC-32 of its
    prompt's tokens."""

    trajectory: str
    group: str
    version: int
    ordinal: int
    purpose: Purpose
    reward: float | None
    text: str
    prompt: int

    @classmethod
    def of(cls, record: Trajectory) -> "Logged | None":
        """None for a trajectory whose generation failed: it is not scored."""
        if record.finish_reason == "error" or record.text is None:
            return None
        length = record.mask.find(1)
        prompt = record.token_ids if length < 0 else record.token_ids[: 4 * length]
        return cls(
            record.trajectory_id,
            record.group_id,
            record.policy_version,
            record.ordinal,
            record.purpose,
            record.reward,
            record.text,
            zlib.crc32(prompt),
        )


def open_scorer(
    config: Config, verifier: str | None, processes: int, beside: Path
) -> Scorer | EmulatedScorer:
    """What scores the responses of `config`'s run, now with `verifier` (`module:function`).

    The module is looked for in the directory `beside`, beside the configuration, then on sys.path.
    Without `verifier` it is what scored the run. TaskError if the verifier cannot be loaded,
    DeadlineError if its processes do not start, UsageError if there is no text to score.
    """
    if verifier is None and config.rollout.engine == "emulated":
        return EmulatedScorer(config.rollout.emulated.success_rate)
    if config.task.kind == "synthetic":
        raise UsageError(
            f"the responses of run {config.run.name} are token ids without a text "
            "(task.kind = synthetic): no verifier can score them"
        )
    home = config.home
    if verifier is not None:
        top = verifier.partition(":")[0].partition(".")[0]
        if (beside / f"{top}.py").is_file() or (beside / top / "__init__.py").is_file():
            home = beside
    update = {"verifier": verifier or config.task.verifier, "verifier_processes": processes}
    # a verifier in `beside` may import the one that it replaces
    if str(config.home) not in sys.path:
        sys.path.append(str(config.home))
    scorer = Scorer(config.task.model_copy(update=update), home)
    try:
        scorer.wait_ready()
    except TaskError as error:
        scorer.close()
        places = dict.fromkeys((str(beside.resolve()), str(config.home.resolve())))
        raise TaskError(
            error.message, hint=f"Modules are looked for in {', then '.join(places)}."
        ) from error
    except BaseException:
        scorer.close()
        raise
    return scorer


def score_again(
    logged: Iterable[Logged], task: Task, scorer: Scorer | EmulatedScorer
) -> Iterator[tuple[Logged, Scored]]:
    """Every response with its new score, as they come in.

    TaskError if the task has no such prompt any more, or another one at that place.
    """
    waiting: dict[str, Logged] = {}
    rest = iter(logged)
    while True:
        for each in islice(rest, PENDING - len(waiting)):
            prompt = task.prompt(each.ordinal, each.purpose)
            if zlib.crc32(pack_tokens(prompt.token_ids)) != each.prompt:
                raise TaskError(
                    f"the task {task.name} now gives another prompt at ordinal {each.ordinal} "
                    f"({each.purpose}) than {each.trajectory} was generated for",
                    hint="The data set, its library, a task setting or the tokenizer differs from "
                    "the run's: scores against it would mean nothing.",
                )
            waiting[each.trajectory] = each
            scorer.submit(each.trajectory, each.text, prompt.item)
        if not waiting:
            return
        scored = scorer.poll()
        for score in scored:
            yield waiting.pop(score.key), score
        if not scored:
            time.sleep(_POLL_SECONDS)
