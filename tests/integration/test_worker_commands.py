"""What a worker does when it is told to move, pause or change versions while it generates (real
Kafka, emulated engine; the test plays trainer and coordinator)."""

from dora.bus.writer import LogWriter
from dora.config import Config
from dora.config.emulation import EmulatedSection
from dora.core.ring import worker_partition
from dora.producers.engines import Engine
from dora.producers.engines.emulated import EmulatedEngine, EmulatedSpec
from dora.schemas.records import (
    Chunk,
    Command,
    CommandKind,
    Status,
    Trajectory,
    VersionRun,
    pack_logprobs,
    pack_tokens,
    unpack_tokens,
)
from tests.played_trainer import Cluster, running, work


def slow() -> Engine:
    spec = EmulatedSpec(
        EmulatedSection(iteration_seconds=0.05, load_seconds=0, length="fixed", length_mean=24)
    )
    return EmulatedEngine(spec, vocabulary=40, capacity=8, max_model_len=64)


class Commander:
    """Sends commands to the worker w0 of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        cluster.until(lambda: cluster.all(Status), "the worker to speak")
        self.writer = LogWriter(cluster.settings, client_id="test")

    @property
    def status(self) -> Status:
        last = self.cluster.all(Status)[-1]
        assert isinstance(last, Status)
        return last

    def say(self, kind: CommandKind, **fields: object) -> None:
        run, partitions = self.cluster.config.run.name, self.cluster.config.kafka
        command = Command(run, "w0", self.status.incarnation, kind, 0, **fields)  # type: ignore[arg-type]
        place = worker_partition("w0", partitions.dispatch_partitions)
        self.writer.send(self.cluster.topics.dispatch, command, key="w0", partition=place)
        self.writer.flush(10)

    def start(self, group: str, version: int, **fields: object) -> None:
        self.say(
            "start", trajectory_id=f"{group}/0", group_id=group, policy_version=version, ordinal=0,
            **fields,
        )  # fmt: skip

    def load(self, version: int) -> None:
        self.say("switch", policy_version=version)
        self.cluster.until(
            lambda: self.status.version == version and self.status.loading == -1,
            f"version {version} to be hosted",
        )


def chunks(cluster: Cluster, topic: str) -> list[Chunk]:
    return [r for name, _, _, r in cluster.seen if name == topic and isinstance(r, Chunk)]


def trajectories(cluster: Cluster) -> list[Trajectory]:
    return [t for t in cluster.all(Trajectory) if isinstance(t, Trajectory)]


def test_an_attempt_that_moves_is_handed_over_whole_after_its_last_chunk(cluster: Cluster) -> None:
    cluster.begin()
    with running(work(cluster, "w0", engine=slow)):
        told = Commander(cluster)
        told.load(0)
        told.start("g0", 0)
        written = cluster.topics.chunks
        cluster.until(lambda: chunks(cluster, written), "a chunk")
        told.say("move", trajectory_id="g0/0", attempt=0)
        handed = cluster.topics.handovers
        cluster.until(lambda: chunks(cluster, handed), "the handover")
        cluster.until(lambda: chunks(cluster, written)[-1].last, "the last chunk")
        cluster.until(lambda: told.status.command_offset >= 2, "the command to be confirmed")
        assert told.status.running == ()
    (handover,) = chunks(cluster, handed)
    left = chunks(cluster, written)
    assert handover.position == 0 and handover.attempt == 0
    assert handover.token_ids == b"".join(chunk.token_ids for chunk in left)
    assert handover.logprobs == b"".join(chunk.logprobs for chunk in left)
    assert not trajectories(cluster)


def test_a_paused_worker_generates_nothing_until_the_next_version_is_there(
    cluster: Cluster,
) -> None:
    cluster.begin()
    with running(work(cluster, "w0", engine=slow)):
        told = Commander(cluster)
        told.load(0)
        told.say("pause")
        told.start("g0", 0)
        before = len(cluster.all(Status))
        cluster.until(lambda: len(cluster.all(Status)) > before + 4, "some heartbeats")
        assert told.status.running == ("g0/0#0",)
        assert not chunks(cluster, cluster.topics.chunks)


def test_under_partial_an_attempt_goes_on_with_the_next_version_and_says_so(
    config: Config, cluster: Cluster
) -> None:
    schedule = config.schedule.model_copy(update={"kind": "partial"})
    cluster.config = config.model_copy(update={"schedule": schedule})
    cluster.begin()
    with running(work(cluster, "w0", engine=slow)):
        told = Commander(cluster)
        told.load(0)
        told.start("g0", 0)
        prefix = {
            "prefix_token_ids": pack_tokens([1, 2, 3]),
            "prefix_logprobs": pack_logprobs([-1.0, -1.0, -1.0]),
        }
        cluster.until(lambda: chunks(cluster, cluster.topics.chunks), "a chunk")
        cluster.train_step()
        told.load(1)
        told.start("g1", 0, attempt=1, prefix_runs=(VersionRun(0, 3),), **prefix)
        cluster.until(lambda: len(trajectories(cluster)) == 2, "both trajectories")
    found = {t.group_id: t for t in trajectories(cluster)}
    assert [run.version for run in found["g0"].version_runs] == [0, 1]
    assert found["g0"].policy_version == 0 and found["g0"].generated_tokens == 24
    assert found["g1"].version_runs == (VersionRun(0, 3), VersionRun(1, 21))
    for group, trajectory in found.items():
        parts = [c for c in chunks(cluster, cluster.topics.chunks) if c.group_id == group]
        generated = unpack_tokens(trajectory.token_ids)[-24:].tolist()
        assert [t for c in parts for t in unpack_tokens(c.token_ids).tolist()] == generated
        tokens = dict.fromkeys((0, 1), 0)
        for chunk in parts:
            tokens[chunk.policy_version] += len(chunk.token_ids) // 4
        assert tuple(VersionRun(v, n) for v, n in tokens.items()) == trajectory.version_runs
        assert sum(chunk.resumed_tokens for chunk in parts) == trajectory.resumed_tokens
