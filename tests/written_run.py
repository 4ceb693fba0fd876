"""The log of a small run, written record by record on a real Kafka: two attempts at a trajectory,
groups trained, set aside and outstanding, an evaluation, and records that do not belong there."""

import json
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from dora.bus import ClusterSettings, LogWriter, RunTopics, TopicAdmin, cluster_settings, topic_plan
from dora.config import Config, KafkaSection
from dora.core import ring
from dora.schemas.records import (
    Admission,
    Chunk,
    Command,
    DeadLetter,
    GroupRef,
    Policy,
    Step,
    Trajectory,
    pack_logprobs,
    pack_tokens,
)
from tests import factories
from tests.brokers import Cluster
from tests.factories import RING, B, G, K
from tests.log_writer import DEADLINE, RunLogWriter

STEPS = 3
TAKEN_OVER = "g1/0"
"""A trajectory whose first worker was lost."""
SET_ASIDE, OUTSTANDING, UNFINISHED, EVALUATED = "g6", "g7", "g8", "e1-0"
PROMPT = (2, 3, 4)


@dataclass(frozen=True, slots=True)
class WrittenRun:
    """Where the run is."""

    settings: ClusterSettings
    topics: RunTopics

    @property
    def run(self) -> str:
        """Its name."""
        return self.topics.run

    def delete(self, topic: str, partition: int, before: int) -> None:
        """Let the partition begin at `before`, as retention does (DeleteRecords, KIP-107)."""
        admin = AdminClient({"bootstrap.servers": self.settings.bootstrap_servers})
        found = admin.delete_records([TopicPartition(topic, partition, before)])
        for future in found.values():
            assert future.result(DEADLINE).low_watermark == before


def config_of(run: str, address: str, model: str) -> Config:
    """The configuration that the ledger records."""
    return Config.model_validate(
        {
            "run": {"name": run},
            "policy": {"model": model},
            "task": {"kind": "reasoning-gym", "name": "x", "max_prompt_tokens": 8},
            "window": {"max_staleness": K, "groups_per_step": B, "group_size": G},
            "kafka": {"bootstrap_servers": address},
            "rollout": {"max_new_tokens": 16},
            "trainer": {"steps": STEPS},
        }
    )


def response(ordinal: int, sample: int) -> list[int]:
    """The generated tokens of a trajectory; their number and values tell trajectories apart."""
    return [5 + (ordinal + sample + index) % 20 for index in range(4 + ordinal % 3 + 2 * sample)]


def reward_of(ordinal: int, sample: int) -> float:
    """Alternating between the samples of a group, and growing with the ordinal."""
    return float(sample) + ordinal / 100


def trajectory(group: Admission, sample: int, attempt: int = 0) -> Trajectory:
    """A finished trajectory; the second attempt resumes four tokens."""
    tokens = response(group.ordinal, sample)
    failed = group.group_id == SET_ASIDE and sample == 1
    reward = None if failed else reward_of(group.ordinal, sample)
    return factories.trajectory(
        group,
        sample,
        prompt=PROMPT,
        tokens=tokens,
        reward=reward,
        attempt=attempt,
        chunks=2,
        logprobs=pack_logprobs([0.0] * len(PROMPT) + logprobs_of(tokens)),
        finish_reason="error" if failed else "length" if sample else "stop",
        reward_parts={} if failed else {"right": float(sample), "style": group.ordinal / 100},
        text=f"text of {group.group_id}/{sample}",
        worker=f"w{attempt}",
        started_ms=at(group) + 10 + 100 * attempt,
        generated_ms=at(group) + 500,
        created_ms=at(group) + 520,
        resumed_tokens=4 if attempt else 0,
    )


def logprobs_of(tokens: list[int]) -> list[float]:
    """Falling from token to token."""
    return [-0.25 * (1 + index) for index in range(len(tokens))]


def at(group: Admission) -> int:
    """When the group was started, in ms."""
    return 1_000_000 + 10_000 * group.policy_version + 100 * (group.ordinal % 10)


def chunks_of(of: Trajectory) -> list[Chunk]:
    """Its attempt's chunks: four tokens and the rest; an attempt before it was lost after one."""
    end = of.generated_tokens

    def chunk(attempt: int, sequence: int, begin: int, end: int, **fields: object) -> Chunk:
        created = of.started_ms + 100 * (sequence + 1) - 100 * (of.attempt - attempt)
        return factories.chunk(
            of, sequence, begin, end,
            attempt=attempt, worker=f"w{attempt}", created_ms=created, **fields,
        )  # fmt: skip

    lost = [chunk(attempt, 0, 0, 4) for attempt in range(of.attempt)]
    first = chunk(of.attempt, 0, 0, 4, resumed_tokens=4 if of.attempt else 0)
    return [*lost, first, chunk(of.attempt, 1, 4, end, last=True)]


def command(group: Admission, sample: int, attempt: int = 0) -> Command:
    """The command to generate it; a second attempt goes on from the first one's tokens."""
    prefix = response(group.ordinal, sample)[: 4 * attempt]
    return factories.command(
        ring.trajectory_id(group.group_id, sample),
        f"w{attempt}",
        run=group.run,
        at=at(group) + 100 * attempt,
        attempt=attempt,
        policy_version=group.policy_version,
        ordinal=group.ordinal,
        prefix_token_ids=pack_tokens(prefix),
        prefix_logprobs=pack_logprobs(logprobs_of(prefix)),
    )


def admissions(run: str) -> list[Admission]:
    """Two groups a version, one of version 1 that evaluates it, and more of the last one."""
    plan = [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2), (7, 3), (8, 3)]
    groups = [Admission(run, f"g{o}", o, version, G, "train", 0) for o, version in plan]
    return [*groups[:4], Admission(run, EVALUATED, 0, 1, 1, "eval", 0), *groups[4:]]


class RunWriter:
    """Writes everything."""

    def __init__(self, settings: ClusterSettings, run: str, model: str) -> None:
        self._topics = RunTopics(run)
        self._settings = settings
        self._config = config_of(run, settings.bootstrap_servers, model)
        with TopicAdmin(settings) as admin:
            admin.create(topic_plan(self._config))

    def write(self) -> WrittenRun:
        """Everything, version by version."""
        run, config = self._topics.run, self._config
        identity, recorded = json.dumps(config.identity()), json.dumps(config.recorded())
        groups = admissions(run)
        with RunLogWriter(self._settings, run) as writer:
            writer.send(factories.run_started(run, identity=identity, config=recorded))
            for version in range(STEPS + 1):
                writer.send(self._policy(writer, version))
                for group in [g for g in groups if g.policy_version == version]:
                    writer.send(group)
                    for sample in range(group.group_size):
                        self._generate(writer, group, sample)
                if version < STEPS:
                    writer.send(self._step(writer, version, groups))
        return WrittenRun(self._settings, self._topics)

    def _policy(self, writer: RunLogWriter, version: int) -> Policy:
        topics, part = self._topics, ring.slot(version, RING)
        dispatch = [(topics.dispatch, index) for index in range(9)]
        slots = writer.slots([(topics.trajectories, part), (topics.chunks, part), *dispatch])
        where = f"file:///w/v{version:08d}-{version:016x}"
        return factories.policy(version, topics.run, slots, weights_uri=where)

    def _generate(self, writer: RunLogWriter, group: Admission, sample: int) -> None:
        attempts = 1 + (ring.trajectory_id(group.group_id, sample) == TAKEN_OVER)
        writer.send(*(command(group, sample, attempt) for attempt in range(attempts)))
        record = trajectory(group, sample, attempts - 1)
        if group.group_id == UNFINISHED:
            writer.send(chunks_of(record)[0])
        else:
            writer.send(*chunks_of(record), record)

    def _step(self, writer: RunLogWriter, version: int, groups: list[Admission]) -> Step:
        # g3 is trained one version late
        numbers = {0: ("g0", "g1"), 1: ("g2",), 2: ("g3", "g4", "g5")}[version]
        trained = [g for g in groups if g.group_id in numbers]
        aside = [
            factories.group_ref(g, writer.places, "verifier timed out")
            for g in groups
            if g.group_id == SET_ASIDE and version == STEPS - 1
        ]
        made = factories.step(version, version, trained, writer.places, aside=aside)
        return replace(made, trained=tuple(map(_second_attempt, made.trained)))


def _second_attempt(ref: GroupRef) -> GroupRef:
    """The trajectory that was taken over is the second attempt at it."""
    samples = (
        replace(each, attempt=int(ring.trajectory_id(ref.group_id, each.sample) == TAKEN_OVER))
        for each in ref.samples
    )
    return replace(ref, samples=tuple(samples))


def spoil(written: WrittenRun) -> None:
    """Add what does not belong there to partition 0 of the trajectories, and an attempt at a
    trajectory that is finished already."""
    topics = written.topics
    of_group = admissions(written.run)[0]
    good = trajectory(of_group, 0)
    others = [
        replace(good, reward=99.0, attempt=1),  # finished a second time
        replace(good, group_id="g99", trajectory_id="g99/0"),  # never started
        replace(good, sample=7, trajectory_id="g0/7"),  # more samples than its group has
        DeadLetter(written.run, "foreign", "is no trajectory", "test", 0),
    ]
    with LogWriter(written.settings, client_id="test") as writer:
        for record in others:
            writer.send(topics.trajectories, record, key="x", partition=0)
        writer.flush(DEADLINE)
    producer = Producer({"bootstrap.servers": written.settings.bootstrap_servers})
    producer.produce(topics.trajectories, b"no record", partition=0)
    assert producer.flush(DEADLINE) == 0


def write(kafka: Cluster, model: str = "model") -> WrittenRun:
    """A run of its own."""
    settings = cluster_settings(KafkaSection(bootstrap_servers=kafka.bootstrap_servers))
    return RunWriter(settings, f"written-{uuid.uuid4().hex[:8]}", model).write()


@pytest.fixture(scope="session")
def written(kafka: Cluster, small_model: Path) -> WrittenRun:
    """A run whose policy has a tokenizer of single characters; do not change it."""
    return write(kafka, str(small_model))
