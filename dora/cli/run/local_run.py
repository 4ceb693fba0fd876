"""One run on one machine, from an empty directory to the audited summary.

Every stage can be repeated: whatever was interrupted, the next `execute` goes on from
the log. When it returns or raises, no process of the run is left; the broker may be.
"""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from dora.broker.local import broker_process, running_broker, start_broker, stop_broker
from dora.bus.admin import check_properties
from dora.bus.settings import ClusterSettings, cluster_settings
from dora.bus.topics import RunTopics, TopicAdmin, topic_plan
from dora.cli.display.display import Display, PlainDisplay, learning_curve, open_display
from dora.cli.options import SECRET_SETS, ConfigSource, registry_arguments, with_broker
from dora.cli.run.log_while_waiting import log_while_waiting
from dora.cli.run.preflight import check_machine
from dora.cli.run.prepare import needs_preparation
from dora.cli.run.processes import child_command, child_environment, child_specs
from dora.cli.run.supervisor import SupervisionError, Supervisor
from dora.cli.run.watched_monitor import CATCH_UP_SECONDS, WatchedMonitor
from dora.config import Config
from dora.consumers.monitor.monitor import RunMonitor
from dora.consumers.monitor.snapshot import Snapshot
from dora.consumers.monitor.summary import summarize, write_summary
from dora.consumers.trainer.origin import Origin, find_origin
from dora.errors import (
    ActiveRunError,
    DeadlineError,
    DoraError,
    PolicyError,
    RunError,
    TopicError,
    UncommittedError,
)
from dora.log.continuation import check_idle, check_recorded, newest_version

_DRAW_SECONDS = 0.5
_BROKER_CHECK_SECONDS = 2.0
_STOP_SECONDS = 45.0
_LAST_WORKERS_SECONDS = 60.0
_AUDIT_SECONDS = 3600.0
_NOWHERE = "127.0.0.1:1"
"""An address for a check that asks nothing of the cluster."""


class LocalRun:
    """Carries out `dora run`."""

    def __init__(
        self,
        config: Config,
        source: ConfigSource,
        console: Console,
        *,
        plain: bool = False,
        stop_broker: bool = False,
        origin: Origin | None = None,
    ) -> None:
        self._origin = origin
        self._config = config
        self._source = source
        self._console = console
        self._plain = plain
        self._stop_broker = stop_broker
        self._own_broker = config.kafka.bootstrap_servers is None
        self._started_broker = False
        self._signal: int | None = None
        self._launched_ms = time.time_ns() // 1_000_000

    def execute(self) -> tuple[dict[str, Any], bool]:
        """Run to the end; the summary, and whether the audit found no violation.

        SystemExit with 130 or 143 when interrupted; SupervisionError when a part cannot go on.
        """
        check_machine(self._config)
        directory = self._config.run_directory
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / "run.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise ActiveRunError(
                f"another `dora run` of {self._config.run.name} is active on this machine",
                hint=f"Watch it with `dora status {self._config.run.name} --watch`.",
            ) from None
        try:
            return self._locked()
        finally:
            lock.release()
            if self._started_broker and self._stop_broker:
                stop_broker(self._source.broker_directory)

    def _locked(self) -> tuple[dict[str, Any], bool]:
        check_properties(cluster_settings(with_broker(self._config, _NOWHERE).kafka))
        self._find_cluster()
        settings = cluster_settings(self._config.kafka)
        if needs_preparation(self._config):
            self._check_recorded(settings, inputs=False)
            self._prepare_model()
        self._check_recorded(settings, inputs=True)
        if self._origin is not None:
            find_origin(self._config, settings, self._origin)
        self._make_topics(settings)
        monitor = self._monitor(settings)
        try:
            monitor.catch_up(CATCH_UP_SECONDS)
            snapshot = monitor.snapshot()
            if self._complete(snapshot):
                self._say(
                    f"run {snapshot.run} is complete already: {snapshot.step} steps; raise "
                    "trainer.steps to go on, or give run.name another value to start anew"
                )
            else:
                monitor = self._supervise(monitor, settings)
                monitor.catch_up(CATCH_UP_SECONDS)
            return self._finish(monitor.snapshot())
        finally:
            monitor.close()

    def _find_cluster(self) -> None:
        """Use the local broker where no cluster is given."""
        if not self._own_broker:
            return
        directory = self._source.broker_directory
        broker = running_broker(directory)
        if broker is None:
            self._say(f"starting a local Kafka broker in {directory}")
            broker = start_broker(directory)
            self._started_broker = True
        self._config = with_broker(self._config, broker.bootstrap_servers)
        self._say(f"Kafka at {broker.bootstrap_servers}")

    def _prepare_model(self) -> None:
        """Call policy.prepare in a process of its own, showing what it prints."""
        self._say(f"making {self._config.policy.model} with {self._config.policy.prepare}")
        with (
            log_while_waiting(self._say, f"policy.prepare = {self._config.policy.prepare}"),
            subprocess.Popen(
                child_command(self._config, self._source, "prepare"),
                env=child_environment(self._config),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as process,
        ):
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    self._say(f"  {line.rstrip()}")
            except BaseException:
                process.terminate()
                raise
        if process.returncode:
            raise PolicyError(
                f"policy.prepare = {self._config.policy.prepare} failed with exit code "
                f"{process.returncode}; its output stands above"
            )

    def _check_recorded(self, settings: ClusterSettings, *, inputs: bool) -> None:
        """Refuse a run that was started otherwise before anything is made. Where it has committed
        no step and no process of it is at work, its topics are deleted instead."""
        run, plan = self._config.run.name, topic_plan(self._config)
        with TopicAdmin(settings) as admin:
            existing = admin.existing(run)
            if RunTopics(run).steps not in existing:
                return
            try:
                check_recorded(self._config, settings, inputs=inputs)
                admin.verify([spec for spec in plan if spec.name in existing])
                return
            except UncommittedError as error:
                reason: DoraError = error
            except TopicError as error:
                if newest_version(run, settings) > 0:
                    raise
                reason = error
            check_idle(self._config, settings)
            self._say(f"no step is committed, so the run begins anew: {reason.message}")
            admin.delete(run)

    def _make_topics(self, settings: ClusterSettings) -> None:
        """Create the topics that are missing, and check the others' shape; so with the schemas."""
        if settings.registry is not None:
            settings.registry.prepare()
            self._say(f"schema registry at {settings.registry.url}")
        created = TopicAdmin(settings).create(topic_plan(self._config), exist_ok=True)
        if created:
            self._say(f"created {len(created)} topics of run {self._config.run.name}")

    def _monitor(self, settings: ClusterSettings) -> RunMonitor:
        rollout = self._config.rollout
        return RunMonitor(
            settings,
            self._config.run.name,
            steps_target=self._config.trainer.steps,
            heartbeat_timeout=rollout.heartbeat_timeout_seconds,
            load_timeout=rollout.load_timeout_seconds,
            launched_ms=self._launched_ms,
        )

    def _complete(self, snapshot: Snapshot) -> bool:
        """Whether nothing is left to do: all steps, and the last version evaluated."""
        steps = self._config.trainer.steps
        if snapshot.newest < steps:
            return False
        if self._config.evaluation.prompts == 0:
            return True
        last = [point for point in snapshot.evaluations if point.version == steps]
        return bool(last) and last[0].complete

    def _supervise(self, monitor: RunMonitor, settings: ClusterSettings) -> RunMonitor:
        """Keep the processes alive until the run is complete; the monitor to go on with."""
        watched = WatchedMonitor(monitor)
        display = PlainDisplay(self._console) if self._plain else open_display(self._console)

        def finished(name: str) -> bool:
            # A part that was told to stop by hand ends with 0 as well: only the log says.
            snapshot = watched.look(display)
            return snapshot is not None and snapshot.newest >= self._config.trainer.steps

        with self._signals(), display:
            supervisor = Supervisor(
                child_specs(self._config, self._source, self._origin),
                self._config.run_directory / "logs",
                max_restarts=self._config.run.max_restarts,
                on_event=display.note,
                finished=finished,
                replaced=lambda name, pid: watched.replaced(name, pid, display),
            )
            try:
                supervisor.start()
                self._follow(supervisor, watched, settings, display)
            except SupervisionError as error:
                raise SupervisionError(error.message, hint=self._how_to_go_on()) from error
            finally:
                supervisor.stop(_STOP_SECONDS)
        if self._signal is not None:
            watched.monitor.close()
            self._say(f"stopped; {self._how_to_go_on()}")
            raise SystemExit(128 + self._signal)
        return watched.monitor

    def _follow(
        self,
        supervisor: Supervisor,
        watched: WatchedMonitor,
        settings: ClusterSettings,
        display: Display,
    ) -> None:
        draw_at = check_at = 0.0
        last_call: float | None = None
        while self._signal is None:
            now = time.monotonic()
            supervisor.poll()
            if now >= check_at:
                check_at = now + _BROKER_CHECK_SECONDS
                self._keep_broker(display)
            if watched.poll(display):
                watched.reopen(lambda: self._monitor(settings), display)
            if now >= draw_at:
                draw_at = now + _DRAW_SECONDS
                snapshot = watched.monitor.snapshot()
                self._end_hung(snapshot, supervisor)
                display.update(snapshot, supervisor.views())
            if supervisor.done("trainer") and supervisor.done("coordinator"):
                last_call = last_call or now
                workers = (view.state for view in supervisor.views())
                if now - last_call > _LAST_WORKERS_SECONDS or all(s == "done" for s in workers):
                    return

    def _end_hung(self, snapshot: Snapshot, supervisor: Supervisor) -> None:
        """Kill a process that has been silent for longer than any call to Kafka may take.

        librdkafka has calls that never return once their broker was lost in the middle. While
        no process is heard, the cluster is away, and killing would not help. One that has
        not spoken since it was started is given the time to load.
        """
        rollout = self._config.rollout
        if not any(process.alive for process in snapshot.processes):
            return
        for process in snapshot.processes:
            running = supervisor.running_seconds(process.process)
            spoken = process.age_seconds < running
            allowed = rollout.heartbeat_timeout_seconds if spoken else rollout.load_timeout_seconds
            silence = min(process.age_seconds, running)
            hung = silence > allowed + self._config.kafka.request_timeout_seconds
            if hung and process.silent and not process.ended:
                supervisor.end_hung(process.process, f"it has been silent for {silence:.0f} s")

    def _keep_broker(self, display: Display) -> None:
        """Start the local broker again if it died; the log on disk is what counts."""
        if not self._own_broker or broker_process(self._source.broker_directory) is not None:
            return
        display.note("the local broker is gone: starting it again")
        broker = start_broker(self._source.broker_directory)
        if broker.bootstrap_servers != self._config.kafka.bootstrap_servers:
            raise RunError(
                f"the local broker came back at {broker.bootstrap_servers} instead of "
                f"{self._config.kafka.bootstrap_servers}",
                hint=self._how_to_go_on(),
            )

    def _finish(self, snapshot: Snapshot) -> tuple[dict[str, Any], bool]:
        """Curve, summary and audit."""
        summary = summarize(snapshot)
        path = write_summary(summary, self._config.run_directory)
        for line in learning_curve(snapshot):
            self._say(line)
        for point in snapshot.evaluations:
            self._say(f"version {point.version}: {point.text} solved")
        verdict = self._audit()
        self._say(f"summary: {path}")
        if self._own_broker and not (self._started_broker and self._stop_broker):
            self._say(
                f"the local broker still runs at {self._config.kafka.bootstrap_servers}, so that "
                f"`dora status {snapshot.run}`, `dora tail` and `dora audit` can read the log; "
                "stop it with `dora broker stop`"
            )
        return summary, verdict

    def _audit(self) -> bool:
        kafka = self._config.kafka
        command = [sys.executable, "-m", "dora", "audit", self._config.run.name, "--json"]
        command += ["--bootstrap-server", kafka.bootstrap_servers or ""]
        command += registry_arguments(kafka)
        hint = f"The run itself is complete. Start `dora audit {self._config.run.name}`."
        try:
            done = subprocess.run(
                command,
                env=child_environment(self._config),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_AUDIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise DeadlineError(
                f"the audit of the run did not end in {_AUDIT_SECONDS:g} s", hint=hint
            ) from None
        try:
            report = json.loads(done.stdout)
        except json.JSONDecodeError:
            said = done.stderr.strip() or done.stdout
            raise DoraError(f"the audit failed: {said}", hint=hint) from None
        violations = {name: count for name, count in report["violations"].items() if count}
        started, trained = report["groups_started"], report["groups_trained"]
        facts = (
            f"{started} groups started, {trained} trained, "
            f"{report['groups_set_aside']} set aside, {report['groups_outstanding']} outstanding; "
            f"largest staleness {report['max_staleness']}"
        )
        mixed = violations.get("mixed_version", 0)
        if self._config.schedule.kind == "partial" and violations.keys() == {"mixed_version"}:
            self._say(
                f"audit: C1 broken {mixed} times, as the schedule partial does by design, and no "
                f"other violation; {facts}"
            )
            return True
        if violations or done.returncode:
            found = ", ".join(f"{name} {count}" for name, count in violations.items())
            self._say(f"audit: VIOLATED ({found or done.stderr.strip()}); {facts}")
            return False
        self._say(f"audit: no violation; {facts}")
        return True

    def _how_to_go_on(self) -> str:
        command = ["dora", "run", str(self._source.path)]
        for text in self._source.sets:
            if not text.startswith(SECRET_SETS):
                command += ["--set", text]
        if not self._own_broker and self._config.kafka.bootstrap_servers:
            command += ["-b", self._config.kafka.bootstrap_servers]
        command += registry_arguments(self._config.kafka)
        return f"the run is safe in its log and goes on with: {shlex.join(command)}"

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask for an orderly end; a second one is not waited for."""

        def handle(number: int, frame: object) -> None:
            if self._signal is not None:
                raise SystemExit(128 + number)
            self._signal = number
            self._say("stopping the processes of the run (again to leave at once)")

        former = {
            number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
