"""What runs in the verifier processes: load the verifier once, then judge responses.

Whatever a verifier does short of hanging or killing its process becomes a `Verdict`. This module
and its imports stay light (no configuration, no model libraries), because a process is started anew
each time a verifier hangs. The process ends when its parent does.
"""

import ctypes
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from numbers import Real
from pathlib import Path
from typing import Any

from dora.errors import TaskError
from dora.producers.tasks.hooks import load_hook

Verifier = Callable[[str, dict[str, Any]], Any]

LONGEST_REASON = 500
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class VerifierRecipe:
    """Where a verifier comes from: a hook, or the scorer of a reasoning-gym task."""

    home: str
    hook: str | None = None
    gym_name: str | None = None
    gym_parameters: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Verifier:
        """The verifier; TaskError says why there is none."""
        if self.hook is not None:
            return load_hook(self.hook, Path(self.home), "task.verifier")
        if self.gym_name is None:
            raise TaskError("the task has neither a verifier nor a reasoning-gym name")
        from dora.producers.tasks.gym_library import load_dataset
        from dora.producers.tasks.verifiers import answer_of

        dataset = load_dataset(self.gym_name, {"seed": 0, **self.gym_parameters})

        def score(response: str, item: dict[str, Any]) -> float:
            return float(dataset.score_answer(answer_of(response), item))

        return score


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one response; without a reward, `code` and `reason` say why."""

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    code: str | None = None
    reason: str | None = None


@dataclass(slots=True)
class _Loaded:
    verifier: Verifier | None = None
    error: str | None = None


_loaded = _Loaded()


def install(recipe: VerifierRecipe) -> None:
    """Prepare this process: bind its life to the parent's, and load the verifier.

    A verifier that cannot be loaded is kept as an error, which `ready` and `judge` report.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_with_parent()
    try:
        _loaded.verifier = recipe.load()
    except TaskError as error:
        _loaded.error = str(error)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if sys.platform == "linux":
        # The kernel ends the process even while a verifier holds the interpreter's lock.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent.pid:
            os._exit(1)

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def ready() -> str | None:
    """Why the verifier could not be loaded, or None."""
    return _loaded.error


def judge(jobs: list[tuple[str, dict[str, Any]]]) -> tuple[list[Verdict], float]:
    """Verdicts on (response, item) pairs, in order, and the seconds that they took."""
    started = time.perf_counter()
    verdicts = [_judge_one(response, item) for response, item in jobs]
    return verdicts, time.perf_counter() - started


def _judge_one(response: str, item: dict[str, Any]) -> Verdict:
    if _loaded.verifier is None:
        return Verdict(None, code="verifier_raised", reason=_loaded.error or "not loaded")
    try:
        value = _loaded.verifier(response, item)
    except (Exception, SystemExit) as exception:  # noqa: BLE001 (foreign code)
        return Verdict(None, code="verifier_raised", reason=_describe(exception))
    return check(value)


def _describe(exception: BaseException) -> str:
    frames = traceback.extract_tb(exception.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(exception).__name__}: {exception}"[:LONGEST_REASON] + place


def _number(value: Any) -> float | None:
    if not isinstance(value, Real):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def check(value: Any) -> Verdict:
    """The verdict that a verifier's return value stands for."""
    if not isinstance(value, dict):
        reward = _number(value)
        if reward is None:
            return _bad(f"the verifier returned {value!r}, not a finite number")
        return Verdict(reward)
    if "reward" not in value:
        return _bad(f'the verifier returned a dict without "reward": {sorted(map(str, value))}')
    parts: dict[str, float] = {}
    for name, part in value.items():
        number = _number(part)
        if not isinstance(name, str) or number is None:
            return _bad(f"the verifier returned {name!r}: {part!r}, not a finite number")
        parts[name] = number
    return Verdict(parts.pop("reward"), parts)


def _bad(reason: str) -> Verdict:
    return Verdict(None, code="verifier_bad_value", reason=reason[:LONGEST_REASON])
