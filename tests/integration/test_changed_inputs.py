"""Inputs of a run that change while it is away or while it goes on, on a real Kafka."""

import json
from contextlib import suppress

import pytest

from dora.bus import ClusterSettings, LogReader, LogWriter
from dora.bus.transactions import TransactionalWriter
from dora.schemas.records import Policy, RunStarted, Step
from tests.factories import policy
from tests.integration.test_fencing import world_of
from tests.processes import process, until
from tests.small_run import SmallRun, refused
from tests.training_world import fed


class Abort(Exception):
    """Ends a transaction without a commit."""


def append_line(small: SmallRun) -> None:
    line = json.dumps({"prompt": "sea", "answer": "aes"})
    small.data.write_text(small.data.read_text() + line + "\n")


def test_a_trainer_that_is_refused_ends_no_running_one(
    small: SmallRun, settings: ClusterSettings
) -> None:
    small.emulate_training()
    world = world_of(small, settings)
    with process(small, "healthy", "train", "--set", "trainer.steps=3") as healthy, fed(world) as f:
        until(lambda: len(world.steps()) == 1, "the first step", healthy)
        refused(
            small.dora("train", "--set", "policy.dtype=bfloat16"),
            1,
            "policy.dtype: recorded 'float32', given 'bfloat16'",
        )
        append_line(small)
        refused(small.dora("train"), 1, "has changed: task.path: recorded", "--accept-changed")
        assert healthy.code is None and f.failure is None
        until(lambda: healthy.code is not None, "the healthy one to end", healthy)
    assert healthy.code == 0, healthy.said
    assert [entry.version_out for entry in world.steps()] == [1, 2, 3]


def test_changed_data_is_refused_on_resume_and_recorded_once_it_is_accepted(
    small: SmallRun, settings: ClusterSettings
) -> None:
    small.emulate_training()
    world = world_of(small, settings)
    with fed(world):
        assert small.dora("train", "--set", "trainer.steps=1").exit_code == 0
        first = world.read(world.topics.steps)[0]
        assert isinstance(first, RunStarted) and "task.path" in first.inputs
        append_line(small)
        for command in ("train", "rollout"):
            refused(small.dora(command), 1, "what run", "has changed: task.path")
        accepted = ("--accept-changed", "task.path")
        result = small.dora("train", *accepted, "--set", "trainer.steps=3")
        assert result.exit_code == 0, result.output
    entries = [entry for entry in world.read(world.topics.steps) if isinstance(entry, Step)]
    assert [bool(entry.inputs) for entry in entries] == [False, True, False]
    assert entries[1].inputs["task.path"] != first.inputs["task.path"]
    announced = [p for p in world.read(world.topics.policies) if isinstance(p, Policy)]
    assert [p.inputs["task.path"] for p in announced] == [
        *([first.inputs["task.path"]] * 2),
        *([entries[1].inputs["task.path"]] * 2),
    ]
    # what was accepted is the run's now
    assert small.dora("train", "--set", "trainer.steps=3").exit_code == 0


@pytest.mark.parametrize("aborted", [300])
def test_records_hidden_behind_aborted_transactions_are_found(
    small: SmallRun, settings: ClusterSettings, aborted: int
) -> None:
    """An outage with many retries leaves any number of offsets without a record."""
    small.make_topics(settings)
    topic = small.topics.policies
    with LogWriter(settings, client_id="test") as writer:
        writer.send(topic, policy(0, run=small.name), key="0", partition=0)
    own = f"{small.name}.foreign"
    with TransactionalWriter(settings, own, client_id="test", transaction_timeout=60.0) as foreign:
        for _ in range(aborted):
            with suppress(Abort), foreign.transaction() as transaction:
                transaction.send(topic, policy(7, run=small.name), key="7", partition=0)
                transaction.flush()
                raise Abort
    with LogReader(settings, client_id="test") as reader:
        found = reader.read_back((topic, 0), bool, 30.0)
        assert [message.offset for message in found] == [0]
        later = policy(1, run=small.name)
        with LogWriter(settings, client_id="test") as writer:
            writer.send(topic, later, key="1", partition=0)
        assert [m.value for m in reader.read_to_end(30.0)] == [later]
