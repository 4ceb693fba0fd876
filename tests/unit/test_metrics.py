"""What processes export: names, bounded series, figures, endpoints."""

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dora.broker.process import free_port
from dora.config import Config
from dora.core.scheduling.workers import WorkerRegistry
from dora.core.state import RunState, finished_facts
from dora.core.window import Window
from dora.errors import ConfigError
from dora.schemas.records import GroupRef, Step
from dora.telemetry import meter as metering
from dora.telemetry import observed
from dora.telemetry.catalogue import CATALOGUE, COMMON, OTHER, PART_LABEL, VERSION, bounded
from dora.telemetry.endpoint import Endpoint
from dora.telemetry.exporter import ExportingMeter
from dora.telemetry.lag import lag_of
from tests.configurations import emulated
from tests.factories import RING, G, K, admission, places_of, status, step, trajectory

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"dora_(process|trainer|worker|coordinator)(_[a-z0-9]+)+")


def config(tmp: Path, **sections: Any) -> Config:
    return emulated(tmp, window={"max_staleness": K, "group_size": G}, **sections)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def exporter(
    tmp: Path, role: str, process: str = "p", clock: Clock | None = None
) -> ExportingMeter:
    ticking = clock or Clock()
    return ExportingMeter(config(tmp), role, process, clock=ticking, wall=ticking)


def exported(meter: ExportingMeter) -> dict[tuple[str, str], float]:
    """Value of each series of ours by its name and the value of its own label."""
    text = generate_latest(meter.registry).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("dora_"):
                assert sample.labels["run"] == "r" and sample.labels["role"] == meter.role
                own = [v for k, v in sample.labels.items() if k not in COMMON]
                assert len(own) <= 1
                found[sample.name, own[0] if own else ""] = sample.value
    return found


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric) -> None:
    assert NAME.fullmatch(metric.name)
    prefix = {"rollout": "worker"}.get(metric.role, metric.role)
    assert metric.name.startswith(f"dora_{prefix}_")
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    if metric.kind == "histogram":
        assert metric.name.endswith("_seconds") and list(metric.buckets) == sorted(metric.buckets)
    for wrong in ("milliseconds", "_ms", "percent", "minutes", "count", "bytes_total_"):
        assert wrong not in metric.name
    assert metric.help.endswith(".")
    # labels are bounded: known values, the versions of the window, or the first reward parts
    assert bool(metric.label) == bool(metric.values or metric.label in (VERSION, PART_LABEL))


def test_no_name_is_used_twice() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(names) == len(set(names))


def test_unknown_label_values_count_as_other() -> None:
    reasons = next(m for m in CATALOGUE if m.name == "dora_trainer_groups_set_aside_total")
    assert bounded(reasons, "no_signal") == "no_signal"
    assert bounded(reasons, "verifier_timeout: the verifier took longer than 1 s") == (
        "verifier_timeout"
    )
    assert bounded(reasons, "gave up after 5 attempts: lost") == "gave_up"
    assert bounded(reasons, "whatever a user's verifier says") == OTHER


def test_statuses_of_several_workers_add_up(tmp_path: Path) -> None:
    meter = exporter(tmp_path, "rollout")
    meter.on_status(
        status("w0", capacity=8, version=3, running=("g0/0#0",),
               metrics={"tokens_total": 10.0, "load_seconds": 2.0})
    )  # fmt: skip
    meter.on_status(
        status("w1", "loading", capacity=8, version=4,
               metrics={"tokens_total": 5.0, "load_seconds": 1.0, "switches_total": 2.0})
    )  # fmt: skip
    found = exported(meter)
    assert found["dora_worker_tokens_total", ""] == 15.0
    assert found["dora_worker_switches_total", ""] == 2.0
    assert found["dora_worker_moved_total", ""] == 0.0
    assert found["dora_worker_weights_load_seconds", ""] == 2.0
    assert found["dora_worker_running_trajectories", ""] == 1.0
    assert found["dora_worker_capacity_trajectories", ""] == 16.0
    assert found["dora_process_policy_version", ""] == 4.0
    states = {own: value for (name, own), value in found.items() if name == "dora_process_state"}
    assert {own for own, value in states.items() if value} == {"ready", "loading"}


def test_counters_are_there_before_they_count(tmp_path: Path) -> None:
    found = exported(exporter(tmp_path, "rollout"))
    assert found["dora_process_dead_letters_total", "verifier_timeout"] == 0.0
    assert found["dora_worker_trajectories_total", "stop"] == 0.0
    assert not any(name.endswith("_created") for name, _ in found)


def test_a_step_shows_until_the_next_one_says_otherwise(tmp_path: Path) -> None:
    clock = Clock()
    meter = exporter(tmp_path, "trainer", clock=clock)
    groups = [admission(0, 0), admission(1, 0)]
    places = places_of([trajectory(g, s) for g in groups for s in range(G)])
    clock.now = 1500.0
    meter.on_step(
        step(0, 0, groups, places, reward_mean=0.5, loss=1.0, step_seconds=4.0, tokens=9.0)
    )
    found = exported(meter)
    assert found["dora_trainer_steps_total", ""] == 1.0
    assert found["dora_trainer_groups_trained_total", ""] == 2.0
    assert found["dora_trainer_tokens_total", ""] == 9.0
    assert found["dora_trainer_reward_mean", ""] == 0.5
    assert found["dora_trainer_step_seconds_sum", ""] == 4.0
    assert found["dora_trainer_last_step_timestamp_seconds", ""] == 1500.0
    meter.on_step(step(1, 1, groups, places, reward_mean=0.75))
    found = exported(meter)
    assert found["dora_trainer_reward_mean", ""] == 0.75
    assert ("dora_trainer_loss", "") not in found
    aside = GroupRef("g9", 9, 1, (), "verifier_died: exit code 1")
    meter.on_step(Step("r", "set_aside", 2, 2, 2, (), (aside,), {}, "c", None, "t", 0))
    found = exported(meter)
    assert found["dora_trainer_groups_set_aside_total", "verifier_died"] == 1.0
    assert found["dora_trainer_steps_total", ""] == 2.0


def test_series_of_versions_that_left_the_window_are_dropped(tmp_path: Path) -> None:
    clock = Clock()
    meter = exporter(tmp_path, "trainer", clock=clock)
    state = RunState(Window(K, 2), G)
    state.start()
    ordinal = 0
    for version in range(30):
        groups = [admission(ordinal, version), admission(ordinal + 1, version)]
        ordinal += 2
        records = [trajectory(group, sample) for group in groups for sample in range(G)]
        for group in groups:
            state.admit(group)
        for offset, record in enumerate(records[:-1]):
            state.finish(finished_facts(record, 0, offset))
        clock.now += 2.0
        meter.on_window(state, dict)
        found = exported(meter)
        versions = {
            own for name, own in found if name in ("dora_trainer_backlog_trajectories",
                                                   "dora_trainer_backlog_groups")
        }  # fmt: skip
        assert versions == {str(v) for v in range(max(0, version - K), version + 1)}
        assert found["dora_trainer_backlog_trajectories", str(version)] == 1.0
        assert found["dora_trainer_backlog_groups", str(version)] == 1.0
        assert found["dora_trainer_groups_outstanding", ""] == 2.0
        assert found["dora_trainer_groups_capacity", ""] == 4.0
        state.finish(finished_facts(records[-1], 0, len(records)))
        state.commit(step(version, version, groups, places_of(records)))


def test_the_lag_is_counted_to_the_end_and_by_live_version() -> None:
    positions = {("r.d", 0): 5, ("r.t", 0): 10, ("r.t", 1): 0, ("r.t", 2): 7, ("r.t", 5): 1}
    ends = {("r.d", 0): 9, ("r.t", 0): 12, ("r.t", 1): 3, ("r.t", 2): 7, ("r.t", 5): 0}
    journal, versions = lag_of(
        positions, ends, journal="r.d", trajectories="r.t", live=range(3, 5), ring=RING, lanes=2
    )
    # version 3 has slot 0 (partitions 0 and 1), version 4 slot 1 (partitions 2 and 3)
    assert (journal, versions) == (4, {3: 5, 4: 0})


def test_health_is_that_of_the_last_heartbeat(tmp_path: Path) -> None:
    clock = Clock()
    meter = exporter(tmp_path, "rollout", "w0", clock)
    assert meter.health()[0]
    meter.on_status(status("w0"))
    clock.now += 29.0
    assert meter.health()[0]
    clock.now += 2.0
    well, facts = meter.health()
    assert (well, facts["late"], facts["heartbeat_age_seconds"]) == (False, ["w0"], 31.0)
    assert exported(meter)["dora_process_late", ""] == 1.0
    meter.on_status(status("w0", "loading"))
    clock.now += 800.0
    assert meter.health()[0], "loading may take rollout.load_timeout_seconds"
    assert exported(meter)["dora_process_late", ""] == 0.0
    meter.on_status(status("w0", "stopped"))
    clock.now += 10_000.0
    assert meter.health()[0], "who said goodbye is not expected to speak"


def test_a_worker_that_loads_is_not_silent(tmp_path: Path) -> None:
    meter = exporter(tmp_path, "coordinator")
    workers = WorkerRegistry(heartbeat_timeout=30.0, load_timeout=900.0)
    for state in ("loading", "ready", "stopped"):
        workers.on_status(status(state, state), 0.0)
    for now, silent in ((20.0, 0.0), (40.0, 1.0), (901.0, 2.0)):
        meter.on_workers(workers, now)
        found = exported(meter)
        assert found["dora_coordinator_workers", "silent"] == silent
        assert found["dora_coordinator_worker_silence_seconds", ""] == now
    assert found["dora_coordinator_workers", "stopped"] == 1.0


def test_ready_is_who_does_its_part_and_speaks(tmp_path: Path) -> None:
    clock = Clock()
    meter = exporter(tmp_path, "rollout", "w0", clock)
    assert not meter.ready()[0], "nothing was said yet"
    for state, is_ready in [
        ("starting", False), ("loading", False), ("ready", True), ("failed", False),
        ("training", True), ("waiting", True), ("stopped", False),
    ]:  # fmt: skip
        meter.on_status(status("w0", state))
        assert meter.ready()[0] == is_ready, state
        assert meter.health()[0], f"{state} is no reason to be restarted"
    meter.on_status(status("w1"))
    assert meter.ready()[0], "one of the workers of the process can generate"
    clock.now += 31.0
    assert not meter.ready()[0]


@pytest.fixture
def first() -> int:
    return free_port(set())


def ask(address: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_each_process_takes_the_next_free_port(tmp_path: Path, first: int) -> None:
    taken: list[Endpoint] = []
    try:
        for _ in range(3):
            taken.append(Endpoint(exporter(tmp_path, "rollout"), "127.0.0.1", first))
        ports = [endpoint.port for endpoint in taken]
        assert ports == sorted(set(ports)) and ports[0] >= first
    finally:
        for endpoint in taken:
            endpoint.close()


def test_an_address_of_another_machine_is_refused(tmp_path: Path, first: int) -> None:
    with pytest.raises(ConfigError, match=r"metrics.port = \d+: nothing .* metrics.address = 203"):
        Endpoint(exporter(tmp_path, "rollout"), "203.0.113.1", first)  # of documentation only


def test_an_endpoint_answers_what_it_has_and_nothing_else(tmp_path: Path, first: int) -> None:
    clock = Clock()
    meter = exporter(tmp_path, "trainer", "trainer", clock)
    endpoint = Endpoint(meter, "127.0.0.1", first)
    url = f"http://127.0.0.1:{endpoint.port}"
    try:
        code, text = ask(f"{url}/metrics")
        assert code == 200 and "dora_trainer_steps_total" in text
        assert (ask(f"{url}/health")[0], ask(f"{url}/ready")[0]) == (200, 503)
        meter.on_status(status("trainer", "waiting"))
        assert ask(f"{url}/ready")[0] == 200
        meter.on_status(status("trainer", "starting"))
        clock.now += 901.0
        code, text = ask(f"{url}/health")
        assert (code, json.loads(text)["late"]) == (503, ["trainer"])
        assert ask(f"{url}/")[0] == 404
    finally:
        endpoint.close()


@pytest.fixture
def restored() -> Iterator[None]:
    former = metering.meter()
    yield
    metering.set_meter(former)


def test_a_process_is_watched_while_it_runs_and_only_if_asked(
    tmp_path: Path, first: int, restored: None
) -> None:
    with observed(config(tmp_path), "trainer", "trainer"):
        assert type(metering.meter()) is metering.Meter
    on = config(tmp_path, metrics={"port": first})
    target = tmp_path / ".prometheus" / "r.trainer.json"
    with observed(on, "trainer", "trainer"):
        port = int(metering.meter().status_metrics["metrics_port"])
        (said,) = json.loads(target.read_text())
        assert said["targets"] == [f"127.0.0.1:{port}"]
        assert said["labels"] == {"run": "r", "role": "trainer", "process": "trainer"}
    assert not target.exists()
    assert metering.meter().status_metrics == {}


def test_what_is_off_is_not_imported() -> None:
    code = (
        "import sys, dora.cli.main, dora.telemetry\n"
        "import dora.producers.coordinator.coordinator, dora.producers.worker.worker\n"
        "import dora.consumers.trainer.step_reports, dora.consumers.trainer.heartbeat\n"
        "print([m for m in sys.modules if m.split('.')[0] in "
        "('prometheus_client', 'opentelemetry', 'tensorboard', 'torch')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_run_that_starts_says_nothing_of_steps(tmp_path: Path) -> None:
    found = exported(exporter(tmp_path, "trainer"))
    assert ("dora_trainer_reward_mean", "") not in found
    assert found["dora_trainer_steps_total", ""] == 0.0
