"""A run's logged trajectories feed the trainer of another run, in place of live workers."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dora.bus import ClusterSettings, LogWriter, cluster_settings
from dora.bus.topics import TopicAdmin, topic_plan
from dora.bus.transactions import TransactionalWriter
from dora.config import Config, KafkaSection
from dora.consumers.audit import audit_run
from dora.consumers.monitor.monitor import RunMonitor
from dora.consumers.trainer.trainer import Trainer
from dora.core.audit.report import AuditReport
from dora.errors import DeadlineError, RunError
from dora.log.run_log import RunLog
from dora.producers.coordinator.coordinator import Coordinator
from dora.producers.replay.recording import Recording
from dora.producers.replay.serving import ReplayServer, ServingReport
from dora.schemas.records import Admission, Step
from tests.brokers import Cluster
from tests.played_trainer import VOCABULARY, worker
from tests.small_run import dora, refused
from tests.training_world import World, fed

STEPS = 4
SECONDS = 120.0


@dataclass(slots=True)
class Source:
    """A run of emulated engine and trainer that is over, and runs that are fed from it."""

    settings: ClusterSettings
    name: str
    directory: Path
    fed: int = field(default=0)

    def config(self, name: str, **sections: Any) -> Config:
        return Config.model_validate(
            {
                "run": {"name": name, "directory": str(self.directory)},
                "policy": {"model": "emulated"},
                "task": {
                    "kind": "synthetic",
                    "synthetic_prompts": 8,
                    "synthetic_prompt_tokens": 3,
                    "max_prompt_tokens": 8,
                },
                "window": {"max_staleness": 1, "groups_per_step": 2, "group_size": 2},
                "trainer": {
                    "steps": STEPS,
                    "engine": "emulated",
                    "emulated": {"step_seconds": 0.0},
                    "batch_timeout_seconds": SECONDS,
                },
                "rollout": {
                    "engine": "emulated",
                    "capacity": 8,
                    "max_new_tokens": 16,
                    "chunk_tokens": 4,
                    "heartbeat_seconds": 0.2,
                    "heartbeat_timeout_seconds": SECONDS,
                    "emulated": {"time_scale": 0.0, "length_mean": 6},
                },
                "evaluation": {"prompts": 2, "every": 2},
                "kafka": {"bootstrap_servers": self.settings.bootstrap_servers, "lanes": 2},
            }
            | sections
        )

    def next_name(self) -> str:
        self.fed += 1
        return f"{self.name}-{self.fed}"

    def server(self, config: Config, **options: Any) -> ReplayServer:
        run = RunLog(self.settings, self.name)
        with TopicAdmin(self.settings) as admin:
            admin.create(topic_plan(config), exist_ok=True)
        given = {"speed": float("inf"), "wait": SECONDS} | options
        return ReplayServer(Recording(run, config.run.name), config, self.settings, **given)

    def audit(self, name: str) -> AuditReport:
        return audit_run(self.settings, name, deadline=SECONDS)


@contextmanager
def together(*targets: Callable[[threading.Event], Any]) -> Iterator[list[Any]]:
    """Each target in a thread, told to stop at the end; yields their results, filled by then."""
    stop = threading.Event()
    results: list[Any] = [None] * len(targets)

    def work(index: int) -> None:
        try:
            results[index] = targets[index](stop)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            results[index] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(targets))]
    for thread in threads:
        thread.start()
    try:
        yield results
    finally:
        for thread in threads:
            thread.join(SECONDS)
        stop.set()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive()


def check(result: Any) -> Any:
    if isinstance(result, BaseException):
        raise result
    return result


@pytest.fixture(scope="module")
def source(kafka: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """A coordinator, a worker and a trainer took four steps, with evaluations; do not change it."""
    settings = cluster_settings(KafkaSection(bootstrap_servers=kafka.bootstrap_servers))
    directory = tmp_path_factory.mktemp("source")
    made = Source(settings, f"source-{id(directory):x}", directory)
    config = made.config(made.name)
    with TopicAdmin(settings) as admin:
        admin.create(topic_plan(config))
    (directory / "config.json").write_text(f'{{"vocab_size": {VOCABULARY}}}')
    around = SimpleNamespace(config=config, settings=settings, tmp=directory)

    def generate(stop: threading.Event) -> None:
        worker(around, "w0", stop)  # type: ignore[arg-type]

    def coordinate(stop: threading.Event) -> None:
        Coordinator(config, settings).run(stop)

    with together(generate, coordinate, Trainer(config, settings).run) as results:
        pass
    for result in results:
        check(result)
    report = made.audit(made.name)
    assert report.steps == STEPS and not report.violated, report.findings
    return made


def entries(source: Source, name: str) -> tuple[list[Step], list[Admission]]:
    run = RunLog(source.settings, name)
    return run.steps, list(run.admissions.values())


def test_a_trainer_takes_the_recorded_steps_again(source: Source) -> None:
    name = source.next_name()
    config = source.config(name)
    server = source.server(config)
    with together(server.serve, Trainer(config, source.settings).run) as results:
        pass
    report: ServingReport = check(results[0])
    check(results[1])
    assert report.version == STEPS and report.without_chunks == 0
    audit = source.audit(name)
    assert audit.steps == STEPS and not audit.violated, audit.findings
    old, new = RunLog(source.settings, source.name), RunLog(source.settings, name)
    given = {p.record.trajectory_id: p.record for p in new.trajectories()}
    for placed in old.trajectories():
        record = given.pop(placed.record.trajectory_id)
        assert record.run == name
        assert (record.token_ids, record.reward, record.policy_version, record.worker) == (
            placed.record.token_ids,
            placed.record.reward,
            placed.record.policy_version,
            placed.record.worker,
        )
    assert not given
    monitor = RunMonitor(source.settings, name, heartbeat_timeout=SECONDS)
    try:
        monitor.catch_up()
        states = {p.process: p.state for p in monitor.snapshot().processes}
    finally:
        monitor.close()
    assert states == {"coordinator": "stopped", "replay": "stopped", "trainer": "stopped"}


def test_a_serving_that_died_goes_on_from_the_log_without_doubling_anything(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora.producers.replay.serving.RECORDS_AT_ONCE", 3)
    name = source.next_name()
    config = source.config(name)
    broken = source.server(config)
    begin = broken._transactions.transaction
    count = iter(range(100))

    def dies_at_the_third():  # type: ignore[no-untyped-def]
        if next(count) == 3:  # groups are admitted, some of their records are written
            raise RuntimeError("killed")
        return begin()

    monkeypatch.setattr(broken._transactions, "transaction", dies_at_the_third)

    def serve(stop: threading.Event) -> ServingReport:
        with pytest.raises(RuntimeError, match="killed"):
            broken.serve(stop)
        assert len(RunLog(source.settings, name).admissions) > 0
        return source.server(config).serve(stop)

    with together(serve, Trainer(config, source.settings).run) as results:
        pass
    report: ServingReport = check(results[0])
    check(results[1])
    assert report.version == STEPS
    audit = source.audit(name)
    assert audit.steps == STEPS and not audit.violated, audit.findings
    assert audit.duplicates_ignored == 0
    _, recorded = entries(source, source.name)
    _, served = entries(source, name)
    assert [a.group_id for a in served] == [a.group_id for a in recorded][: len(served)]


def test_a_trainer_with_fewer_steps_ends_the_serving_and_a_later_one_goes_on(
    source: Source,
) -> None:
    name = source.next_name()
    for steps in (1, STEPS):
        trainer = source.config(name).trainer.model_copy(update={"steps": steps})
        config = source.config(name).model_copy(update={"trainer": trainer})
        with together(source.server(config).serve, Trainer(config, source.settings).run) as results:
            pass
        report: ServingReport = check(results[0])
        check(results[1])
        assert report.version == steps
        assert f"done its {steps} steps" in report.outcome or "used up" in report.outcome
    assert not source.audit(name).violated


def test_at_recorded_speed_nothing_comes_earlier_than_it_did(source: Source) -> None:
    run = RunLog(source.settings, source.name)
    recording = Recording(run, "other")
    group = recording.admissions[0]
    timed = recording.records(group)
    assert timed and all(each.record.run == "other" for each in timed)
    for each in timed:
        recorded = (each.record.created_ms - group.created_ms) / 1000
        assert each.seconds >= max(0.0, recorded)
    by_sample: dict[str, list[float]] = {}
    for each in timed:
        by_sample.setdefault(each.record.trajectory_id, []).append(each.seconds)
    assert all(times == sorted(times) for times in by_sample.values()), "a trajectory comes last"


def test_a_run_of_another_kind_or_another_source_is_not_fed(source: Source) -> None:
    name = source.next_name()
    config = source.config(name)
    server = source.server(config)
    with LogWriter(source.settings, client_id="test") as writer:
        foreign = Admission(name, "g5", 5, 0, 2, "train", 0)
        writer.send(f"{name}.dispatch", foreign, key="g5", partition=0)
    with pytest.raises(RunError, match=r"was not served from .* admits group g5"):
        server.serve(threading.Event())
    other = source.next_name()
    window = {"max_staleness": 1, "groups_per_step": 4, "group_size": 2}
    config = source.config(other, window=window)
    with TopicAdmin(source.settings) as admin:
        admin.create(topic_plan(config))
    stopped = threading.Event()
    stopped.set()  # the trainer begins the run and takes no step
    Trainer(config, source.settings).run(stopped)
    with TransactionalWriter(
        source.settings, f"{other}.coordinator", client_id="test", transaction_timeout=60.0
    ) as coordinator:
        with pytest.raises(RunError, match=r"window.groups_per_step: recorded 2, given 4"):
            source.server(config)
        with coordinator.transaction() as transaction:  # it was not ended by what is refused
            transaction.send(f"{other}.dispatch", foreign, key="g5", partition=0)


def test_without_a_trainer_it_gives_up_and_says_so(source: Source) -> None:
    config = source.config(source.next_name())
    with pytest.raises(DeadlineError, match="no trainer of run"):
        source.server(config, wait=0.01).serve(threading.Event())


def test_the_command_prints_how_to_start_the_trainer(source: Source, tmp_path: Path) -> None:
    name, file = source.next_name(), tmp_path / "new.toml"
    address = source.settings.bootstrap_servers
    options = ["--serve", "--as", name, "--wait", "1", "--config-out", str(file)]
    result = dora("replay", source.name, "-b", address, *options)
    refused(result, 1, f"no trainer of run {name}")
    assert f"dora train {file} -b {address}" in result.stdout
    assert f'name = "{name}"' in file.read_text()
    refused(dora("replay", source.name, "-b", address, *options), 2, str(file))
    same = ["--serve", "--as", source.name]
    refused(dora("replay", source.name, "-b", address, *same), 2, "cannot be fed from itself")
    speed = ["--serve", "--as", name, "--speed", "fast"]
    assert dora("replay", source.name, "-b", address, *speed).exit_code == 2


def test_the_real_learner_trains_a_served_run_to_the_same_weights(
    settings: ClusterSettings, run_name: str, model: Path, tmp_path: Path
) -> None:
    recorded = World(settings, run_name, model, tmp_path / "recorded")
    served = World(settings, f"{run_name}-2", model, tmp_path / "served")
    with TopicAdmin(settings) as admin:
        admin.create(topic_plan(recorded.config()))
    with fed(recorded):
        recorded.train(recorded.config())
    source = Source(settings, recorded.name, tmp_path)
    server = source.server(served.config())
    reports: list[ServingReport] = []
    stop = threading.Event()
    thread = threading.Thread(target=lambda: reports.append(server.serve(stop)), daemon=True)
    thread.start()
    begin = time.monotonic()
    served.train(served.config())
    thread.join(SECONDS)
    assert reports and reports[0].version == 3, time.monotonic() - begin
    assert reports[0].without_chunks == reports[0].trajectories, "the feeder wrote none"
    old, new = recorded.steps(), served.steps()
    assert [s.weights_checksum for s in new] == [s.weights_checksum for s in old]
    audit = audit_run(settings, served.name, chunks=False, deadline=SECONDS)
    assert audit.steps == 3 and not audit.violated, audit.findings
