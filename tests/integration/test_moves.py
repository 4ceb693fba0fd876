"""Work that moves between workers, and the schedules dora is compared with (real Kafka, emulated
workers, the real coordinator; the test plays the trainer)."""

import pytest

from dora.config import Config
from dora.consumers.audit import audit_run
from dora.core.audit.report import AuditReport
from dora.core.window import Blocked, pick_batch
from dora.schemas.records import Admission, Chunk, Command, Status, Trajectory
from tests.played_trainer import Cluster, check_log, coordinate, running, work

ROUNDS = 4


@pytest.fixture
def config(config: Config) -> Config:
    """A run whose responses differ much in length, and whose balance is looked at often."""
    emulated = config.rollout.emulated.model_copy(
        update={"length_sigma": 1.2, "iteration_seconds": 0.2}
    )
    rollout = config.rollout.model_copy(update={"emulated": emulated, "max_new_tokens": 56})
    schedule = config.schedule.model_copy(update={"rebalance_seconds": 0.2})
    evaluation = config.evaluation.model_copy(update={"prompts": 0})
    trainer = config.trainer.model_copy(update={"steps": 30})
    window = config.window.model_copy(update={"max_staleness": 2, "groups_per_step": 8})
    return config.model_copy(
        update={
            "rollout": rollout, "schedule": schedule, "evaluation": evaluation, "trainer": trainer,
            "window": window,
        }
    )  # fmt: skip


def scheduled(cluster: Cluster, **changes: object) -> None:
    schedule = cluster.config.schedule.model_copy(update=changes)
    cluster.config = cluster.config.model_copy(update={"schedule": schedule})


def train(cluster: Cluster, rounds: int = ROUNDS) -> None:
    state = cluster.state

    def allowed() -> bool:
        finished = [group.candidate for group in state.complete_groups()]
        picked = pick_batch(state.window, max(state.newest, 0), finished, state.outstanding)
        return not isinstance(picked, Blocked)

    for _ in range(rounds):
        cluster.until(allowed, "a batch")
        version = max(cluster.state.newest, 0)
        cluster.train_step()
        cluster.until(lambda v=version: cluster.state.newest == v + 1, "the step")


def metric(cluster: Cluster, name: str) -> float:
    last = [s for s in cluster.all(Status) if isinstance(s, Status) and s.role == "coordinator"]
    return last[-1].metrics[name]


def audited(cluster: Cluster) -> AuditReport:
    return audit_run(cluster.settings, cluster.config.run.name)


def trajectories(cluster: Cluster) -> list[Trajectory]:
    return [t for t in cluster.all(Trajectory) if isinstance(t, Trajectory)]


def test_the_tail_of_an_old_version_is_gathered_and_every_token_of_it_kept(
    cluster: Cluster,
) -> None:
    cluster.begin()
    with (
        running(coordinate(cluster)),
        running(work(cluster, "w0")),
        running(work(cluster, "w1")),
        running(work(cluster, "w2")),
    ):
        for _ in range(20):
            train(cluster, 1)
            if metric(cluster, "migrations_total"):
                break
        assert metric(cluster, "migrations_total"), "nothing moved in 20 steps"
        moved = {
            c.trajectory_id: c.attempt
            for c in cluster.all(Command)
            if isinstance(c, Command) and c.kind == "move"
        }
        cluster.until(
            lambda: {t.trajectory_id for t in trajectories(cluster)} >= set(moved),
            "what moved to be finished",
        )
    check_log(cluster)
    assert not any(audited(cluster).violations.values()), audited(cluster).findings
    handed = {
        c.trajectory_id: c
        for topic, _, _, c in cluster.seen
        if topic == cluster.topics.handovers and isinstance(c, Chunk)
    }
    resumed = [t for t in trajectories(cluster) if t.resumed_tokens and t.trajectory_id in handed]
    assert resumed, "what was handed over was resumed elsewhere"
    for trajectory in resumed:
        handover = handed[trajectory.trajectory_id]
        if trajectory.attempt == handover.attempt + 1:
            assert handover.token_ids in trajectory.token_ids
    assert any(t.worker != handed[t.trajectory_id].worker for t in resumed)


def test_partial_goes_on_across_versions_and_breaks_nothing_but_c1(cluster: Cluster) -> None:
    scheduled(cluster, kind="partial")
    cluster.begin()
    with (
        running(coordinate(cluster)),
        running(work(cluster, "w0")),
        running(work(cluster, "w1")),
    ):
        train(cluster)
    mixed = [t for t in trajectories(cluster) if len(t.version_runs) > 1]
    assert mixed, "some trajectory was interrupted by a new version"
    violations = audited(cluster).violations
    assert violations["mixed_version"] >= len(mixed)
    assert {kind for kind, count in violations.items() if count} == {"mixed_version"}


def test_one_step_off_starts_a_batch_only_when_the_last_one_is_finished(cluster: Cluster) -> None:
    scheduled(cluster, kind="one-step-off")
    cluster.begin()
    with (
        running(coordinate(cluster)),
        running(work(cluster, "w0")),
        running(work(cluster, "w1")),
    ):
        train(cluster)
    size = cluster.config.window.groups_per_step
    admitted = [a for a in cluster.all(Admission) if isinstance(a, Admission)]
    by_version: dict[int, int] = {}
    for admission in admitted:
        by_version[admission.policy_version] = by_version.get(admission.policy_version, 0) + 1
    assert by_version[0] == 2 * size, "one to train, and one while it is trained"
    assert all(count <= size for version, count in by_version.items() if version)
    assert not any(audited(cluster).violations.values())
