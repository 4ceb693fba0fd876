"""One run, watched by all that can watch it: a real Prometheus with the shipped configuration,
dashboard and alerts, an OTLP receiver, and TensorBoard."""

import json
import os
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dora.broker.process import free_port
from dora.bus import ClusterSettings, cluster_settings
from dora.bus.reader import BEGINNING, LogReader, Message
from dora.config import KafkaSection
from dora.core.ring import trajectory_id
from dora.schemas.records import Chunk, Command, RunStarted, Step, Trajectory
from dora.telemetry.tracer import generation_span, scoring_span, trace_of, training_span
from tests.brokers import Cluster
from tests.prometheus_server import (
    Prometheus,
    alert_conditions,
    dashboard_queries,
    prometheus,
    tool,
)
from tests.small_run import SmallRun, make_model
from tests.span_receiver import Receiver, span_receiver

DEADLINE = 240.0
pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True, slots=True)
class Watched:
    """A run that goes on until the end of the module's tests."""

    run: SmallRun
    settings: ClusterSettings
    process: "subprocess.Popen[bytes]"
    receiver: Receiver
    log: Path

    def until(self, condition: Callable[[], object], what: Callable[[], object]) -> None:
        """Wait for `condition`; the run must not end meanwhile."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert self.process.poll() is None, self.story()
            assert time.monotonic() < deadline, f"waited for: {what()}\n{self.story()}"
            time.sleep(0.3)

    def story(self) -> str:
        logs = sorted(self.run.directory.glob("runs/*/logs/*.log"))
        return "\n".join(
            f"== {path.name}\n{path.read_text()[-2000:]}" for path in (self.log, *logs)
        )

    def targets(self) -> dict[str, str]:
        """Address of each process's endpoint, as the processes themselves name them."""
        found = {}
        for path in (self.run.directory / "runs" / ".prometheus").glob("*.json"):
            (target,) = json.loads(path.read_text())
            found[target["labels"]["process"]] = target["targets"][0]
        return found

    def read(self, *topics: tuple[str, int]) -> list[Message]:
        """All that is in these topics (name and number of partitions)."""
        places = {(topic, index): BEGINNING for topic, count in topics for index in range(count)}
        with LogReader(self.settings, client_id="test") as reader:
            reader.assign(places)
            return list(reader.read_to_end(60))

    def ledger(self) -> list[Any]:
        """The ledger's records."""
        return [message.value for message in self.read((self.run.topics.steps, 1))]


@pytest.fixture(scope="module")
def watched(kafka: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("observed")
    settings = cluster_settings(KafkaSection(bootstrap_servers=kafka.bootstrap_servers))
    run = SmallRun(
        f"observed-{uuid.uuid4().hex[:8]}",
        directory,
        make_model(directory / "model"),
        kafka.bootstrap_servers,
    )
    with span_receiver() as receiver:
        sets = (
            f"metrics.port={free_port(set())}",
            f"traces.endpoint={receiver.endpoint}",
            "trainer.steps=100000",
            "rollout.chunk_tokens=2",
            "trainer.batch_timeout_seconds=240",
            "rollout.heartbeat_timeout_seconds=60",
        )
        log = directory / "run.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "dora", "run", str(run.path), "--plain"),
                    *("-b", kafka.bootstrap_servers),
                    *(word for each in sets for word in ("--set", each)),
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        try:
            yield Watched(run, settings, process, receiver, log)
        finally:
            process.terminate()
            process.wait(120)


@pytest.fixture(scope="module")
def server(watched: Watched, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with ExitStack() as stack:
        runs = watched.run.directory / "runs"
        yield stack.enter_context(prometheus(tmp_path_factory.mktemp("prometheus"), runs))


def test_every_process_serves_its_metrics_and_says_that_it_is_well(watched: Watched) -> None:
    processes = {"coordinator", "trainer", "w0"}
    watched.until(lambda: set(watched.targets()) == processes, watched.targets)
    for process, address in watched.targets().items():
        with urllib.request.urlopen(f"http://{address}/health", timeout=30) as answer:
            health = json.load(answer)
        assert (health["run"], health["process"]) == (watched.run.name, process)
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        assert f'dora_process_heartbeat_age_seconds{{process="{process}"' in text


def test_prometheus_has_data_for_everything_that_dashboard_and_alerts_ask(
    watched: Watched, server: Prometheus
) -> None:
    up = 'up{job="dora",run="' + watched.run.name + '"}'
    watched.until(
        lambda: [value for _, value in server.query(up)] == [1.0, 1.0, 1.0],
        lambda: server.get("targets")["activeTargets"],
    )
    queries = {
        query.replace("$run", watched.run.name).replace("$__rate_interval", "1m")
        for query in (*dashboard_queries(), *alert_conditions())
    }
    without = set(queries)

    def answered() -> bool:
        without.difference_update([query for query in without if server.query(query)])
        return not without

    watched.until(answered, lambda: sorted(without))
    rules = [rule for group in server.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    of = f'{{run="{watched.run.name}"}}'
    # the trainer follows its log: what it has not read is little, and of live versions only
    versions = server.query(f"count(dora_trainer_trajectories_lag_records{of})")
    assert versions[0][1] <= watched.run.config().window.max_staleness + 1
    assert server.query(f"dora_trainer_groups_capacity{of}")[0][1] == 4.0
    series = server.query(f"count({{run='{watched.run.name}',__name__=~'dora_.*'}})")
    assert series[0][1] < 600


def test_one_trace_follows_a_group_from_its_admission_to_its_step(watched: Watched) -> None:
    def steps() -> list[Step]:
        return [entry for entry in watched.ledger() if isinstance(entry, Step) and entry.trained]

    watched.until(lambda: len(steps()) >= 2, steps)
    started = next(entry for entry in watched.ledger() if isinstance(entry, RunStarted))
    ref = steps()[1].trained[0]
    trace = trace_of(started.run_id, ref.group_id)
    size = len(ref.samples)
    wanted = ["admission", "training step", *["dispatch", "generation", "scoring"] * size]
    watched.until(
        lambda: len(watched.receiver.trace(trace)) >= len(wanted),
        lambda: watched.receiver.trace(trace),
    )
    spans = watched.receiver.trace(trace)
    assert sorted(span.name for span in spans) == sorted(wanted)
    by_id = {span.span: span for span in spans}
    (root,) = [span for span in spans if not span.parent]
    assert (root.name, root.service) == ("admission", "dora-coordinator")
    assert all(span.parent in by_id for span in spans if span is not root)
    for sample in ref.samples:
        identity = trajectory_id(ref.group_id, sample.sample)
        scoring = by_id[scoring_span(identity, sample.attempt)]
        generation = by_id[generation_span(identity, sample.attempt)]
        assert scoring.parent == generation.span
        assert by_id[by_id[generation.parent].parent] is root
        assert generation.service == "dora-rollout"
        assert generation.attributes["dora.worker"] == "w0"
        assert generation.attributes["dora.attempt"] == sample.attempt
        chunks = [event["dora.tokens"] for event in generation.events]
        assert sum(chunks) == generation.attributes["dora.tokens"]
        assert generation.start <= generation.end <= scoring.end
    training = by_id[training_span(ref.group_id)]
    assert training.service == "dora-trainer"
    assert training.attributes["dora.step"] == 2
    linked = {scoring_span(trajectory_id(ref.group_id, s.sample), s.attempt) for s in ref.samples}
    assert set(training.links) == {(trace, span) for span in linked}
    assert not watched.receiver.broken
    _check_headers(watched, trace, ref.group_id)


def _check_headers(watched: Watched, trace: str, group_id: str) -> None:
    """Commands, chunks and trajectories of the group carry its trace."""
    config, topics = watched.run.config(), watched.run.topics
    ring = config.window.ring * config.kafka.lanes
    places = (
        (topics.dispatch, config.kafka.dispatch_partitions),
        (topics.chunks, ring),
        (topics.trajectories, ring),
    )
    found = {Command: 0, Chunk: 0, Trajectory: 0}
    for message in watched.read(*places):
        value = message.value
        if type(value) in found and value.group_id == group_id:
            found[type(value)] += 1
            version, of, _, flags = message.headers["traceparent"].decode().split("-")
            assert (version, of, flags) == ("00", trace, "01")
    assert all(found.values()), found


def test_tensorboard_has_each_committed_step_once(watched: Watched) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = watched.run.directory / "runs" / watched.run.name / "tensorboard"
    found: list[Any] = []

    def three() -> bool:
        accumulator = EventAccumulator(str(directory))
        accumulator.Reload()
        found[:] = [accumulator]
        tags = accumulator.Tags()["scalars"]
        return "train/loss" in tags and len(accumulator.Scalars("train/loss")) >= 3

    watched.until(three, lambda: list(directory.glob("*")))
    ledger = {e.version_out: e for e in watched.ledger() if isinstance(e, Step) and e.trained}
    for tag, name in (("train/loss", "loss"), ("time/step_seconds", "step_seconds")):
        scalars = found[0].Scalars(tag)
        assert [scalar.step for scalar in scalars] == list(range(1, len(scalars) + 1))
        for scalar in scalars:
            assert scalar.value == pytest.approx(ledger[scalar.step].metrics[name], rel=1e-6)


def test_promtool_finds_nothing_wrong() -> None:
    from tests.prometheus_server import ALERTS, SCRAPING

    for arguments in (("check", "rules", str(ALERTS)), ("check", "config", str(SCRAPING))):
        done = subprocess.run(
            [tool("promtool"), *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
