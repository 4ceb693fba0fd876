"""A run without a trainer: coordinator and emulated workers in threads, real Kafka, and a test that
plays the trainer by writing ledger and policies."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dora.bus.reader import LogReader
from dora.bus.settings import ClusterSettings, cluster_settings
from dora.bus.topics import RunTopics, TopicAdmin, topic_plan
from dora.bus.transactions import TransactionalWriter
from dora.bus.writer import LogWriter
from dora.config import Config, window_of
from dora.core.ring import slot, slot_partitions
from dora.core.state import RunState, finished_facts
from dora.producers.coordinator.coordinator import Coordinator
from dora.producers.engines import Engine, create_engine
from dora.producers.tasks.base import Prompt, Task
from dora.producers.worker import process
from dora.producers.worker.hosting import Installer
from dora.producers.worker.scoring import EmulatedScorer
from dora.producers.worker.worker import Worker
from dora.schemas.records import (
    Admission,
    Chunk,
    DeadLetter,
    GroupRef,
    Policy,
    Purpose,
    Record,
    RunStarted,
    SampleRef,
    SlotOffset,
    Status,
    Step,
    Trajectory,
)
from dora.weights.store import WeightStore

DEADLINE = 30.0
VOCABULARY = 40
STOP = 39


class CountingTask(Task):
    """Prompts that are their ordinal."""

    def _prompt(self, ordinal: int, purpose: Purpose) -> Prompt:
        return Prompt(ordinal, str(ordinal), (1, 2, ordinal % 10), {"ordinal": ordinal})


class PlainTokenizer:
    """Text is the token ids."""

    def decode(self, token_ids: list[int], *, special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))


class Cluster:
    """A run's topics, and what a test wants to know and say on them."""

    def __init__(self, config: Config, tmp: Path) -> None:
        self.config = config
        self.tmp = tmp
        (tmp / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
        self.settings: ClusterSettings = cluster_settings(config.kafka)
        self.topics = RunTopics(config.run.name)
        admin = TopicAdmin(self.settings)
        admin.create(topic_plan(config))
        admin.close()
        self.trainer = TransactionalWriter(
            self.settings, f"{config.run.name}.trainer", client_id="trainer",
            transaction_timeout=30,
        )  # fmt: skip
        self.reader = LogReader(self.settings, client_id="test")
        plan = {spec.name: spec.partitions for spec in topic_plan(config)}
        self.reader.assign({(name, p): -2 for name, count in plan.items() for p in range(count)})
        self.seen: list[tuple[str, int, int, Record]] = []
        self.state = RunState(
            window_of(config),
            config.window.group_size,
        )
        self.sequence = 0

    def all(self, kind: type[Record]) -> list[Record]:
        return [record for *_, record in self.seen if isinstance(record, kind)]

    def read(self, *, to_end: bool = False) -> None:
        arrived = self.reader.read_to_end(DEADLINE) if to_end else self.reader.poll(timeout=0.05)
        for message in arrived:
            value = message.value
            assert not hasattr(value, "payload") or isinstance(value, DeadLetter)
            self.seen.append((message.topic, message.partition, message.offset, value))
            match value:
                case Admission():
                    self.state.admit(value)
                case Trajectory():
                    self.state.finish(finished_facts(value, message.partition, message.offset))
                case Step():
                    self.state.commit(value)

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline, f"waited {DEADLINE} s for {what}\n{self.story()}"
            self.read()

    def story(self) -> str:
        """What a person needs to see to understand a wait."""
        latest = {s.process: s for s in self.all(Status) if isinstance(s, Status)}
        return "\n".join(
            [
                f"newest {self.state.newest}, outstanding {dict(self.state.outstanding)}, "
                f"complete {len(self.state.complete_groups())}",
                *(
                    f"{g.group_id} v{g.version} misses {missing}"
                    for g, missing in self.state.unfinished()
                ),
                *(
                    f"{s.process} {s.state} v{s.version} {s.running} {s.message} {s.metrics}"
                    for s in latest.values()
                ),
            ]
        )

    def policy(self, version: int) -> Policy:
        window, lanes = self.config.window, self.config.kafka.lanes
        places = [
            (topic, index)
            for topic in (self.topics.chunks, self.topics.trajectories)
            for index in slot_partitions(version, window.ring, lanes)
        ]
        dispatch = range(self.config.kafka.dispatch_partitions)
        places += [(self.topics.dispatch, i) for i in dispatch] + [(self.topics.steps, 0)]
        slots = tuple(
            SlotOffset(topic, index, offset)
            for (topic, index), offset in self.reader.end_offsets(places).items()
        )
        return Policy(
            self.config.run.name, version, "full", f"file:///store/v{version}", (), "c",
            b"\x01\0\0\0\x02\0\0\0", b"\0\0\0\0", slots, 0,
        )  # fmt: skip

    def begin(self) -> None:
        config = self.config
        started = RunStarted(
            config.run.name, "id", "0", json.dumps(config.identity()),
            config.window.max_staleness, config.window.groups_per_step, config.window.group_size,
            config.window.ring, config.kafka.lanes, "cluster", {}, 0,
        )  # fmt: skip
        with self.trainer.transaction() as transaction:
            transaction.send(self.topics.steps, started, key="ledger")
            transaction.send(self.topics.policies, self.policy(0), key="0")

    def train_step(self) -> None:
        """Commits a step with the oldest complete groups."""
        batch = self.state.complete_groups()[: self.config.window.groups_per_step]
        refs = tuple(
            GroupRef(
                g.group_id, g.ordinal, g.version,
                tuple(
                    SampleRef(s, g.samples[s].attempt, g.samples[s].partition, g.samples[s].offset)
                    for s in sorted(g.samples)
                ),
            )
            for g in batch
        )  # fmt: skip
        version = max(self.state.newest, 0)
        step = Step(
            self.config.run.name, "step", self.sequence, version, version + 1, refs, (), {}, "c",
            None, "trainer", 0,
        )  # fmt: skip
        self.sequence += 1
        with self.trainer.transaction() as transaction:
            transaction.send(self.topics.steps, step, key="ledger")
            transaction.send(self.topics.policies, self.policy(version + 1), key=str(version + 1))

    def close(self) -> None:
        self.reader.close()
        self.trainer.close()


class LocalStore(WeightStore):
    """A directory with a vocabulary and no weights, which is all that the emulated engine reads."""

    def fetch(self, policy: Policy, cache: Path) -> Path:
        return cache


@contextmanager
def running(target: Callable[[threading.Event], None]) -> Iterator[threading.Event]:
    """Runs `target(stop)` in a thread; its error, if any, is raised at the end."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            target(stop)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(DEADLINE)
        # what a part died of explains more than what the test missed
        if errors:
            raise errors[0]
    assert not thread.is_alive()


def worker(
    cluster: Cluster,
    name: str,
    stop: threading.Event,
    *,
    engine: Callable[[], Engine] | None = None,
    scorer=None,
    **options,
) -> None:
    """Run a worker of the cluster until `stop` is set."""
    config = cluster.config
    engine = engine() if engine is not None else create_engine(config, name)
    installer = Installer(
        engine, LocalStore(str(cluster.tmp)), cluster.tmp, tolerance=float("inf"),
        clock=time.monotonic,
    )  # fmt: skip

    def make(name: str, writer: LogWriter, catch_up: Callable[[], None]) -> Worker:
        return Worker(
            config, writer, name, engine=engine, installer=installer,
            task=CountingTask("counting"), tokenizer=PlainTokenizer(),
            scorer=scorer or EmulatedScorer(0.5), stop_token_ids=(STOP,), catch_up=catch_up,
            **options,
        )  # fmt: skip

    process.work(cluster.settings, [name], make, stop, flush_seconds=DEADLINE)


@pytest.fixture
def config(kafka, run_name: str) -> Config:
    return Config.model_validate(
        {
            "run": {"name": run_name},
            "policy": {"model": "none"},
            "task": {"kind": "reasoning-gym", "name": "spell_backward", "max_prompt_tokens": 8},
            "window": {"max_staleness": 1, "groups_per_step": 4, "group_size": 2},
            "trainer": {"steps": 6},
            "rollout": {
                "engine": "emulated", "capacity": 8, "max_new_tokens": 32, "chunk_tokens": 4,
                "heartbeat_seconds": 0.2, "heartbeat_timeout_seconds": 2.0,
                "emulated": {"time_scale": 0.05, "length_mean": 12, "load_seconds": 0.1},
            },
            "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
            "evaluation": {"prompts": 5},
        }
    )  # fmt: skip


@pytest.fixture
def cluster(config: Config, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(config, tmp_path)
    yield made
    made.close()


def coordinate(cluster: Cluster) -> Callable[[threading.Event], None]:
    return lambda stop: Coordinator(cluster.config, cluster.settings).run(stop)


def work(cluster: Cluster, name: str, **kwargs: object) -> Callable[[threading.Event], None]:
    return lambda stop: worker(cluster, name, stop, **kwargs)


def check_log(cluster: Cluster) -> None:
    """What must hold of any log that coordinator and workers wrote."""
    cluster.read(to_end=True)
    config = cluster.config
    admissions = cluster.all(Admission)
    ordinals = [a.ordinal for a in admissions if a.purpose == "train"]
    assert ordinals == list(range(len(ordinals))), "prompts are neither skipped nor repeated"
    versions = [a.policy_version for a in admissions]
    assert versions == sorted(versions)
    by_group = {a.group_id: a for a in admissions}
    chunks: dict[tuple[str, int], list[Chunk]] = {}
    for topic, part, _, record in cluster.seen:
        if topic == cluster.topics.handovers:
            continue
        if isinstance(record, Chunk | Trajectory):
            assert record.policy_version == by_group[record.group_id].policy_version
            assert part // config.kafka.lanes == slot(record.policy_version, config.window.ring)
        if isinstance(record, Chunk):
            chunks.setdefault((record.trajectory_id, record.attempt), []).append(record)
            assert topic == cluster.topics.chunks
    for record in cluster.all(Trajectory):
        parts = chunks[(record.trajectory_id, record.attempt)]
        assert [c.sequence for c in parts] == list(range(record.chunks))
        generated = b"".join(c.token_ids for c in parts)
        resumed = generated[: 4 * record.resumed_tokens]
        assert [c.resumed_tokens for c in parts if c.resumed_tokens] == [record.resumed_tokens] * (
            record.resumed_tokens > 0
        )
        assert not resumed or any(
            b"".join(c.token_ids for c in others).startswith(resumed)
            for (identity, attempt), others in chunks.items()
            if identity == record.trajectory_id and attempt != record.attempt
        )
        assert record.token_ids.endswith(generated) and len(generated) == 4 * len(
            record.mask.strip(b"\0")
        )
