"""The rollout worker: hosts one engine, carries out commands, writes what it generates.

Invariants: one thread drives engine and bus (take commands, step the engine, emit, heartbeat);
scoring runs beside it and never blocks generation. An attempt is started only under the version
that the engine hosts, and the version changes only while nothing runs, so that each attempt is of
one version (C1). A trajectory counts as in hand until its record is acknowledged by Kafka: what a
worker no longer names in its status is safe in the log.
"""

import logging
import threading
import time
from collections.abc import Callable

from dora import faults
from dora.bus.reader import BEGINNING, END, LogReader, Message, Unreadable
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.core.ring import worker_partition
from dora.core.roster import holding
from dora.core.window import Window
from dora.errors import DeadlineError, DoraError, MissingWeightsError, TaskError
from dora.producers.attempt_writer import AttemptWriter
from dora.producers.emulated_scoring import EmulatedScorer
from dora.producers.engines.base import Delta, Engine
from dora.producers.generation import Attempt, attempt_seed
from dora.producers.installation import Installed, Installer
from dora.producers.reporter import Reporter
from dora.producers.scoring import Scored, Scorer
from dora.producers.tasks.base import Prompt, Task
from dora.producers.tokenization import Tokenizer
from dora.schemas.records import (
    Command,
    Policy,
    ProcessState,
    Sampling,
)

log = logging.getLogger(__name__)

POLICY_SECONDS = 60.0
DRAIN_SECONDS = 5.0


class Worker:
    """One rollout worker; `run` returns when told to stop."""

    def __init__(
        self,
        config: Config,
        settings: ClusterSettings,
        worker: str,
        *,
        engine: Engine,
        installer: Installer,
        task: Task,
        tokenizer: Tokenizer,
        scorer: Scorer | EmulatedScorer,
        stop_token_ids: tuple[int, ...],
        clock: Callable[[], float] = time.monotonic,
        alive: Callable[[float], None] = lambda seconds: None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._config = config
        self._name = worker
        self._engine = engine
        self._installer = installer
        self._task = task
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._stop_token_ids = stop_token_ids
        self._clock = clock
        self._alive = alive
        self._now_ms = now_ms
        self._topics = RunTopics(config.run.name)
        self._reader = LogReader(settings, client_id=worker)
        self._writer = LogWriter(settings, client_id=worker)
        self._reporter = Reporter(config, self._writer, worker, clock, now_ms)
        self._output = AttemptWriter(config, self._writer, now_ms)
        self._window = Window(config.window.max_staleness, config.window.groups_per_step)
        self._policies: dict[int, Policy] = {}
        self._attempts: dict[str, Attempt] = {}
        self._scored: list[Scored] = []
        self._unconfirmed: list[str] = []
        self._switch: tuple[int, float] | None = None
        self._told_to_stop = False
        self._command_offset = -1

    def run(self, stop: threading.Event) -> None:
        """Works until `stop` is set or the coordinator says stop.

        Raises CanaryError or WeightsError when a version cannot be put into the engine, BusError
        when Kafka refuses, and whatever the engine itself dies of; the last status says so.
        """
        partition_index = worker_partition(self._name, self._config.kafka.dispatch_partitions)
        try:
            self._reader.assign(
                {
                    (self._topics.dispatch, partition_index): END,
                    (self._topics.policies, 0): BEGINNING,
                }
            )
            self._say("ready", "waiting for a version")
            while not (stop.is_set() or self._told_to_stop):
                self._turn()
            self._drain()
            self._say("stopped", "stopped by the coordinator" if self._told_to_stop else "stopped")
        except Exception as error:
            what = error.message if isinstance(error, DoraError) else repr(error)
            self._last_words(what)
            raise
        finally:
            self._reader.close()
            self._writer.close()

    def _turn(self) -> None:
        """Commands, one engine step, scores, heartbeat."""
        busy = self._engine.running or self._scored
        wait = 0.0 if busy else 0.01 if self._scorer.pending else 0.05
        for message in self._reader.poll(timeout=wait):
            self._apply(message)
        if self._switch is not None:
            self._try_switch(*self._switch)
        deltas = self._engine.step()
        # what was scored before this step: its chunks were acknowledged meanwhile
        self._finish_scored()
        now_ms = self._now_ms()
        for delta in deltas:
            self._take(delta, now_ms)
        self._scored += self._scorer.poll()
        self._writer.poll()
        if self._clock() - self._reporter.sent_at >= self._config.rollout.heartbeat_seconds:
            self._hand_back_stalled()
            self._beat()

    def _apply(self, message: Message) -> None:
        value = message.value
        if isinstance(value, Policy):
            self._policies[value.version] = value
            for version in [v for v in self._policies if v < value.version - 128]:
                del self._policies[version]
        elif isinstance(value, Unreadable):
            self._reporter.dead_letter(
                value.code, value.reason, message=message, payload=value.payload
            )
        elif isinstance(value, Command) and value.worker == self._name:
            self._command_offset = message.offset
            self._reporter.commanded()
            if value.incarnation != self._reporter.incarnation:
                return
            match value.kind:
                case "start":
                    self._start(value)
                case "yield":
                    self._yield(value)
                case "switch":
                    self._switch = (value.policy_version, self._clock() + POLICY_SECONDS)
                case "stop":
                    log.info("told to stop: %s", value.reason)
                    self._told_to_stop = True

    def _start(self, command: Command) -> None:
        former = self._attempts.get(command.trajectory_id)
        if former is not None and (
            former.finish_reason is not None or former.command.attempt >= command.attempt
        ):
            self._reporter.dead_letter(
                "already_running",
                f"attempt {command.attempt} of {command.trajectory_id} was sent while attempt "
                f"{former.command.attempt} is in hand",
                trajectory_id=command.trajectory_id,
            )
            return
        if former is not None:
            self._hand_back(former)  # this worker was given up, and is trusted again
        if command.policy_version != self._engine.version:
            self._reporter.dead_letter(
                "wrong_version",
                f"{command.trajectory_id} is to be generated by version {command.policy_version}, "
                f"but this worker hosts {self._engine.version}",
                trajectory_id=command.trajectory_id,
            )
            return
        rollout = self._config.rollout
        seed = (
            attempt_seed(self._config.run.seed, command.trajectory_id, command.attempt)
            if rollout.seeded
            else None
        )
        sampling = Sampling(
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            rollout.max_new_tokens,
            self._stop_token_ids,
            seed,
        )
        try:
            prompt = self._task.prompt(command.ordinal, command.purpose)
        except TaskError as error:
            prompt = Prompt(command.ordinal, "", (), {})
            attempt = self._attempt(command, prompt, sampling)
            self._fail(attempt, "prompt_failed", str(error))
            return
        self._engine.add(self._attempt(command, prompt, sampling).request())

    def _attempt(self, command: Command, prompt: Prompt, sampling: Sampling) -> Attempt:
        attempt = Attempt(command, prompt, sampling, self._name, self._now_ms(), self._clock())
        self._attempts[command.trajectory_id] = attempt
        return attempt

    def _yield(self, command: Command) -> None:
        attempt = self._attempts.get(command.trajectory_id)
        if attempt is None or attempt.finish_reason is not None:
            return
        if attempt.command.attempt != command.attempt:
            return
        self._hand_back(attempt)

    def _hand_back(self, attempt: Attempt) -> None:
        """Ends an attempt early; what it has goes into its last chunk."""
        self._engine.abort(attempt.command.trajectory_id)
        self._output.chunk(attempt, last=True)
        del self._attempts[attempt.command.trajectory_id]

    def _try_switch(self, version: int, deadline: float) -> None:
        policy = self._policies.get(version)
        if policy is None and not self._departed(version):
            if self._clock() > deadline:
                raise DeadlineError(
                    f"version {version} was to be loaded, but its record did not come in "
                    f"{POLICY_SECONDS:.0f} s on {self._topics.policies}"
                )
            return
        for attempt in [a for a in self._attempts.values() if a.finish_reason is None]:
            self._hand_back(attempt)
            log.warning(
                "%s was still running when version %d was to be loaded; handed back",
                attempt.command.trajectory_id,
                version,
            )
        self._say("loading", f"loading version {version}")
        faults.point("worker.version_loading")
        installed = None if policy is None else self._install(policy)
        if self._switch == (version, deadline):  # no other was ordered meanwhile
            self._switch = None
        if installed is None:
            self._say("ready", f"version {version} has left the window: not loaded")
            return
        faults.point("worker.version_loaded")
        self._reporter.metrics["load_seconds"] = installed.seconds
        self._reporter.metrics["canary_difference_max"] = installed.canary.max_difference
        self._reporter.metrics["canary_difference_mean"] = installed.canary.mean_difference
        self._reporter.count("switches_total")
        self._reporter.count("engine_restarts_total", float(installed.fresh_engine))
        self._say("ready", f"hosts version {version}")

    def _install(self, policy: Policy) -> Installed | None:
        """Loads a version; None if its files are gone because it has left the window meanwhile."""
        try:
            return self._installer.install(policy)
        except MissingWeightsError as error:
            for message in self._reader.poll(timeout=1.0):
                self._apply(message)
            if not self._departed(policy.version):
                raise
            log.warning("%s", error.message)
            return None

    def _departed(self, version: int) -> bool:
        """Whether the version left the window: all its groups are trained, nobody needs it."""
        return version < self._window.oldest_live(max(self._policies, default=0))

    def _hand_back_stalled(self) -> None:
        """Takes back what its engine seems to have forgotten, so that it is tried again."""
        limit = self._config.rollout.stall_timeout_seconds
        now = self._clock()
        for attempt in list(self._attempts.values()):
            if attempt.finish_reason is None and now - attempt.progress_at > limit:
                self._reporter.dead_letter(
                    "stalled",
                    f"attempt {attempt.command.attempt} got no token for {limit:g} s after "
                    f"{len(attempt.tokens)} (rollout.stall_timeout_seconds); it is tried again",
                    trajectory_id=attempt.command.trajectory_id,
                )
                self._hand_back(attempt)

    def _take(self, delta: Delta, now_ms: int) -> None:
        attempt = self._attempts.get(delta.request_id)
        if attempt is None:
            return
        attempt.take(delta, now_ms)
        attempt.progress_at = self._clock()
        self._reporter.count("tokens_total", len(delta.token_ids))
        self._output.chunk(attempt)
        if attempt.finish_reason == "error":
            self._fail(attempt, "generation_failed", attempt.error or "the engine gave no reason")
        elif attempt.finish_reason is not None:
            text = self._tokenizer.decode(attempt.tokens)
            self._scorer.submit(delta.request_id, text, attempt.prompt.item)

    def _finish_scored(self) -> None:
        """Writes what is scored. Chunks and trajectories lie in different partitions: should this
        process die, a trajectory that is in the log must not lack chunks."""
        if self._scored:
            self._writer.flush(self._config.kafka.request_timeout_seconds)
        for scored in self._scored:
            self._finish(scored)
        self._scored.clear()

    def _finish(self, scored: Scored) -> None:
        attempt = self._attempts.get(scored.key)
        if attempt is None:
            return
        if scored.reward is None:
            code = scored.error_code or "verifier_failed"
            self._reporter.dead_letter(
                code,
                scored.error or code,
                trajectory_id=scored.key,
                payload=self._tokenizer.decode(attempt.tokens).encode(),
            )
        error = None if scored.reward is not None else f"{scored.error_code}: {scored.error}"
        self._write(attempt, scored.reward, scored.parts, error)

    def _fail(self, attempt: Attempt, code: str, reason: str) -> None:
        attempt.finish_reason = "error"
        self._reporter.dead_letter(code, reason, trajectory_id=attempt.command.trajectory_id)
        self._write(attempt, None, {}, f"{code}: {reason}")

    def _write(
        self, attempt: Attempt, reward: float | None, parts: dict[str, float], error: str | None
    ) -> None:
        text = self._tokenizer.decode(attempt.tokens)
        self._output.trajectory(attempt, self._engine.name, reward, parts, error, text)
        self._reporter.count("trajectories_total")
        self._unconfirmed.append(attempt.command.trajectory_id)

    def _say(self, state: ProcessState, message: str) -> None:
        self._reporter.state, self._reporter.message = state, message
        log.info("%s: %s", state, message)
        self._beat()

    def _last_words(self, what: str) -> None:
        try:
            self._say("failed", what)
        except DoraError:
            log.exception("could not tell the coordinator of the failure")

    def _beat(self) -> None:
        """Confirms what was written, then says what is still in hand."""
        rollout = self._config.rollout
        loading = self._reporter.state == "loading"
        self._alive(rollout.load_timeout_seconds if loading else rollout.hang_timeout_seconds)
        self._writer.flush(self._config.kafka.request_timeout_seconds)
        for trajectory_id in self._unconfirmed:
            self._attempts.pop(trajectory_id, None)
        self._unconfirmed.clear()
        self._reporter.metrics["scoring"] = float(self._scorer.pending)
        self._reporter.send(
            version=self._engine.version,
            loading=-1 if self._switch is None else self._switch[0],
            running=(
                holding(trajectory_id, attempt.command.attempt)
                for trajectory_id, attempt in self._attempts.items()
            ),
            command_offset=self._command_offset,
        )

    def _drain(self) -> None:
        """Gives running verifiers a moment, and hands the rest back."""
        deadline = self._clock() + DRAIN_SECONDS
        while self._scorer.pending and not self._told_to_stop and self._clock() < deadline:
            self._scored += self._scorer.poll()
            time.sleep(0.01)
        self._finish_scored()
        for attempt in [a for a in self._attempts.values() if a.finish_reason is None]:
            self._hand_back(attempt)
