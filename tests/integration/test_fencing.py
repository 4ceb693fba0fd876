"""Two that claim the same role, and one that froze in the middle of a commit: exactly one goes on.

Real processes on a real Kafka; SIGSTOP holds them for longer than their transaction may take.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dora.bus import ClusterSettings, LogReader, LogWriter
from dora.consumers.trainer.trainer import Trainer
from dora.errors import ExitCode
from dora.schemas.records import Admission, Command, Policy, RunStarted, Step
from tests.factories import policy, status
from tests.integration.test_bad_input import started
from tests.played_trainer import running
from tests.processes import DEADLINE, Process, process, until
from tests.small_run import SmallRun
from tests.training_world import World, fed

TRANSACTION = ("--set", "kafka.transaction_timeout_seconds=3")
THAW_SECONDS = 30.0


def world_of(small: SmallRun, settings: ClusterSettings) -> World:
    """The run with its topics."""
    small.make_topics(settings)
    return World(settings, small.name, small.model, small.directory / "runs")


def after_timeout(settings: ClusterSettings, topic: str, partition: int = 0) -> None:
    """Wait until the broker has aborted the transaction that is open in a partition: until then
    readers of committed records are held up before it."""
    place = (topic, partition)
    with (
        LogReader(settings, client_id="committed") as committed,
        LogReader(settings, client_id="all", isolation="read_uncommitted") as every,
    ):
        until(
            lambda: committed.end_offsets([place]) != every.end_offsets([place]),
            "the transaction to reach the log",
        )
        until(
            lambda: committed.end_offsets([place]) == every.end_offsets([place]),
            "the broker to abort the transaction",
        )


def check_ledger(world: World, steps: int) -> None:
    """Each step once, each group once, nothing of anybody who lost."""
    records = world.read(world.topics.steps)
    assert isinstance(records[0], RunStarted)
    entries = [record for record in records if isinstance(record, Step)]
    assert len(records) == 1 + len(entries)
    assert [entry.sequence for entry in entries] == list(range(steps))
    trained = [ref.group_id for entry in entries for ref in entry.trained]
    assert trained == [f"g{ordinal}" for ordinal in range(2 * steps)]
    versions = [r.version for r in world.read(world.topics.policies) if isinstance(r, Policy)]
    assert versions == list(range(steps + 1))


def check_fenced(loser: Process) -> None:
    until(lambda: loser.code is not None, "the fenced one to end", loser)
    assert loser.code == ExitCode.FENCED, loser.said
    assert "another process took over while" in loser.said or (
        "another trainer committed step" in loser.said
    ), loser.said
    assert "Traceback" not in loser.said


def test_of_two_trainers_the_first_ends_and_the_ledger_is_the_seconds(
    small: SmallRun, settings: ClusterSettings
) -> None:
    small.emulate_training()
    world = world_of(small, settings)
    steps = ("--set", "trainer.steps=3")
    with process(small, "first", "train", *steps) as first:
        with fed(world, most=3):  # one batch, and half of another
            until(lambda: len(world.steps()) == 1, "the first step", first)
        second = Trainer(small.config("trainer.steps=3"), settings)
        with running(second.run):
            check_fenced(first)  # although there is nothing to commit yet
            with fed(world):
                until(lambda: len(world.steps()) == 3, "the second one's steps")
    check_ledger(world, 3)
    assert small.look("audit", "--no-chunks").exit_code == 0


@contextmanager
def frozen_trainer(small: SmallRun, world: World) -> Iterator[Process]:
    """A trainer that was stopped inside the transaction of its first step."""
    fault = {"DORA_FAULT": "trainer.inside_transaction:freeze:2"}  # the first is the run's start
    with process(small, "frozen", "train", *TRANSACTION, env=fault) as frozen:
        until(lambda: frozen.stopped, "the trainer to freeze", frozen)
        assert world.steps() == [], "nothing is committed"
        yield frozen


def test_a_trainer_frozen_inside_its_transaction_is_fenced_by_its_replacement(
    small: SmallRun, settings: ClusterSettings
) -> None:
    world = world_of(small, settings)
    with fed(world), frozen_trainer(small, world) as frozen:
        result = small.dora("train", *TRANSACTION)
        assert result.exit_code == 0, result.output
        frozen.thaw()
        check_fenced(frozen)
    check_ledger(world, 2)
    assert small.look("audit", "--no-chunks").exit_code == 0


def test_a_trainer_frozen_past_its_transaction_timeout_ends_and_is_started_again(
    small: SmallRun, settings: ClusterSettings
) -> None:
    small.emulate_training()
    world = world_of(small, settings)
    with fed(world):
        with frozen_trainer(small, world) as frozen:
            after_timeout(settings, small.topics.steps)
            frozen.thaw()
            until(lambda: frozen.code is not None, "the thawed trainer to end", frozen)
        assert "Traceback" not in frozen.said, frozen.said
        if frozen.code != 0:
            assert frozen.code == ExitCode.FENCED, frozen.said
            assert "kafka.transaction_timeout_seconds" in frozen.said
            result = small.dora("train", *TRANSACTION)
            assert result.exit_code == 0, result.output
    check_ledger(world, 2)
    assert small.look("audit", "--no-chunks").exit_code == 0


@contextmanager
def frozen_coordinator(small: SmallRun, settings: ClusterSettings) -> Iterator[Process]:
    """A coordinator that was stopped while it told an idle worker to load version 0."""
    small.make_topics(settings)
    with LogWriter(settings, client_id="test") as writer:
        record = started(small, settings)
        writer.send(small.topics.steps, record, key=small.name, partition=0)
        writer.send(small.topics.policies, policy(0, small.name), key="0", partition=0)
    fault = {"DORA_FAULT": "coordinator.inside_transaction:freeze"}
    with (
        Worker(small, settings),
        process(small, "frozen", "coordinator", *TRANSACTION, env=fault) as frozen,
    ):
        until(lambda: frozen.stopped, "the coordinator to freeze", frozen)
        yield frozen


class Worker(threading.Thread):
    """Says that it is ready and idle, as a worker without a version does."""

    def __init__(self, small: SmallRun, settings: ClusterSettings) -> None:
        super().__init__(daemon=True)
        self._small, self._settings = small, settings
        self._ended = threading.Event()

    def run(self) -> None:
        with LogWriter(self._settings, client_id="w0") as writer:
            while not self._ended.wait(0.2):
                now = time.time_ns() // 1_000_000
                idle = status("w0", run=self._small.name, version=-1, capacity=8, at=now)
                writer.send(self._small.topics.workers, idle, key="w0")
                writer.poll()

    def __enter__(self) -> "Worker":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join(DEADLINE)


def commands(small: SmallRun, settings: ClusterSettings) -> list[Command]:
    """Every committed command."""
    topic, count = small.topics.dispatch, small.config().kafka.dispatch_partitions
    with LogReader(settings, client_id="test") as reader:
        reader.assign({(topic, index): 0 for index in range(count)})
        found = [message.value for message in reader.read_to_end(DEADLINE)]
    assert not any(isinstance(value, Admission) for value in found)
    return [value for value in found if isinstance(value, Command)]


def test_a_coordinator_frozen_inside_its_transaction_is_fenced_by_its_replacement(
    small: SmallRun, settings: ClusterSettings
) -> None:
    with frozen_coordinator(small, settings) as frozen:
        assert commands(small, settings) == []
        with process(small, "second", "coordinator", *TRANSACTION) as second:
            until(lambda: commands(small, settings), "the second coordinator's command", second)
            frozen.thaw()
            check_fenced(frozen)
            assert second.code is None, second.said
        assert second.code == 0, second.said
    assert [command.kind for command in commands(small, settings)] == ["switch"]


def test_a_coordinator_frozen_past_its_transaction_timeout_ends_and_is_started_again(
    small: SmallRun, settings: ClusterSettings
) -> None:
    with frozen_coordinator(small, settings) as frozen:
        after_timeout(settings, small.topics.dispatch, worker_index(small))
        frozen.thaw()
        until(
            lambda: frozen.code is not None or commands(small, settings),
            "the thawed coordinator to end or to go on",
            frozen,
        )
        assert "Traceback" not in frozen.said, frozen.said
        if frozen.code is not None:
            assert frozen.code == ExitCode.FENCED, frozen.said
            with process(small, "second", "coordinator", *TRANSACTION) as second:
                until(lambda: commands(small, settings), "the command", second)
            assert second.code == 0, second.said
    assert [command.kind for command in commands(small, settings)] == ["switch"]


def worker_index(small: SmallRun) -> int:
    from dora.core.ring import worker_partition

    return worker_partition("w0", small.config().kafka.dispatch_partitions)
