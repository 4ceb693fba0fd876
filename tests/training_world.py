"""One training run on a real Kafka, where a thread plays coordinator and workers."""

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora.bus.reader import BEGINNING, LogReader
from dora.bus.settings import ClusterSettings, cluster_settings
from dora.bus.topics import RunTopics, TopicAdmin, topic_plan
from dora.bus.writer import LogWriter
from dora.config import Config, KafkaSection
from dora.consumers.trainer.trainer import Trainer
from dora.core import ring
from dora.core.state import RunState
from dora.core.window import Window
from dora.schemas.records import (
    Admission,
    Record,
    RunStarted,
    Step,
    Trajectory,
)
from tests import factories
from tests.brokers import Cluster
from tests.integration.test_learner import VOCABULARY, make_model

K, B, G = 1, 2, 2
Rewards = Callable[[int, int], float | None]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items())
        return "{" + inside + "}"
    return json.dumps(value)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@dataclass(frozen=True, slots=True)
class World:
    """One run on the test's Kafka."""

    settings: ClusterSettings
    name: str
    model: Path
    directory: Path
    topics: RunTopics = field(init=False)
    started: list[int] = field(default_factory=list)
    """Process groups that must not outlive the test."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "topics", RunTopics(self.name))

    def config(self, steps: int = 3, loss: Any = None, **trainer: Any) -> Config:
        return Config.model_validate(
            {
                "run": {"name": self.name, "directory": str(self.directory), "seed": 3},
                "policy": {"model": str(self.model)},
                "task": {"kind": "reasoning-gym", "name": "x", "max_prompt_tokens": 8},
                "window": {"max_staleness": K, "groups_per_step": B, "group_size": G},
                "rollout": {"max_new_tokens": 8},
                "kafka": {"bootstrap_servers": self.settings.bootstrap_servers},
                "trainer": {
                    "steps": steps,
                    "batch_timeout_seconds": 60,
                    "optimizer": {"learning_rate": 1e-3},
                    "loss": loss or {},
                    **trainer,
                },
            }
        )

    def emulated(self, steps: int = 3, **trainer: Any) -> Config:
        """A trainer that starts in a tenth of the time: what it commits, it commits as the real
        one."""
        given = self.config(steps, **trainer).model_dump()
        given["trainer"]["engine"] = "emulated"
        given["rollout"] |= {"engine": "emulated", "emulated": {"time_scale": 0.001}}
        return Config.model_validate(given)

    def start(
        self, config: Config, *options: str, fault: str | None = None
    ) -> "subprocess.Popen[bytes]":
        """`dora train` with `options` in a process of its own, which appends what it says to
        `log`."""
        sections = config.model_dump(mode="json", exclude_defaults=True, exclude={"home"})
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "run.toml"
        path.write_text("".join(f"{name} = {_toml(part)}\n" for name, part in sections.items()))
        # what training in this process has set would make the new one a rank of it
        own = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        environment = {**own, "OMP_NUM_THREADS": "1"}
        if fault is not None:
            environment["DORA_FAULT"] = fault
        with self.log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "dora", "train", *options, str(path)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.started.append(process.pid)
        return process

    @property
    def log(self) -> Path:
        """What the processes said."""
        return self.directory / "train.log"

    def train(self, config: Config) -> None:
        Trainer(config, self.settings).run(threading.Event())

    def read(self, topic: str, partitions: int = 1) -> list[Record]:
        reader = LogReader(self.settings, client_id="test")
        reader.assign({(topic, p): BEGINNING for p in range(partitions)})
        try:
            return [m.value for m in reader.read_to_end(30.0)]  # type: ignore[misc]
        finally:
            reader.close()

    def steps(self) -> list[Step]:
        return [r for r in self.read(self.topics.steps) if isinstance(r, Step)]


@pytest.fixture
def world(settings: ClusterSettings, run_name: str, model: Path, tmp_path: Path) -> Iterator[World]:
    world = World(settings, run_name, model, tmp_path / "runs")
    TopicAdmin(settings).create(topic_plan(world.config()))
    yield world
    for group in world.started:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


@pytest.fixture(scope="session")
def trained(kafka: Cluster, model: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A run of four steps, with checkpoints of versions 2 and 4, for tests that read it; those that
    remove something of it put it back."""
    settings = cluster_settings(KafkaSection(bootstrap_servers=kafka.bootstrap_servers))
    name = f"trained-{uuid.uuid4().hex[:8]}"
    world = World(settings, name, model, tmp_path_factory.mktemp("trained"))
    config = world.config(steps=4, checkpoint_every=2)
    kept = config.weights.model_copy(update={"keep": 8})
    config = config.model_copy(update={"weights": kept})
    with TopicAdmin(settings) as admin:
        admin.create(topic_plan(config))
    # the first group fails, so that the ledger names one that was not trained
    with fed(world, rewards=lambda ordinal, sample: float(sample) if ordinal else None):
        world.train(config)
    assert any(step.set_aside for step in world.steps())
    return world


def trajectory(
    run: str, version: int, ordinal: int, sample: int, reward: float | None
) -> Trajectory:
    """One of the tiny model's tokens: a prompt of the group, a response that differs from sample to
    sample."""
    prompt = np.random.default_rng([ordinal]).integers(0, VOCABULARY, 3)
    random = np.random.default_rng([ordinal, sample])
    tokens = random.integers(0, VOCABULARY, int(random.integers(1, 8)))
    return factories.trajectory(
        factories.admission(ordinal, version, run), sample,
        prompt=prompt, tokens=tokens, logprob=-3.5, reward=reward, text=None,
    )  # fmt: skip


class Feeder(threading.Thread):
    """Admits groups as the window allows and finishes their trajectories at once."""

    def __init__(self, world: World, rewards: Rewards, most: int | None = None) -> None:
        super().__init__(daemon=True)
        self._world = world
        self._rewards = rewards
        self._most = most
        self._ended = threading.Event()
        self._state = RunState(Window(K, B), G)
        self._reader = LogReader(world.settings, client_id="feeder")
        self._writer = LogWriter(world.settings, client_id="feeder")
        self.failure: BaseException | None = None

    def run(self) -> None:
        topics = self._world.topics
        try:
            self._reader.assign({(topics.steps, 0): BEGINNING, (topics.dispatch, 0): BEGINNING})
            for message in self._reader.read_to_end(30.0):
                self._apply(message.value)
            while not self._ended.is_set():
                while self._may_admit():
                    self._admit()
                for message in self._reader.poll(timeout=0.05):
                    if isinstance(message.value, RunStarted | Step):
                        self._apply(message.value)
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self._reader.close()
            self._writer.close()

    def _apply(self, value: Any) -> None:
        if isinstance(value, RunStarted):
            self._state.start()
        elif isinstance(value, Step):
            self._state.commit(value)
        elif isinstance(value, Admission):
            self._state.admit(value)

    def _may_admit(self) -> bool:
        state = self._state
        if self._most is not None and state.next_ordinal >= self._most:
            return False
        return state.newest >= 0 and state.window.admits(state.outstanding_total)

    def _admit(self) -> None:
        world, ordinal, version = self._world, self._state.next_ordinal, self._state.newest
        group = ring.train_group_id(ordinal)
        admission = Admission(world.name, group, ordinal, version, G, "train", 0)
        self._writer.send(world.topics.dispatch, admission, partition=0)
        self._state.admit(admission)
        for sample in range(G):
            self._writer.send(
                world.topics.trajectories,
                trajectory(world.name, version, ordinal, sample, self._rewards(ordinal, sample)),
                partition=ring.partition(version, group, K + 2, 1),
            )

    def end(self) -> None:
        self._ended.set()
        self.join(30.0)


@contextmanager
def fed(
    world: World, rewards: Rewards = lambda ordinal, sample: float(sample), most: int | None = None
) -> Iterator[Feeder]:
    feeder = Feeder(world, rewards, most)
    feeder.start()
    try:
        yield feeder
    finally:
        feeder.end()
        assert feeder.failure is None
