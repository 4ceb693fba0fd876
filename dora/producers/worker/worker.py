"""The rollout worker: carries out commands, drives one engine, writes what it generates.

One thread drives engine and bus; scoring runs beside it and never blocks generation. An attempt is
started only under a version that the engine hosts, and weights change only while nothing of their
version runs, so each attempt is of one version (C1). Under the schedule `partial` attempts are
interrupted instead and go on with the next version. A trajectory is inflight until Kafka has
acknowledged its record: what a worker no longer names in its status is safe in the log.
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
from dora.producers.worker.attempt import Attempt
from dora.producers.worker.hosting import Hosting, Installer
from dora.producers.worker.inflight import InflightAttempts
from dora.producers.worker.reporter import Reporter
from dora.producers.worker.scoring import EmulatedScorer, Scorer
from dora.schemas.records import Command, Policy, ProcessState, pack_tokens, prompt_hash
from dora.telemetry.meter import meter
from dora.telemetry.tracer import TraceContext, parse_traceparent

log = logging.getLogger(__name__)

DRAIN_SECONDS = 5.0


class Worker:
    """One rollout worker, without a loop of its own.

    Its owner feeds it the records of `positions` (`on_message`), calls `step`, `absorb` and
    `heartbeat` in turn, and `end` or `report_failure` in the end. `writer` may be shared with other
    workers of the same thread; `catch_up` feeds what has arrived while the worker was loading.
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
        self.stop_received = False
        """The coordinator sent a stop."""
        self._config = config
        self._writer = writer
        self._task = task
        self._clock = clock
        self._alive = alive
        self._catch_up = catch_up
        self._topics = RunTopics(config.run.name)
        self._partition = worker_partition(worker, config.kafka.dispatch_partitions)
        self._partial = config.schedule.kind == "partial"
        self._hosting = Hosting(config, engine, installer, clock)
        self._reporter = Reporter(config, writer, worker, clock, now_ms)
        self._inflight = InflightAttempts(
            config, writer, engine, tokenizer, scorer, self._reporter, stop_token_ids, clock, now_ms
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
        """Report to the coordinator."""
        self._report_state("ready", "waiting for a version")

    def on_message(self, message: Message) -> None:
        """Handle a record of `positions`; commands to other workers are ignored."""
        value = message.value
        if isinstance(value, Policy):
            self._hosting.on_policy(value)
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
            case "pause":  # generate nothing until the next version is there
                self._paused = True
                self.engine.pause()
            case "stop":
                log.info("the coordinator stops this worker: %s", command.reason)
                self.stop_received = True

    def wait(self) -> float:
        """Seconds that may pass before a turn has something to do, unless a record arrives."""
        if self._deltas or self.has_results:
            return 0.0
        if self._hosting.loading != -1:
            return 0.01
        if self.engine.running and not self._paused:
            return self.engine.due()
        return 0.01 if self._inflight.scoring else 0.05

    def step(self) -> None:
        """The first part of a turn: load what was ordered, and the engine's work.

        `absorb` and `heartbeat` follow, each after a flush of the writer where `has_results` or
        `heartbeat_due` says so; several workers share the flush.
        """
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
        return self._inflight.has_results

    def absorb(self) -> None:
        """Write what is scored, then what the engine's step produced."""
        self._inflight.write_results()
        deltas, self._deltas = self._deltas, []
        for delta in deltas:
            self._inflight.on_delta(delta)
        self._inflight.poll_scores()
        self._writer.poll()

    @property
    def heartbeat_due(self) -> bool:
        """Whether it is time for a heartbeat."""
        return self._reporter.due

    def heartbeat(self) -> None:
        """A heartbeat; hands back what stalls before."""
        if not self._paused:
            self._inflight.hand_back_stalled(self._config.rollout.stall_timeout_seconds)
        self._hosting.release(attempt.version for attempt in self._inflight)
        self._report_attempts()

    def end(self) -> None:
        """Give running verifiers a moment, hand the rest back, and report the end."""
        deadline = self._clock() + DRAIN_SECONDS
        while self._inflight.scoring and not self.stop_received and self._clock() < deadline:
            self._inflight.poll_scores()
            time.sleep(0.01)
        if self.has_results:
            self._flush()
        self.absorb()
        for attempt in self._inflight.unfinished():
            self._inflight.hand_back(attempt)
        self._report_state(
            "stopped", "stopped by the coordinator" if self.stop_received else "stopped"
        )

    def report_failure(self, error: Exception) -> None:
        """The last status: the worker ends with `error`."""
        what = error.message if isinstance(error, DoraError) else repr(error)
        try:
            self._report_state("failed", what)
        except DoraError:
            log.exception("the failure could not be reported to the coordinator")

    def _start(self, command: Command, context: TraceContext | None) -> None:
        former = self._inflight.find(command.trajectory_id)
        if former is not None and (
            former.finish_reason is not None or former.command.attempt >= command.attempt
        ):
            self._reporter.dead_letter(
                "already_running",
                f"attempt {command.attempt} of {command.trajectory_id} was sent while attempt "
                f"{former.command.attempt} is inflight",
                trajectory_id=command.trajectory_id,
            )
            return
        if former is not None:
            self._inflight.hand_back(former)  # this worker was given up, and is trusted again
        version, newest = command.policy_version, self.engine.version
        if self._partial and newest is not None and version <= newest:
            version = newest
        elif version not in self.engine.versions:
            self._reporter.dead_letter(
                "wrong_version",
                f"{command.trajectory_id} is to be generated by version {version}, "
                f"but this worker hosts {self._hosting.versions or newest}",
                trajectory_id=command.trajectory_id,
            )
            return
        none = Prompt(command.ordinal, "", (), {})
        try:
            prompt = self._task.prompt(command.ordinal, command.purpose)
        except TaskError as error:
            attempt = self._inflight.add(command, none, version, context)
            self._inflight.fail(attempt, "prompt_failed", str(error))
            return
        own = prompt_hash(pack_tokens(prompt.token_ids))
        if command.prompt_hash not in ("", own):
            attempt = self._inflight.add(command, none, version, context)
            self._inflight.fail(
                attempt,
                "mixed_prompt",
                f"the prompt at ordinal {command.ordinal} is not the one that this trajectory "
                f"began with (hash {own}, not {command.prompt_hash}): the data, the template or "
                "the tokenizer of the workers differ",
            )
            return
        self.engine.add(self._inflight.add(command, prompt, version, context).request())

    def _yield(self, command: Command) -> None:
        """Stop an attempt, unless it is finished or another one by now."""
        attempt = self._inflight.find(command.trajectory_id)
        if attempt is None or attempt.finish_reason is not None:
            return
        if attempt.command.attempt == command.attempt:
            self._inflight.hand_back(attempt, move=command.kind == "move")

    def _load(self, version: int) -> None:
        """Load an ordered version, and end a pause."""
        interrupted = [] if self.engine.hosts_many else self._interrupt(version)
        self._report_state("loading", f"loading version {version}")
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
        if self._paused:
            self._paused = False
            self.engine.resume()
            for attempt in self._inflight:
                attempt.progress_at = self._clock()
        for attempt in interrupted:
            if self.engine.version is not None:
                attempt.version = self.engine.version
                self.engine.add(attempt.request())
        gone = f"version {version} has left the window: not loaded"
        self._report_state("ready", f"hosts version {version}" if installed else gone)

    def _interrupt(self, version: int) -> list[Attempt]:
        """Take everything out of an engine that is to change its weights; returns what goes on with
        the new ones (`partial`), the rest is handed back."""
        running = self._inflight.unfinished()
        for attempt in running:
            if self._partial:
                self._inflight.interrupt(attempt)
                continue
            self._inflight.hand_back(attempt)
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

    def _report_state(self, state: ProcessState, message: str) -> None:
        self._reporter.state, self._reporter.message = state, message
        log.info("%s: %s", state, message)
        self._flush()
        self._report_attempts()

    def _report_attempts(self) -> None:
        """Send a status that names what is inflight; everything before must be acknowledged."""
        rollout = self._config.rollout
        loading = self._reporter.state == "loading"
        self._alive(rollout.load_timeout_seconds if loading else rollout.hang_timeout_seconds)
        self._inflight.confirm()
        self._reporter.metrics["scoring"] = float(self._inflight.scoring)
        self._reporter.metrics["kv_used_share"] = self.engine.memory_used
        self._reporter.metrics.update(self.engine.metrics)
        self._reporter.report_status(
            version=self.engine.version,
            versions=self._hosting.versions,
            loading=self._hosting.loading,
            running=self._inflight.leases(),
            command_offset=self._command_offset,
        )
