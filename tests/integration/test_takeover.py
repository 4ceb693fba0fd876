"""Workers that die, hang, stall and come back: what they generated is kept (real Kafka, emulated
engine; the test plays the trainer)."""

import logging
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from dora.bus.writer import LogWriter
from dora.config import Config
from dora.config.emulation import EmulatedSection
from dora.consumers.audit import audit_run
from dora.core.ring import slot_partitions, worker_partition
from dora.core.scheduling.coordination import Coordination
from dora.errors import MissingWeightsError
from dora.producers.coordinator.coordinator import rules_of
from dora.producers.coordinator.log_follower import LogFollower
from dora.producers.coordinator.takeover import Lost, scan
from dora.producers.engines import Engine
from dora.producers.engines.base import Delta, Request
from dora.producers.engines.emulated import EmulatedEngine, EmulatedSpec
from dora.schemas.records import (
    Admission,
    Chunk,
    Command,
    DeadLetter,
    Policy,
    SlotOffset,
    Status,
    Trajectory,
)
from tests.factories import step
from tests.played_trainer import Cluster, LocalStore, check_log, coordinate, running, work

WAIT = 30.0


class Hanging(EmulatedEngine):
    """Does not return from a step, once every request has some tokens, until it is let go."""

    def __init__(self, go_on: threading.Event, steps: int = 8) -> None:
        spec = EmulatedSpec(
            EmulatedSection(load_seconds=0, time_scale=0, length="fixed", length_mean=20)
        )
        super().__init__(spec, vocabulary=40, capacity=8, max_model_len=64)
        self._go_on = go_on
        self._steps = steps

    def step(self) -> list[Delta]:
        if self.running:
            self._steps -= 1
            if self._steps < 0:
                assert self._go_on.wait(WAIT)
        return super().step()


def trajectories(cluster: Cluster) -> list[Trajectory]:
    return [t for t in cluster.all(Trajectory) if isinstance(t, Trajectory)]


def counted(cluster: Cluster) -> list[Trajectory]:
    seen: dict[str, Trajectory] = {}
    for record in trajectories(cluster):
        seen.setdefault(record.trajectory_id, record)
    return list(seen.values())


def test_a_worker_that_silently_never_returns_loses_only_tokens_since_its_last_chunk(
    cluster: Cluster,
) -> None:
    go_on = threading.Event()

    def hanging() -> Engine:
        return Hanging(go_on)

    cluster.begin()
    with running(coordinate(cluster)), running(work(cluster, "w0", engine=hanging)):
        cluster.until(lambda: len(cluster.all(Chunk)) >= 12, "chunks of the first worker")
        with running(work(cluster, "w1")):
            cluster.until(lambda: len(cluster.state.complete_groups()) >= 8, "a full window")
            resumed = [t for t in counted(cluster) if t.resumed_tokens]
            assert resumed, "prefixes of the first worker were taken over"
            # the zombie comes back, finishes what it had, and changes nothing
            before = {t.trajectory_id: t for t in counted(cluster)}
            go_on.set()
            cluster.until(
                lambda: any(s.process == "w0" and not s.running for s in cluster.all(Status)[-4:]),
                "the first worker to hand back or finish",
            )
            cluster.train_step()
            cluster.until(lambda: cluster.state.newest == 1, "the step")
    check_log(cluster)
    chunks = [c for c in cluster.all(Chunk) if isinstance(c, Chunk)]
    for record in resumed:
        first = [c for c in chunks if c.trajectory_id == record.trajectory_id and c.attempt == 0]
        left = b"".join(c.token_ids for c in first if c.worker == "w0")[: 4 * record.resumed_tokens]
        logprobs = b"".join(c.logprobs for c in first)[: 4 * record.resumed_tokens]
        assert record.attempt > 0 and record.worker == "w1"
        assert record.resumed_tokens == 8, "two chunks of four tokens were in the log"
        assert left in record.token_ids and logprobs in record.logprobs
    assert {i: t.attempt for i, t in before.items()} == {
        t.trajectory_id: t.attempt for t in counted(cluster) if t.trajectory_id in before
    }
    report = audit_run(cluster.settings, cluster.config.run.name)
    assert not any(report.violations.values()), report


def test_a_worker_that_ends_in_order_hands_its_tokens_over(cluster: Cluster) -> None:
    def slow() -> Engine:
        spec = EmulatedSpec(
            EmulatedSection(iteration_seconds=0.05, load_seconds=0, length="fixed", length_mean=32)
        )
        return EmulatedEngine(spec, vocabulary=40, capacity=8, max_model_len=64)

    cluster.begin()
    with running(coordinate(cluster)):
        with running(work(cluster, "w0", engine=slow)):
            cluster.until(lambda: len(cluster.all(Chunk)) >= 8, "chunks of the first worker")
        with running(work(cluster, "w1")):
            cluster.until(lambda: len(cluster.state.complete_groups()) >= 8, "a full window")
    check_log(cluster)
    resumed = [t for t in counted(cluster) if t.attempt == 1]
    assert len(resumed) == 8, "the worker was full: five of the evaluation and three of training"
    assert all(t.resumed_tokens >= 4 for t in resumed), [t.resumed_tokens for t in resumed]


@pytest.fixture
def impatient(config: Config) -> Config:
    rollout = config.rollout.model_copy(update={"stall_timeout_seconds": 0.5})
    return config.model_copy(update={"rollout": rollout})


def test_a_request_that_its_engine_forgot_is_tried_again_and_its_worker_lives(
    impatient: Config, tmp_path: Path
) -> None:
    class Forgetful(EmulatedEngine):
        """Loses the first attempt at g1/0 after three tokens."""

        def __init__(self) -> None:
            spec = EmulatedSpec(
                EmulatedSection(load_seconds=0, time_scale=0, length="fixed", length_mean=9)
            )
            super().__init__(spec, vocabulary=40, capacity=8, max_model_len=64)
            self.tokens = 0

        def add(self, request: Request) -> None:
            super().add(request)
            if request.request_id == "g1/0" and request.prefix:
                self.tokens = -1000

        def step(self) -> list[Delta]:
            told = []
            for delta in super().step():
                self.tokens += delta.request_id == "g1/0"
                if delta.request_id != "g1/0" or self.tokens <= 3:
                    told.append(delta)
            return told

    cluster = Cluster(impatient, tmp_path)
    try:
        cluster.begin()
        with running(coordinate(cluster)), running(work(cluster, "w0", engine=Forgetful)):
            cluster.until(lambda: len(cluster.state.complete_groups()) >= 8, "a full window")
        check_log(cluster)
        again = next(t for t in counted(cluster) if t.trajectory_id == "g1/0")
        assert (again.attempt, again.resumed_tokens) == (1, 3)
        letters = [d for d in cluster.all(DeadLetter) if isinstance(d, DeadLetter)]
        assert [(d.code, d.trajectory_id) for d in letters] == [("stalled", "g1/0")]
        assert "no token for 0.5 s after 3" in letters[0].reason
    finally:
        cluster.close()


def test_a_version_announced_and_left_again_is_not_loaded_and_its_worker_lives(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(store: LocalStore, policy: Policy, cache: Path) -> Path:
        if policy.version == 0:
            raise MissingWeightsError("version 0 is not in the weight store")
        return cache

    monkeypatch.setattr(LocalStore, "fetch", gone)
    cluster.begin()
    with cluster.trainer.transaction() as transaction:
        for version in (1, 2):
            transaction.send(cluster.topics.policies, cluster.policy(version), key=str(version))
    with running(work(cluster, "w0")):
        cluster.until(lambda: cluster.all(Status), "the worker to speak")
        incarnation = cluster.all(Status)[-1].incarnation
        for version in (0, 2):
            with LogWriter(cluster.settings, client_id="test") as writer:
                writer.send(
                    cluster.topics.dispatch,
                    Command(
                        cluster.config.run.name, "w0", incarnation, "switch", 0,
                        policy_version=version,
                    ),
                    key="w0",
                    partition=worker_partition("w0", cluster.config.kafka.dispatch_partitions),
                )  # fmt: skip
            told = f"version {version} has left" if version == 0 else f"hosts version {version}"
            cluster.until(
                lambda told=told: any(told in s.message for s in cluster.all(Status)), told
            )
    loading = [s.loading for s in cluster.all(Status) if s.state == "loading"]
    assert loading == [0, 2]
    cluster.until(lambda: cluster.all(Status)[-1].state == "stopped", "the orderly end")


def long_log(cluster: Cluster, versions: int) -> None:
    """A run of `versions` steps as its log would show it, without trajectories' tokens."""
    run, lanes = cluster.config.run.name, cluster.config.kafka.lanes
    ring, size = cluster.config.window.ring, cluster.config.window.groups_per_step
    topics = cluster.topics
    for version in range(versions):
        groups = [
            Admission(run, f"g{o}", o, version, 2, "train", 0)
            for o in range(version * size, (version + 1) * size)
        ]
        ends = cluster.policy(version + 1)
        with cluster.trainer.transaction() as transaction:
            for group in groups:
                transaction.send(topics.dispatch, group, key=group.group_id, partition=0)
                for sample in (0, 1):
                    command = Command(
                        run, "w0", "gone", "start", 0, trajectory_id=f"{group.group_id}/{sample}",
                        group_id=group.group_id, sample=sample, policy_version=version,
                        ordinal=group.ordinal,
                    )  # fmt: skip
                    index = worker_partition("w0", cluster.config.kafka.dispatch_partitions)
                    transaction.send(topics.dispatch, command, key="w0", partition=index)
            places = {f"{g.group_id}/{s}": (0, 0) for g in groups for s in (0, 1)}
            transaction.send(topics.steps, step(version, version, groups, places), key=run)
            slots = tuple(s for s in ends.slots if s.topic != topics.chunks)
            for index in slot_partitions(version + 1, ring, lanes):
                slots += (SlotOffset(topics.chunks, index, 0),)
            policy = Policy(
                run, version + 1, "full", "file:///w/v00000001-0123456789abcdef", (), "c", b"", b"",
                slots, 0,
            )  # fmt: skip
            transaction.send(topics.policies, policy, key=str(version + 1))


def test_a_coordinator_starts_from_the_window_however_long_the_run_is(cluster: Cluster) -> None:
    cluster.begin()
    long_log(cluster, 150)
    coordination = Coordination(rules_of(cluster.config), "me")
    fold = LogFollower(cluster.config, cluster.settings, coordination, lambda: 0.0)
    try:
        read = fold.rebuild()
    finally:
        fold.close()
    assert coordination.state.newest == 150
    assert coordination.state.next_ordinal == 600, "prompts are neither skipped nor repeated"
    assert coordination.state.outstanding_total == 0
    assert read < 300, "of about 2,000 records"


def test_chunks_that_cannot_be_read_cost_tokens_and_no_trajectory(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dora")
    with LogWriter(cluster.settings, client_id="test") as writer:
        writer.send(
            cluster.topics.workers, Status("r", "w", "rollout", "i", "ready", 0), key="g1/0"
        )
    wanted = {
        "g1/0": Lost(0, (cluster.topics.workers, 0), 0),
        "g2/0": Lost(0, (cluster.topics.chunks, 0), -2),
    }
    found = scan(cluster.settings, wanted, 20.0)
    assert set(found) == set(wanted)
    assert all(prefix.tokens == 0 for prefix in found.values())


def test_a_request_that_kills_its_worker_is_given_up_and_everything_else_is_finished(
    cluster: Cluster,
) -> None:
    class Poisoned(EmulatedEngine):
        """Dies of g0/1."""

        def __init__(self) -> None:
            spec = EmulatedSpec(
                EmulatedSection(load_seconds=0, time_scale=0, length="fixed", length_mean=6)
            )
            super().__init__(spec, vocabulary=40, capacity=8, max_model_len=64)
            self.poisoned = False

        def add(self, request: Request) -> None:
            super().add(request)
            self.poisoned = self.poisoned or request.request_id == "g0/1"

        def step(self) -> list[Delta]:
            if self.poisoned:
                raise RuntimeError("illegal memory access")
            return super().step()

    def restarted(stop: threading.Event) -> None:
        while not stop.is_set():
            with suppress(RuntimeError):
                work(cluster, "w0", engine=Poisoned)(stop)

    cluster.begin()
    with running(coordinate(cluster)), running(restarted):
        cluster.until(lambda: len(cluster.state.complete_groups()) >= 8, "a full window")
    failed = [g for g in cluster.state.complete_groups() if g.failure]
    # g1/0 was in hand with it each time, and is taken for as poisonous
    assert [g.group_id for g in failed] == ["g0", "g1"]
    attempts = cluster.config.rollout.max_attempts
    assert f"gave up after {attempts} attempts" in (failed[0].failure or "")
    deaths = [s for s in cluster.all(Status) if s.state == "failed"]
    assert len(deaths) == attempts and "illegal memory access" in deaths[0].message
