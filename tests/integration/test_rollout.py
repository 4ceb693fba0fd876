"""Coordinator and rollout workers over a real Kafka, with the emulated engine.

The test plays the trainer: it writes the ledger and the policies.
"""

import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest

from dora.bus.writer import LogWriter
from dora.config.emulation import EmulatedSection
from dora.core.ring import worker_partition
from dora.errors import FencedError, RunError
from dora.producers.coordinator.coordinator import Coordinator
from dora.producers.engines import Engine
from dora.producers.engines.base import Delta, Request
from dora.producers.engines.emulated import EmulatedEngine, EmulatedSpec
from dora.producers.worker.process import wait_for_free_ids
from dora.producers.worker.scoring import EmulatedScorer, Scored
from dora.schemas.records import Admission, Command, DeadLetter, Status, Step, Trajectory
from tests.played_trainer import Cluster, check_log, coordinate, running, work


def test_a_whole_run_is_generated_evaluated_and_ended(cluster: Cluster) -> None:
    with ExitStack() as stack:
        stack.enter_context(running(coordinate(cluster)))
        stack.enter_context(running(work(cluster, "w0")))
        stack.enter_context(running(work(cluster, "w1")))
        cluster.begin()
        for version in range(cluster.config.trainer.steps):
            cluster.until(
                lambda: len(cluster.state.complete_groups()) >= 4, f"a batch at version {version}"
            )
            assert cluster.state.outstanding_total <= 8
            cluster.train_step()
            cluster.until(lambda v=version: cluster.state.newest == v + 1, "the step")
        cluster.until(
            lambda: {
                s.process for s in cluster.all(Status) if s.state == "stopped"
            } == {"w0", "w1", "coordinator"},
            "everybody to stop",
        )  # fmt: skip
    check_log(cluster)
    trained = {g.group_id for s in cluster.all(Step) for g in s.trained}
    started = {a.group_id for a in cluster.all(Admission) if a.purpose == "train"}
    assert len(trained) == 24 and started == trained, "nothing is started that nobody trains"
    evaluated = [a.policy_version for a in cluster.all(Admission) if a.purpose == "eval"]
    assert evaluated == [0] * 5 + [6] * 5
    assert {t.policy_version for t in cluster.all(Trajectory) if t.purpose == "eval"} == {0, 6}


def test_a_restarted_coordinator_starts_no_group_twice_and_forgets_none(cluster: Cluster) -> None:
    with running(work(cluster, "w0")), running(work(cluster, "w1")):
        cluster.begin()
        for round_ in range(3):
            with running(coordinate(cluster)):
                cluster.until(
                    lambda: len(cluster.state.complete_groups()) >= 4, f"a batch in round {round_}"
                )
            cluster.train_step()
            cluster.until(lambda r=round_: cluster.state.newest == r + 1, "the step")
        with running(coordinate(cluster)):
            cluster.until(lambda: len(cluster.state.complete_groups()) >= 8, "a full window")
    check_log(cluster)
    assert len(cluster.state.complete_groups()) == 8


def test_a_second_coordinator_fences_the_first(cluster: Cluster) -> None:
    cluster.begin()
    ended = threading.Event()

    def first(stop: threading.Event) -> None:
        try:
            coordinate(cluster)(stop)
        finally:
            ended.set()

    fenced = pytest.raises(FencedError, match="coordinator")
    with running(work(cluster, "w0")), fenced, running(first):
        cluster.until(lambda: cluster.state.complete_groups(), "a first group")
        with running(coordinate(cluster)):
            cluster.until(lambda: len(cluster.state.complete_groups()) >= 4, "a batch")
            cluster.train_step()
            # the first one learns of it with its next decision, which a new version calls for
            cluster.until(ended.is_set, "the first one to end")
            cluster.until(lambda: len(cluster.state.complete_groups()) >= 8, "a full window")
    check_log(cluster)


def test_what_a_lost_worker_held_is_generated_by_another_as_a_new_attempt(
    cluster: Cluster,
) -> None:
    class Frozen(EmulatedEngine):
        """Takes requests and never answers."""

        def step(self) -> list[Delta]:
            return []

    def frozen() -> Engine:
        return Frozen(
            EmulatedSpec(EmulatedSection(load_seconds=0)),
            vocabulary=40,
            capacity=8,
            max_model_len=64,
        )

    cluster.begin()
    with running(coordinate(cluster)):
        with running(work(cluster, "w0", engine=frozen)):
            cluster.until(
                lambda: [s for s in cluster.all(Status) if s.process == "w0" and s.running],
                "the first worker to take work",
            )
        with running(work(cluster, "w1")):
            cluster.until(lambda: len(cluster.state.complete_groups()) >= 8, "a full window")
    check_log(cluster)
    attempts = {t.attempt for t in cluster.all(Trajectory)}
    assert 1 in attempts, "what the first worker held was started again"
    assert {t.worker for t in cluster.all(Trajectory)} == {"w1"}


def test_a_failed_request_sets_its_group_aside_and_nothing_else(cluster: Cluster) -> None:
    class Choosy(EmulatedEngine):
        """Cannot generate g1/0."""

        def __init__(self) -> None:
            super().__init__(
                EmulatedSpec(EmulatedSection(load_seconds=0, time_scale=0, length_mean=5)),
                vocabulary=40, capacity=8, max_model_len=64,
            )  # fmt: skip
            self.told: list[Delta] = []

        def add(self, request: Request) -> None:
            if request.request_id == "g1/0":
                self.told.append(Delta("g1/0", finish_reason="error", error="NaN logits"))
            else:
                super().add(request)

        def step(self) -> list[Delta]:
            told, self.told = self.told, []
            return told + super().step()

    cluster.begin()
    with running(coordinate(cluster)), running(work(cluster, "w0", engine=Choosy)):
        cluster.until(lambda: len(cluster.state.complete_groups()) >= 8, "a full window")
    check_failed = [g for g in cluster.state.complete_groups() if g.failure]
    assert [g.group_id for g in check_failed] == ["g1"]
    assert "NaN logits" in (check_failed[0].failure or "")
    letters = cluster.all(DeadLetter)
    assert [(d.code, d.trajectory_id) for d in letters] == [("generation_failed", "g1/0")]


def test_a_verifier_failure_goes_to_dead_letters_with_its_reason(cluster: Cluster) -> None:
    class Failing(EmulatedScorer):
        def poll(self) -> list[Scored]:
            return [
                replace(s, reward=None, error_code="verifier_raised", error="ValueError: no")
                if s.key == "g0/1"
                else s
                for s in super().poll()
            ]

    cluster.begin()
    with running(coordinate(cluster)), running(work(cluster, "w0", scorer=Failing(0.5))):
        cluster.until(lambda: len(cluster.state.complete_groups()) >= 8, "a full window")
        cluster.until(lambda: cluster.all(DeadLetter), "the dead letter")
    failed = [g for g in cluster.state.complete_groups() if g.failure]
    assert [g.group_id for g in failed] == ["g0"]
    assert [d.code for d in cluster.all(DeadLetter)] == ["verifier_raised"]


def test_a_worker_id_in_use_is_refused_and_a_free_one_is_not(cluster: Cluster) -> None:
    run = cluster.config.run.name
    with running(work(cluster, "w0")):
        cluster.until(lambda: cluster.all(Status), "the first worker to speak")
        with pytest.raises(RunError, match="worker id w0 is in use by process"):
            wait_for_free_ids(cluster.settings, run, ["w0"], heartbeat_seconds=0.5)
        wait_for_free_ids(cluster.settings, run, ["w1"], heartbeat_seconds=0.5)
    wait_for_free_ids(cluster.settings, run, ["w0"], heartbeat_seconds=0.5)


def test_the_id_of_a_worker_that_died_without_a_word_comes_free(cluster: Cluster) -> None:
    writer = LogWriter(cluster.settings, client_id="dead")
    run = cluster.config.run.name
    writer.send(cluster.topics.workers, Status(run, "w0", "rollout", "dead", "ready", 0), key="w0")
    writer.close()
    wait_for_free_ids(cluster.settings, run, ["w0"], heartbeat_seconds=0.2)


def test_a_coordinator_with_another_configuration_is_refused(cluster: Cluster) -> None:
    cluster.begin()
    changed = cluster.config.model_copy(
        update={"window": cluster.config.window.model_copy(update={"groups_per_step": 2})}
    )
    with pytest.raises(RunError, match=r"groups_per_step: recorded 4, given 2"):
        Coordinator(changed, cluster.settings).run(threading.Event())


def test_a_start_for_another_version_than_the_hosted_one_is_refused(cluster: Cluster) -> None:
    cluster.begin()
    with running(work(cluster, "w0")):
        cluster.until(lambda: cluster.all(Status), "the worker to speak")
        status = cluster.all(Status)[-1]
        assert isinstance(status, Status)
        writer = LogWriter(cluster.settings, client_id="test")
        writer.send(
            cluster.topics.dispatch,
            Command(
                cluster.config.run.name, "w0", status.incarnation, "start", 0,
                trajectory_id="g0/0", group_id="g0", policy_version=7, ordinal=0,
            ),
            key="w0",
            partition=worker_partition("w0", cluster.config.kafka.dispatch_partitions),
        )  # fmt: skip
        writer.close()
        cluster.until(lambda: cluster.all(DeadLetter), "the refusal")
    assert [d.code for d in cluster.all(DeadLetter)] == ["wrong_version"]
