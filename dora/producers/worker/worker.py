"""The rollout worker: carries out commands, drives one engine, writes what it generates.

Invariants: one thread drives engine and bus; scoring runs beside it and never blocks generation. An
attempt is started only under a version that the engine hosts, and weights change only while nothing
of their version runs, so that each attempt is of one version (C1); under the schedule `partial`
attempts are interrupted instead and go on with the next version. A trajectory counts as in hand
until its record is acknowledged by Kafka: what a worker no longer names in its status is safe in
the log.
"""

import logging
import time
from collections.abc import Callable

from dora import faults
from dora.bus.reader import BEGINNING, END, Message, Unreadable
from dora.bus.topics import RunTopics
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.core.ring import worker_partition
from dora.errors import DoraError, TaskError
from dora.producers.engines.base import Delta, Engine
from dora.producers.tasks.base import Prompt, Task
from dora.producers.tasks.tokenization import Tokenizer
from dora.producers.worker.attempt import Attempt, AttemptTrace, attempt_seed
from dora.producers.worker.hosting import Hosting, Installer
from dora.producers.worker.inflight import InHand
from dora.producers.worker.reporter import Reporter
from dora.producers.worker.scoring import EmulatedScorer, Scorer
from dora.schemas.records import Command, Policy, ProcessState, Sampling
from dora.telemetry.meter import meter
from dora.telemetry.tracer import TraceContext, parse_traceparent

log = logging.getLogger(__name__)

DRAIN_SECONDS = 5.0


class Worker:
    """One rollout worker, without a loop of its own: whoever owns it feeds it from `positions` with
    `receive`, takes `step`, `absorb` and `report` in turn, and `end` or `failed` at the end.

    `writer` may be shared with other workers of the same thread; `catch_up` feeds what has arrived
    while the worker was busy loading.
    """

    def __init__(
        self,
        config: Config,
        writer: LogWriter,
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
        catch_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = worker
        self.engine = engine
        self.told_to_stop = False
        """The coordinator said stop."""
        self._config = config
        self._writer = writer
        self._task = task
        self._stop_token_ids = stop_token_ids
        self._clock = clock
        self._alive = alive
        self._now_ms = now_ms
        self._catch_up = catch_up
        self._topics = RunTopics(config.run.name)
        self._partition = worker_partition(worker, config.kafka.dispatch_partitions)
        self._partial = config.schedule.kind == "partial"
        self._hosting = Hosting(config, engine, installer, clock)
        self._reporter = Reporter(config, writer, worker, clock, now_ms)
        self._in_hand = InHand(
            config, writer, engine, tokenizer, scorer, self._reporter, clock, now_ms
        )
        self._deltas: list[Delta] = []
        self._paused = False
        self._command_offset = -1

    @property
    def positions(self) -> dict[tuple[str, int], int]:
        """Partitions to read, and from where: commands from now on, all versions."""
        return {
            (self._topics.dispatch, self._partition): END,
            (self._topics.policies, 0): BEGINNING,
        }

    def begin(self) -> None:
        """Tell the coordinator that this worker is there."""
        self._say("ready", "waiting for a version")

    def receive(self, message: Message) -> None:
        """Take a record of `positions`; those for other workers are left aside."""
        value = message.value
        if isinstance(value, Policy):
            self._hosting.heard(value)
        elif isinstance(value, Unreadable):
            if (message.topic, message.partition) in self.positions:
                self._reporter.dead_letter(
                    value.code, value.reason, message=message, payload=value.payload
                )
        elif isinstance(value, Command) and value.worker == self.name:
            self._command_offset = message.offset
            self._reporter.on_command()
            if value.incarnation == self._reporter.incarnation:
                self._carry_out(value, message)

    def _carry_out(self, command: Command, message: Message) -> None:
        match command.kind:
            case "start":
                self._start(command, parse_traceparent(message.headers.get("traceparent")))
            case "yield" | "move":
                self._yield(command)
            case "switch":
                self._hosting.order(command.policy_version)
            case "pause":
                self._pause()
            case "stop":
                log.info("told to stop: %s", command.reason)
                self.told_to_stop = True

    def wait(self) -> float:
        """Seconds that may pass before a turn has something to do, unless a record arrives."""
        if self._deltas or self.has_results:
            return 0.0
        if self._hosting.loading != -1:
            return 0.01
        if self.engine.running and not self._paused:
            return self.engine.due()
        return 0.01 if self._in_hand.scoring else 0.05

    def step(self) -> None:
        """The first part of a turn: load what was ordered, and the engine's work. The others are
        `absorb` and `report`, each after a flush of the writer where `has_results` or `report_due`
        says so; several workers share the flush."""
        version = self._hosting.next()
        if version is not None:
            self._load(version)
        if not self._paused:
            began = self._clock()
            self._deltas = self.engine.step()
            if self._deltas:
                meter().observe("dora_worker_engine_step_seconds", self._clock() - began)

    @property
    def has_results(self) -> bool:
        """Whether `absorb` would write what must come after chunks that were sent before."""
        return self._in_hand.has_results

    def absorb(self) -> None:
        """Write what is scored, then take what the engine's step brought."""
        self._in_hand.write_results()
        deltas, self._deltas = self._deltas, []
        for delta in deltas:
            self._in_hand.take(delta)
        self._in_hand.poll_scores()
        self._writer.poll()

    @property
    def report_due(self) -> bool:
        """Whether it is time for a heartbeat."""
        return self._reporter.due

    def report(self) -> None:
        """A heartbeat: hand back what stalls, confirm what was written, say what is in hand."""
        if not self._paused:
            self._in_hand.hand_back_stalled(self._config.rollout.stall_timeout_seconds)
        self._hosting.release(attempt.version for attempt in self._in_hand)
        self._beat()

    def end(self) -> None:
        """Give running verifiers a moment, hand the rest back, and say goodbye."""
        deadline = self._clock() + DRAIN_SECONDS
        while self._in_hand.scoring and not self.told_to_stop and self._clock() < deadline:
            self._in_hand.poll_scores()
            time.sleep(0.01)
        if self.has_results:
            self._flush()
        self.absorb()
        for attempt in self._in_hand.unfinished():
            self._in_hand.hand_back(attempt)
        self._say("stopped", "stopped by the coordinator" if self.told_to_stop else "stopped")

    def failed(self, error: Exception) -> None:
        """Last words."""
        what = error.message if isinstance(error, DoraError) else repr(error)
        try:
            self._say("failed", what)
        except DoraError:
            log.exception("could not tell the coordinator of the failure")

    def _start(self, command: Command, context: TraceContext | None) -> None:
        former = self._in_hand.find(command.trajectory_id)
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
            self._in_hand.hand_back(former)  # this worker was given up, and is trusted again
        if not self._can_generate(command.policy_version):
            self._reporter.dead_letter(
                "wrong_version",
                f"{command.trajectory_id} is to be generated by version {command.policy_version}, "
                f"but this worker hosts {self._hosting.versions or self.engine.version}",
                trajectory_id=command.trajectory_id,
            )
            return
        try:
            prompt = self._task.prompt(command.ordinal, command.purpose)
        except TaskError as error:
            prompt = Prompt(command.ordinal, "", (), {})
            attempt = self._attempt(command, prompt, context)
            self._in_hand.fail(attempt, "prompt_failed", str(error))
            return
        self.engine.add(self._attempt(command, prompt, context).request())

    def _can_generate(self, version: int) -> bool:
        """Whether the engine hosts the version, or under `partial` a later one."""
        newest = self.engine.version
        if self._partial:
            return newest is not None and version <= newest
        return version in self.engine.versions

    def _attempt(self, command: Command, prompt: Prompt, context: TraceContext | None) -> Attempt:
        rollout, newest = self._config.rollout, self.engine.version
        identity = command.trajectory_id
        sampling = Sampling(
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            rollout.max_new_tokens,
            self._stop_token_ids,
            attempt_seed(self._config.run.seed, identity, command.attempt)
            if rollout.seeded
            else None,
        )
        attempt = Attempt(
            command, prompt, sampling, self.name, self._now_ms(), self._clock(),
            version=newest if self._partial and newest is not None else command.policy_version,
            trace=None if context is None else AttemptTrace(command, context, self.name),
        )  # fmt: skip
        meter().count("dora_worker_attempts_total")
        if attempt.resumed:
            meter().count("dora_worker_attempts_resumed_total")
        self._in_hand.add(attempt)
        return attempt

    def _yield(self, command: Command) -> None:
        """Stop an attempt, unless it is finished or another one by now."""
        attempt = self._in_hand.find(command.trajectory_id)
        if attempt is None or attempt.finish_reason is not None:
            return
        if attempt.command.attempt == command.attempt:
            self._in_hand.hand_back(attempt, move=command.kind == "move")

    def _pause(self) -> None:
        """Generate nothing until the next version is there."""
        self._paused = True
        self.engine.pause()

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self.engine.resume()
            for attempt in self._in_hand:
                attempt.progress_at = self._clock()

    def _load(self, version: int) -> None:
        """Load an ordered version, and end a pause."""
        interrupted = [] if self.engine.hosts_many else self._interrupt(version)
        self._say("loading", f"loading version {version}")
        faults.point("worker.version_loading")
        installed = self._hosting.install(version, self._catch_up)
        if installed is not None:
            faults.point("worker.version_loaded")
            metrics = self._reporter.metrics
            metrics["load_seconds"] = installed.seconds
            metrics["canary_difference_max"] = installed.canary.max_difference
            metrics["canary_difference_mean"] = installed.canary.mean_difference
            self._reporter.count("switches_total")
            self._reporter.count("engine_restarts_total", float(installed.fresh_engine))
        self._resume()
        for attempt in interrupted:
            if self.engine.version is not None:
                attempt.version = self.engine.version
                self.engine.add(attempt.request())
        if installed is None:
            self._say("ready", f"version {version} has left the window: not loaded")
        else:
            self._say("ready", f"hosts version {version}")

    def _interrupt(self, version: int) -> list[Attempt]:
        """Take everything out of an engine that is to change its weights; returns what goes on with
        the new ones (`partial`), the rest is handed back."""
        running = self._in_hand.unfinished()
        for attempt in running:
            if self._partial:
                self._in_hand.interrupt(attempt)
                continue
            self._in_hand.hand_back(attempt)
            log.warning(
                "%s was still running when version %d was to be loaded; handed back",
                attempt.command.trajectory_id,
                version,
            )
        if running and self._partial:
            self._reporter.count("interruptions_total", float(len(running)))
        return running if self._partial else []

    def _flush(self) -> None:
        self._writer.flush(self._config.kafka.request_timeout_seconds)

    def _say(self, state: ProcessState, message: str) -> None:
        self._reporter.state, self._reporter.message = state, message
        log.info("%s: %s", state, message)
        self._flush()
        self._beat()

    def _beat(self) -> None:
        """Say what is in hand, once everything before is acknowledged."""
        rollout = self._config.rollout
        loading = self._reporter.state == "loading"
        self._alive(rollout.load_timeout_seconds if loading else rollout.hang_timeout_seconds)
        self._in_hand.confirm()
        self._reporter.metrics["scoring"] = float(self._in_hand.scoring)
        self._reporter.metrics["kv_used_share"] = self.engine.memory_used
        self._reporter.metrics.update(self.engine.metrics)
        self._reporter.send(
            version=self.engine.version,
            versions=self._hosting.versions,
            loading=self._hosting.loading,
            running=self._in_hand.holdings(),
            command_offset=self._command_offset,
        )
