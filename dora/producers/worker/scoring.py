"""Scoring beside the generation, in processes of its own.

Every response that was submitted comes back exactly once, with a reward or with the reason why it
has none, whatever its verifier does: raise, hang, return nonsense or kill its process. Nothing here
waits: `submit` and `poll` return at once.

Responses go to the processes in bundles, because handing one over costs more than most verifiers
take. When a bundle hangs or kills its process, its responses are judged again one by one, so that
only the guilty one is blamed.
"""

import hashlib
import multiprocessing
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from dora.closeable import Closeable
from dora.config import TaskSection
from dora.errors import DeadlineError, TaskError
from dora.producers.tasks import judge
from dora.producers.tasks.judge import Verdict, VerifierRecipe

BUNDLE_SECONDS = 0.05
"""Work that one bundle should hold."""
LARGEST_BUNDLE = 64
GATHER_SECONDS = 0.025
"""Least time between two bundles, in which responses gather: a bundle costs 0.7 ms of CPU."""
FIRST_BUNDLE = 8
START_SECONDS = 180.0
"""How long processes may take to start and load the verifier."""
RESTARTS = 5
"""Pools that may break one after the other before scoring is given up."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What came of one response.

    `reward` is None when it could not be scored; then `error_code` is one of `verifier_raised`,
    `verifier_timeout`, `verifier_bad_value`, `verifier_died`, and `error` says more.
    """

    key: str
    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    error_code: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    key: str
    response: str
    item: dict[str, Any]


class Scorer(Closeable):
    """Runs a task's verifier in a pool of processes, each response within a time limit.

    The processes start at once, in the background. They are spawned, not forked, because the
    process that scores usually hosts an engine; they end with it, however it ends. Use from one
    thread.
    """

    def __init__(self, task: TaskSection, home: Path) -> None:
        self._limit = task.verifier_timeout_seconds
        self._processes = task.verifier_processes
        self._recipe = VerifierRecipe(
            home=str(home.resolve()),
            hook=task.verifier,
            gym_name=task.name if task.kind == "reasoning-gym" else None,
            gym_parameters=dict(task.parameters),
        )
        self._waiting: deque[_Job] = deque()
        self._suspects: deque[_Job] = deque()
        self._flying: dict[Future[Any], list[_Job]] = {}
        self._landed: deque[Future[Any]] = deque()
        self._seconds_per_job = BUNDLE_SECONDS / FIRST_BUNDLE
        self._restarts = 0
        self.verifier_seconds = 0.0
        """What the verifier took for the responses that have come back, processes added up."""
        self._dispatched = 0.0
        self._closed = False
        self._start()

    @property
    def pending(self) -> int:
        """Responses that were submitted and have not come back."""
        flying = sum(map(len, self._flying.values()))
        return len(self._waiting) + len(self._suspects) + flying

    def submit(self, key: str, response: str, item: dict[str, Any]) -> None:
        """Hand over a response to the item's prompt; `key` comes back with its score."""
        self._waiting.append(_Job(key, response, item))
        self._dispatch()

    def poll(self) -> list[Scored]:
        """Scores that have come in since the last call.

        Raises TaskError when the verifier cannot be loaded, or its processes die again and again
        without having been given a response.
        """
        scored: list[Scored] = []
        while self._landed:
            future = self._landed.popleft()
            jobs = self._flying.pop(future, None)
            if jobs is not None:
                scored.extend(self._settle(future, jobs))
        if self._flying and time.monotonic() - self._progress > START_SECONDS + 2 * self._limit:
            self._restart("no answer")
        self._check_loaded()
        self._dispatch()
        return scored

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until the verifier is loaded. TaskError if it cannot be, DeadlineError in time."""
        try:
            self._greeting.exception(timeout=seconds)
        except TimeoutError as exception:
            raise DeadlineError(
                f"the verifier processes were not ready after {seconds:g} s",
                hint="Importing the module of task.verifier takes too long, or the machine is "
                "overloaded.",
            ) from exception
        self._check_loaded()

    def close(self) -> None:
        """Stop the processes; responses that have not come back are dropped."""
        if not self._closed:
            self._closed = True
            self._stop()

    def _start(self) -> None:
        self._pool = ProcessPool(
            max_workers=self._processes,
            initializer=judge.install,
            initargs=(self._recipe,),
            context=multiprocessing.get_context("spawn"),
        )
        self._greeting: Future[Any] = self._pool.schedule(judge.ready)
        self._greeted = False
        self._progress = time.monotonic()

    def _stop(self) -> None:
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()

    def _check_loaded(self) -> None:
        if self._greeted or not self._greeting.done():
            return
        if self._greeting.cancelled() or self._greeting.exception() is not None:
            self._restart("a process ended while it loaded the verifier")
            return
        self._greeted = True
        problem = self._greeting.result()
        if problem is not None:
            raise TaskError(f"the verifier cannot be loaded: {problem}")

    def _restart(self, why: str) -> None:
        """A new pool; what the old one held is judged again, one by one."""
        self._restarts += 1
        if self._restarts > RESTARTS:
            raise TaskError(
                f"the verifier processes broke {self._restarts} times in a row: {why}",
                hint="Run the verifier by hand in a Python of its own; look for crashes of native "
                "libraries and for too little memory.",
            )
        self._stop()
        for jobs in self._flying.values():
            self._suspects.extend(jobs)
        self._flying.clear()
        self._landed.clear()
        self._start()

    def _dispatch(self) -> None:
        # One bundle per process runs while another waits; more would only delay bad news.
        now = time.monotonic()
        gathering = now - self._dispatched < GATHER_SECONDS and len(self._waiting) < LARGEST_BUNDLE
        while len(self._flying) < 2 * self._processes and (
            self._suspects or (self._waiting and not gathering)
        ):
            if self._suspects:
                jobs = [self._suspects.popleft()]
            else:
                share = -(-len(self._waiting) // self._processes)
                size = int(BUNDLE_SECONDS / max(self._seconds_per_job, 1e-6))
                size = max(1, min(size, share, LARGEST_BUNDLE))
                jobs = [self._waiting.popleft() for _ in range(size)]
            try:
                future = self._pool.schedule(
                    judge.judge,
                    args=([(job.response, job.item) for job in jobs],),
                    timeout=self._limit,
                )
            except RuntimeError:
                # An idle process was killed from outside: pebble gives up the whole pool then.
                self._suspects.extend(jobs)
                self._restart("a process ended while it had nothing to do")
                continue
            self._dispatched = now
            self._flying[future] = jobs
            future.add_done_callback(self._landed.append)

    def _settle(self, future: Future[Any], jobs: list[_Job]) -> list[Scored]:
        self._progress = time.monotonic()
        if future.cancelled():
            failure: BaseException | None = CancelledError()
        else:
            failure = future.exception()
        if failure is None:
            self._restarts = 0
            verdicts, seconds = future.result()
            self.verifier_seconds += seconds
            per_job = seconds / len(jobs)
            self._seconds_per_job += 0.3 * (per_job - self._seconds_per_job)
            return _scored(jobs, verdicts)
        if isinstance(failure, TimeoutError):
            code = "verifier_timeout"
            reason = f"the verifier took longer than {self._limit:g} s and was stopped"
        elif isinstance(failure, ProcessExpired):
            code = "verifier_died"
            reason = f"the verifier's process ended with {_exit(failure.exitcode)}"
        elif isinstance(failure, (CancelledError, RuntimeError)):
            self._suspects.extend(jobs)
            if not self._pool.active:
                self._restart(f"{type(failure).__name__}: {failure}")
            return []
        else:
            code = "verifier_raised"
            reason = f"the response could not be handed over: {type(failure).__name__}: {failure}"
        if len(jobs) > 1:
            self._suspects.extend(jobs)
            self._seconds_per_job = max(self._seconds_per_job, self._limit / len(jobs))
            return []
        return _scored(jobs, [Verdict(None, code=code, reason=reason)])


def _scored(jobs: Sequence[_Job], verdicts: Sequence[Verdict]) -> list[Scored]:
    return [
        Scored(job.key, verdict.reward, verdict.parts, verdict.code, verdict.reason)
        for job, verdict in zip(jobs, verdicts, strict=True)
    ]


def _exit(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


class EmulatedScorer:
    """Rewards for the emulated engine, whose responses no verifier could judge.

    The reward depends on the trajectory's id alone, so a second attempt gets the same one.
    """

    def __init__(self, success_rate: float) -> None:
        self._success_rate = success_rate
        self._scored: list[Scored] = []
        self.verifier_seconds = 0.0
        """As of a `Scorer`: nothing is verified here."""

    @property
    def pending(self) -> int:
        """Responses submitted and not yet polled."""
        return len(self._scored)

    def submit(self, key: str, response: str, item: dict[str, Any]) -> None:
        """Draws the reward, 1 or 0, from the key."""
        digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
        drawn = int.from_bytes(digest, "little") / 2**32
        self._scored.append(Scored(key, float(drawn < self._success_rate)))

    def poll(self) -> list[Scored]:
        """Everything submitted since the last call."""
        scored, self._scored = self._scored, []
        return scored

    def close(self) -> None:
        """Nothing to end."""
