"""A broker that is killed in the middle of a commit."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from dora.broker.local import running_broker, start_broker, stop_broker
from dora.bus import ClusterSettings, cluster_settings
from dora.config import KafkaSection
from dora.errors import ExitCode
from dora.schemas.records import Step
from tests.processes import process, until
from tests.small_run import SmallRun
from tests.training_world import World, fed


@dataclass(frozen=True, slots=True)
class Own:
    """A run on a broker of its own, which the test may kill."""

    run: SmallRun
    home: Path

    @property
    def settings(self) -> ClusterSettings:
        return cluster_settings(KafkaSection(bootstrap_servers=self.run.address))

    def kill(self) -> None:
        broker = running_broker(self.home)
        assert broker is not None
        os.kill(broker.pid, signal.SIGKILL)
        until(lambda: running_broker(self.home) is None, "the broker to be gone")

    def start(self) -> None:
        """At the same address, once connections of the dead one let go of it: clients know no
        other."""
        again = start_broker(self.home, heap_mb=256)
        assert again.bootstrap_servers == self.run.address


@pytest.fixture
def own(run_name: str, small_model: Path, tmp_path: Path) -> Iterator[Own]:
    home = tmp_path / "broker"
    address = start_broker(home, heap_mb=256).bootstrap_servers
    try:
        yield Own(SmallRun(run_name, tmp_path, small_model, address), home)
    finally:
        if running_broker(home) is not None:
            stop_broker(home, force=True)


def test_a_broker_killed_in_the_middle_of_a_commit_loses_and_doubles_nothing(own: Own) -> None:
    """The transaction's records are in the log, its commit is not: the broker dies, and comes back
    while the trainer stands still. Whether the trainer's commit then succeeds or its transaction is
    over, the ledger holds each step once."""
    run = own.run
    run.emulate_training()
    run.make_topics(own.settings)
    world = World(own.settings, run.name, run.model, run.directory / "runs")
    fault = {"DORA_FAULT": "trainer.inside_transaction:freeze:2"}
    one_step = ("--set", "trainer.steps=1")
    with ExitStack() as stack:
        trainer = stack.enter_context(process(run, "train", "train", *one_step, env=fault))
        with fed(world, most=2):
            until(lambda: trainer.stopped, "the trainer to freeze", trainer)
        own.kill()
        trainer.thaw()
        own.start()
        until(lambda: trainer.code is not None, "the trainer to end", trainer)
        assert "Traceback" not in trainer.said, trainer.said
        if trainer.code != 0:
            # not fenced by anybody: the same command goes on
            assert trainer.code in (1, ExitCode.FENCED), trainer.said
            result = run.dora("train", *one_step)
            assert result.exit_code == 0, result.output
    steps = [r for r in world.read(run.topics.steps) if isinstance(r, Step)]
    assert [(s.sequence, s.version_out) for s in steps] == [(0, 1)]
    assert [ref.group_id for s in steps for ref in s.trained] == ["g0", "g1"]
    assert run.look("audit", "--no-chunks").exit_code == 0
