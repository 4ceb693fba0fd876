"""The meter of a process whose metrics are on: what it measures, as Prometheus reads it.

A reader of the registry never waits for the process, and the process never for a reader: statuses
and gauges are kept as whole values that are replaced, and put together when they are read. Series
of versions that left the window go with the next call of `on_window`.
"""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from dora.bus.settings import ClusterSettings
from dora.config import Config
from dora.core.processes import GONE, WORKING, allowed_silence
from dora.core.scheduling.workers import WorkerRegistry
from dora.core.state import RunState
from dora.core.step_metrics import PART
from dora.schemas.records import Admission, Command, Record, Status, Step
from dora.telemetry.catalogue import COMMON, OTHER, STATES, Metric, bounded, facts_of, of_role
from dora.telemetry.lag import LagProbe
from dora.telemetry.meter import Meter, Positions

_LOOK_SECONDS = 1.0


class ExportingMeter(Meter, Collector):
    """Counts, and hands everything to `registry`. `clock` is monotonic, `wall` Unix time, both in
    seconds. `settings` are needed for the trainer's lag."""

    def __init__(
        self,
        config: Config,
        role: str,
        process: str,
        settings: ClusterSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.process = process
        self.role = role
        self.port = 0
        """Of the endpoint that serves the registry; set by who serves it."""
        self._config = config
        self._common = (config.run.name, role, process)
        self._clock, self._wall = clock, wall
        self._began = clock()
        self._looked_at = float("-inf")
        self._statuses: dict[str, tuple[Status, float]] = {}
        self._gauges: dict[str, dict[str, float]] = {}
        self._metrics = {metric.name: metric for metric in of_role(role)}
        self._of_steps = [metric for metric in self._metrics.values() if metric.step]
        self._counters: dict[tuple[str, str], Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in self._metrics.values():
            self._make(metric)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self._lag: LagProbe | None = None
        if role == "trainer":
            self._gauges["dora_trainer_last_step_timestamp_seconds"] = {"": wall()}
            if settings is not None:
                self._lag = LagProbe(config, settings, clock)

    def _make(self, metric: Metric) -> None:
        """Series of a label's known values are there from the start: an increase from nothing is
        none to Prometheus."""
        labels = [metric.label] if metric.label else []
        if metric.kind == "histogram":
            histogram = Histogram(
                metric.name, metric.help, COMMON, registry=self.registry, buckets=metric.buckets
            )
            self._histograms[metric.name] = histogram.labels(*self._common)
        elif metric.kind == "counter" and not metric.status:
            counter = Counter(metric.name, metric.help, (*COMMON, *labels), registry=self.registry)
            for value in (*metric.values, OTHER) if labels else ("",):
                given = (value,) if labels else ()
                self._counters[metric.name, value] = counter.labels(*self._common, *given)

    @property
    def status_metrics(self) -> dict[str, float]:
        """The port of the endpoint."""
        return {"metrics_port": float(self.port)} if self.port else {}

    def count(self, name: str, by: float = 1.0, value: str = "") -> None:
        metric = self._metrics[name]
        self._counters[name, bounded(metric, value) if metric.label else ""].inc(by)

    def observe(self, name: str, amount: float) -> None:
        self._histograms[name].observe(amount)

    def on_status(self, status: Status) -> None:
        self._statuses = {**self._statuses, status.process: (status, self._clock())}

    def on_step(self, step: Step) -> None:
        for ref in step.set_aside:
            self.count("dora_trainer_groups_set_aside_total", value=ref.reason or OTHER)
        if step.kind != "step":
            return
        self.count("dora_trainer_steps_total")
        self.count("dora_trainer_groups_trained_total", len(step.trained))
        self._gauges["dora_trainer_last_step_timestamp_seconds"] = {"": self._wall()}
        self._gauges["dora_trainer_reward_part_mean"] = {
            name.removeprefix(PART): mean
            for name, mean in step.metrics.items()
            if name.startswith(PART)
        }
        for metric in self._of_steps:
            amount = step.metrics.get(metric.step)
            if metric.kind == "gauge":
                # what the last step does not say is not what the one before said
                self._gauges[metric.name] = {} if amount is None else {"": amount}
            elif amount is not None and metric.kind == "counter":
                self.count(metric.name, amount)
            elif amount is not None:
                self.observe(metric.name, amount)

    def on_window(self, state: RunState, read: Callable[[], Positions]) -> None:
        now = self._clock()
        if now - self._looked_at < _LOOK_SECONDS or state.newest < 0:
            return
        self._looked_at = now
        live = range(state.window.oldest_live(state.newest), state.newest + 1)
        missing, finished = dict.fromkeys(live, 0), dict.fromkeys(live, 0)
        for group, samples in state.unfinished():
            if group.purpose == "train" and group.version in missing:
                missing[group.version] += len(samples)
        for group in state.complete_groups():
            if group.version in finished:
                finished[group.version] += 1
        self._set("dora_trainer_groups_outstanding", state.outstanding_total)
        self._set("dora_trainer_groups_capacity", state.window.capacity)
        self._set("dora_trainer_staleness_bound", state.window.max_staleness)
        self._gauges["dora_trainer_backlog_trajectories"] = _by_version(missing)
        self._gauges["dora_trainer_backlog_groups"] = _by_version(finished)
        if self._lag is not None:
            self._lag.position(read(), live)

    def on_decisions(self, records: Iterable[Record]) -> None:
        for record in records:
            if isinstance(record, Admission):
                self.count("dora_coordinator_admissions_total", value=record.purpose)
            elif isinstance(record, Command):
                self.count("dora_coordinator_commands_total", value=record.kind)

    def on_workers(self, workers: WorkerRegistry, now: float) -> None:
        states = dict.fromkeys((*STATES, "silent"), 0.0)
        longest = 0.0
        for member in workers.workers():
            state = member.status.state
            states["silent" if workers.silent(member, now) else state] += 1
            if state not in GONE:
                longest = max(longest, now - member.heard_at)
        self._gauges["dora_coordinator_workers"] = states
        self._set("dora_coordinator_worker_silence_seconds", longest)

    def health(self) -> tuple[bool, dict[str, object]]:
        """Whether the process reported in time that it lives, and what it said."""
        now = self._clock()
        late, statuses = self._late(now), self._statuses
        return not late, {
            "run": self._config.run.name,
            "role": self.role,
            "process": self.process,
            "states": {name: status.state for name, (status, _) in sorted(statuses.items())},
            "heartbeat_age_seconds": round(self._heartbeat_age(now), 3),
            "late": late,
        }

    def ready(self) -> tuple[bool, dict[str, object]]:
        """Whether the process is well and does its part now: it has started, its weights are
        loaded, and (where it hosts several workers) at least one of them can generate."""
        well, facts = self.health()
        states = [status.state for status, _ in self._statuses.values()]
        return well and any(state in WORKING for state in states), facts

    def close(self) -> None:
        if self._lag is not None:
            self._lag.close()

    def collect(self) -> Iterator[Family]:
        """Gauges and what statuses say: called when the registry is read."""
        now = self._clock()
        statuses = [status for status, _ in self._statuses.values()]
        gauges = dict(self._gauges)
        gauges["dora_process_heartbeat_age_seconds"] = {"": self._heartbeat_age(now)}
        gauges["dora_process_late"] = {"": float(len(self._late(now)))}
        states = dict.fromkeys(STATES, 0.0)
        for status in statuses:
            states[status.state] += 1.0
        gauges["dora_process_state"] = states
        if self._lag is not None:
            gauges |= self._lag.gauges(now)
        facts = [facts_of(status) for status in statuses]
        for metric in self._metrics.values():
            if metric.status:
                found = [each[metric.status] for each in facts if metric.status in each]
                if metric.kind == "counter" and statuses:
                    found.append(0.0)  # a status leaves out what did not happen yet
                amount = max(found, default=0.0) if metric.largest else sum(found)
                yield self._family(metric, {"": amount} if found else {})
            elif metric.kind == "gauge":
                yield self._family(metric, gauges.get(metric.name, {}))

    def describe(self) -> list[Family]:
        """Nothing: lets the collector be registered without being asked for its values."""
        return []

    def _family(self, metric: Metric, values: dict[str, float]) -> Family:
        labels = (*COMMON, metric.label) if metric.label else COMMON
        make: type[CounterMetricFamily | GaugeMetricFamily] = (
            CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        )
        family = make(metric.name, metric.help, labels=labels)
        for value, amount in values.items():
            family.add_metric([*self._common, value] if metric.label else self._common, amount)
        return family

    def _set(self, name: str, amount: float) -> None:
        self._gauges[name] = {"": float(amount)}

    def _heartbeat_age(self, now: float) -> float:
        times = [at for status, at in self._statuses.values() if status.state not in GONE]
        return max(0.0, now - min(times, default=self._began))

    def _late(self, now: float) -> list[str]:
        """The processes that have been silent for longer than the run allows."""
        rollout = self._config.rollout
        if not self._statuses:
            late = now - self._began > rollout.load_timeout_seconds
            return [self.process] if late else []
        return sorted(
            status.process
            for status, at in self._statuses.values()
            if now - at
            > allowed_silence(
                status,
                heartbeat_timeout=rollout.heartbeat_timeout_seconds,
                load_timeout=rollout.load_timeout_seconds,
            )
        )


def _by_version(counts: dict[int, int]) -> dict[str, float]:
    return {str(version): float(count) for version, count in counts.items()}
