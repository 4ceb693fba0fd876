"""The trainer on a real Kafka with real DeepSpeed; a thread plays coordinator and workers."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora.bus.reader import BEGINNING, LogReader
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics, TopicAdmin, topic_plan
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.consumers.trainer import Trainer
from dora.core import ring
from dora.core.state import RunState
from dora.core.window import Window
from dora.errors import DeadlineError, FencedError, RunError
from dora.schemas.records import (
    Admission,
    DeadLetter,
    Policy,
    Record,
    RunStarted,
    Sampling,
    Step,
    Trajectory,
    VersionRun,
    pack_logprobs,
    pack_tokens,
)
from dora.weights.store import WeightStore
from dora.weights.tensors import read_tensors, weights_checksum
from tests.integration.test_learner import VOCABULARY, make_model

K, B, G = 1, 2, 2
Rewards = Callable[[int, int], float | None]


@pytest.fixture(scope="module")
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
def world(settings: ClusterSettings, run_name: str, model: Path, tmp_path: Path) -> World:
    world = World(settings, run_name, model, tmp_path / "runs")
    TopicAdmin(settings).create(topic_plan(world.config()))
    return world


def trajectory(
    run: str, version: int, ordinal: int, sample: int, reward: float | None
) -> Trajectory:
    random = np.random.default_rng([ordinal, sample])
    prompt, generated = 3, int(random.integers(1, 8))
    group = ring.train_group_id(ordinal)
    return Trajectory(
        run=run,
        trajectory_id=ring.trajectory_id(group, sample),
        group_id=group,
        sample=sample,
        attempt=0,
        chunks=1,
        policy_version=version,
        ordinal=ordinal,
        purpose="train",
        token_ids=pack_tokens(random.integers(0, VOCABULARY, prompt + generated)),
        mask=b"\0" * prompt + b"\1" * generated,
        logprobs=pack_logprobs([0.0] * prompt + [-3.5] * generated),
        version_runs=(VersionRun(version, generated),),
        finish_reason="stop" if reward is not None else "error",
        reward=reward,
        reward_parts={},
        error=None if reward is not None else "verifier timed out",
        text=None,
        worker="w",
        engine="test",
        sampling=Sampling(1.0, 1.0, 0, 8, ()),
        started_ms=0,
        generated_ms=0,
        created_ms=0,
    )


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


def test_steps_are_committed_with_their_policies_and_a_restart_goes_on(world: World) -> None:
    with fed(world):
        world.train(world.config(steps=3))
        world.train(world.config(steps=5))
    records = world.read(world.topics.steps)
    started, steps = records[0], world.steps()
    assert isinstance(started, RunStarted) and len(records) == 6
    assert [(s.version_in, s.version_out) for s in steps] == [(v, v + 1) for v in range(5)]
    assert [s.sequence for s in steps] == list(range(5))
    trained = [ref for step in steps for ref in step.trained]
    assert [ref.group_id for ref in trained] == [f"g{i}" for i in range(10)]
    assert all(0 <= s.version_in - r.version <= K for s in steps for r in s.trained)
    assert steps[0].metrics["tokens"] > 0 and steps[0].metrics["reward_mean"] == 0.5
    assert {"idle_seconds", "train_seconds", "live_versions", "loss"} <= steps[0].metrics.keys()
    policies = [p for p in world.read(world.topics.policies) if isinstance(p, Policy)]
    assert [p.version for p in policies] == list(range(6))
    assert [p.weights_checksum for p in policies[1:]] == [s.weights_checksum for s in steps]
    assert len({p.weights_checksum for p in policies}) == 6
    store = WeightStore.of(world.config())
    assert len(store.versions()) == 4  # the window's two and weights.keep = 2
    newest = store.fetch(policies[-1], world.directory)
    assert weights_checksum(read_tensors(newest)) == policies[-1].weights_checksum
    checkpoints = world.directory / world.name / "checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == [s.checkpoint for s in steps[-2:]]


def test_steps_without_a_checkpoint_are_redone_bit_identically_and_orphans_removed(
    world: World,
) -> None:
    with fed(world):
        world.train(world.config(steps=3))
        runs = world.directory / world.name
        shutil.rmtree(runs / "checkpoints")
        orphans = [
            runs / "weights" / "v00000004-0123456789abcdef",
            runs / "checkpoints" / "step-00000004-0123456789abcdef",
        ]
        for orphan in orphans:
            orphan.mkdir(parents=True)
        world.train(world.config(steps=4))
    assert not any(orphan.exists() for orphan in orphans)
    assert [s.version_out for s in world.steps()] == [1, 2, 3, 4]
    # The same run without an interruption ends with the same weights, if it saw the same groups.
    expected = world.steps()[-1].weights_checksum
    shutil.rmtree(world.directory / world.name / "checkpoints")
    with fed(world):
        world.train(world.config(steps=5))
    assert world.steps()[3].weights_checksum == expected


def test_a_redo_that_gives_other_weights_stops_the_trainer(world: World) -> None:
    with fed(world):
        world.train(world.config(steps=2, optimizer={"learning_rate": 1e-3, "schedule": "linear"}))
        shutil.rmtree(world.directory / world.name / "checkpoints")
        changed = world.config(steps=9, optimizer={"learning_rate": 1e-3, "schedule": "linear"})
        with pytest.raises(RunError, match=r"redoing step 1 -> 2(.|\n)*trainer\.steps"):
            world.train(changed)
    assert len(world.steps()) == 2


def test_a_second_trainer_fences_the_first_which_commits_nothing_more(world: World) -> None:
    with fed(world, most=0):
        first = Trainer(world.config(), world.settings)
        raised: list[BaseException] = []

        def run() -> None:
            try:
                first.run(threading.Event())
            except FencedError as error:
                raised.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        wait_for(lambda: bool(world.read(world.topics.policies)))
        Trainer(world.config(), world.settings)
        with fed(world, most=B):
            thread.join(60.0)
        assert not thread.is_alive() and len(raised) == 1
    assert world.steps() == []


def wait_for(condition: Callable[[], bool]) -> None:
    import time

    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"


def test_groups_that_fail_or_give_no_signal_are_set_aside_and_do_not_jam_the_window(
    world: World,
) -> None:
    def rewards(ordinal: int, sample: int) -> float | None:
        if ordinal < 4:
            return None if sample else 1.0
        return 1.0 if ordinal < 8 else float(sample)

    with fed(world, rewards):
        world.train(world.config(steps=1, loss={"drop_no_signal": True}))
    aside = [ref for step in world.steps() for ref in step.set_aside]
    assert [ref.group_id for ref in aside] == [f"g{i}" for i in range(8)]
    assert [ref.reason for ref in aside] == ["verifier timed out"] * 4 + ["no_signal"] * 4
    assert [ref.group_id for ref in world.steps()[-1].trained] == ["g8", "g9"]
    assert world.steps()[0].kind == "set_aside"


def test_an_unreadable_trajectory_becomes_a_dead_letter_and_training_goes_on(world: World) -> None:
    from confluent_kafka import Producer

    with fed(world, most=0):
        producer = Producer({"bootstrap.servers": world.settings.bootstrap_servers})
        trainer = Trainer(world.config(steps=1), world.settings)
        stop = threading.Event()
        thread = threading.Thread(target=trainer.run, args=(stop,), daemon=True)
        thread.start()
        wait_for(lambda: bool(world.read(world.topics.policies)))
        producer.produce(world.topics.trajectories, b"rubbish", partition=0)
        producer.flush(10.0)
        with fed(world):
            thread.join(60.0)
        assert not thread.is_alive()
    (letter,) = world.read(world.topics.dead_letters)
    assert isinstance(letter, DeadLetter)
    assert (letter.topic, letter.partition, letter.payload) == (
        world.topics.trajectories,
        0,
        b"rubbish",
    )
    assert len(world.steps()) == 1


def test_another_configuration_or_recreated_topics_cannot_continue_a_run(world: World) -> None:
    with fed(world):
        world.train(world.config(steps=1))
    with pytest.raises(RunError, match=r"trainer\.loss\.clip_low: recorded 0\.2, given 0\.1"):
        world.train(world.config(steps=2, loss={"clip_low": 0.1}))
    assert len(world.steps()) == 1


def test_a_batch_that_does_not_come_ends_in_a_message_that_says_what_is_missing(
    world: World,
) -> None:
    with (
        fed(world, most=1),
        pytest.raises(DeadlineError, match=r"1 of 2 groups finished .*version 0: 1 groups"),
    ):
        world.train(world.config(steps=1, batch_timeout_seconds=2.0))


def test_a_complete_run_ends_at_once_without_its_model(world: World, tmp_path: Path) -> None:
    copy = shutil.copytree(world.model, tmp_path / "copy")
    moved = World(world.settings, world.name, copy, world.directory)
    with fed(world):
        moved.train(moved.config(steps=1))
    shutil.rmtree(copy)
    moved.train(moved.config(steps=1))
    assert len(world.steps()) == 1
