"""What `dora status` says a run waits for: version, group, sample, who, and since when."""

import json

import pytest

from dora.bus.reader import Message
from dora.cli.display.parts import waiting_lines
from dora.cli.status import as_object
from dora.consumers.monitor.run_view import RunView
from dora.consumers.monitor.snapshot import Snapshot
from dora.consumers.monitor.waits import Progress, Wait
from dora.schemas.records import Command, Record
from tests.factories import (
    admission,
    command,
    places_of,
    policy,
    run_started,
    status,
    step,
    trajectory,
)

COORDINATOR, TRAINER = "coordinator", "trainer"


def start(
    worker: str, trajectory_id: str, attempt: int = 0, *, version: int = 1, at: int = 0
) -> Command:
    return command(trajectory_id, worker, at=at, attempt=attempt, policy_version=version)


def waiting(*records: Record, now: int = 100_000, target: int | None = None) -> RunView:
    """Version 1 is the newest; of its groups g2 is done, and g3 lacks its second sample."""
    groups = [admission(0, 0), admission(1, 0), admission(2, 1), admission(3, 1)]
    log: list[Record] = [run_started(at=1_000), policy(0), *groups]
    log += [trajectory(group, sample, at=9_000) for group in groups[:2] for sample in (0, 1)]
    log.append(step(0, 0, groups[:2], places_of(log), at=60_000))
    log += [policy(1), *(trajectory(groups[2], sample, at=62_000) for sample in (0, 1))]
    log += [trajectory(groups[3], 0, at=62_000)]
    log += [
        status(COORDINATOR, at=now - 500, version=1),
        status(TRAINER, "waiting", at=now - 500, version=1, message="1 of 2 groups finished"),
        *records,
    ]
    view = RunView("r", heartbeat_timeout=30, load_timeout=600, steps_target=target)
    for offset, record in enumerate(log):
        view.handle(Message("r.x", 0, offset, None, 0, {}, record))
    return view


def only(snapshot: Snapshot) -> Wait:
    (wait,) = snapshot.waits
    assert snapshot.waiting_for == 1
    return wait


def test_a_trajectory_without_chunks_is_named_with_its_worker_and_attempt() -> None:
    worker = status("w2", at=99_500, version=1, capacity=8, running=("g3/1#1",))
    view = waiting(start("w2", "g3/1", 1, at=64_000), worker)
    assert [(group.group_id, sample) for group, sample in view.blocking()] == [("g3", 1)]
    view.set_progress({"g3/1": Progress("w2", 1, 4, 69_000, last=False)})
    snapshot = view.snapshot(100_000)
    wait = only(snapshot)
    assert wait == Wait(1, "g3", 1, "train", "w2", 1, 31.0, "generating")
    assert wait.text == (
        "version 1 waits for group g3, sample 1, on worker w2, 31 s without a chunk (attempt 1)"
    )
    assert snapshot.health == "running"
    assert waiting_lines(snapshot) == [wait.text]


def test_a_minute_without_a_chunk_is_a_stall_while_the_trainer_waits() -> None:
    worker = status("w2", at=99_500, version=1, capacity=8, running=("g3/1#0",))
    view = waiting(start("w2", "g3/1", at=39_000), worker)
    snapshot = view.snapshot(100_000)
    assert snapshot.health == "stalled"
    assert snapshot.reasons == (only(snapshot).text,)
    assert "61 s without a chunk (attempt 0)" in snapshot.reasons[0]
    view.handle(Message("r.x", 0, 99, None, 0, {}, status(TRAINER, "training", at=99_600)))
    assert view.snapshot(100_000).health == "running"


def test_chunks_of_an_older_attempt_do_not_count_for_a_newer_one() -> None:
    worker = status("w2", at=99_500, version=1, capacity=8, running=("g3/1#2",))
    view = waiting(start("w2", "g3/1", 2, at=90_000), worker)
    view.set_progress({"g3/1": Progress("w1", 1, 9, 99_000, last=False)})
    assert only(view.snapshot(100_000)).seconds_without_chunk == 10.0


def test_a_trajectory_that_is_being_scored_is_no_stall() -> None:
    worker = status("w2", at=99_500, version=1, capacity=8, running=("g3/1#0",))
    view = waiting(start("w2", "g3/1", at=20_000), worker)
    view.set_progress({"g3/1": Progress("w2", 0, 9, 30_000, last=True)})
    snapshot = view.snapshot(100_000)
    assert only(snapshot).state == "scoring"
    assert "being scored on worker w2 for 70 s (attempt 0)" in only(snapshot).text
    assert snapshot.health == "running"


def test_a_silent_worker_is_named_as_silent() -> None:
    worker = status("w2", at=65_000, version=1, capacity=8, running=("g3/1#0",))
    other = status("w1", at=99_500, version=1, capacity=8)
    view = waiting(start("w2", "g3/1", at=64_000), worker, other)
    assert only(view.snapshot(100_000)).text == (
        "version 1 waits for group g3, sample 1, on worker w2, silent for 35 s, "
        "36 s without a chunk (attempt 0)"
    )


def test_a_command_that_was_not_taken_up_is_named() -> None:
    worker = status("w2", at=99_500, version=1, capacity=8, command_offset=3)
    view = waiting(worker, start("w2", "g3/1", at=95_000))
    assert only(view.snapshot(100_000)).text == (
        "version 1 waits for group g3, sample 1, sent to worker w2 5 s ago, not taken up "
        "(attempt 0)"
    )


@pytest.mark.parametrize(
    ("others", "why"),
    [
        (
            [status("w1", at=99_000, version=0, capacity=8)],
            "which no worker holds: no worker hosts version 1; 36 s without a chunk "
            "(after attempt 0)",
        ),
        (
            [status("w1", "loading", at=99_000, version=0, message="loading version 1")],
            "no worker hosts version 1 (w1: loading version 1)",
        ),
        (
            [status("w1", at=99_000, version=1, capacity=8)],
            "the coordinator has not placed it yet",
        ),
        (
            [status("w1", at=99_000, version=1), status(COORDINATOR, at=55_000)],
            "the coordinator is silent for 45 s",
        ),
        (
            [status("w1", at=99_000, version=1), status(COORDINATOR, "failed", at=55_000)],
            "the coordinator has failed",
        ),
        (
            [status("w2", "failed", at=80_000, running=("g3/1#0",))],
            "w2 has failed, no worker hosts version 1",
        ),
    ],
)
def test_a_trajectory_that_nobody_holds_says_why(others: list[Record], why: str) -> None:
    # the command is older than what its worker has carried out: it was handed back
    handed_back = status("w2", at=99_000, version=0, capacity=8, command_offset=900)
    view = waiting(start("w2", "g3/1", at=64_000), handed_back, *others)
    wait = only(view.snapshot(100_000))
    assert (wait.state, wait.worker) == ("unplaced", None)
    assert why in wait.text


def test_a_worker_that_was_started_again_does_not_hold_what_was_sent_before() -> None:
    again = status("w2", at=99_000, version=1, capacity=8)
    object.__setattr__(again, "incarnation", "another")
    view = waiting(start("w2", "g3/1", at=64_000), again)
    assert only(view.snapshot(100_000)).state == "unplaced"


def test_only_the_versions_that_block_the_batch_are_waited_for() -> None:
    """Two groups of version 2 are done, but version 1 would expire."""
    groups = [admission(number, version) for number, version in enumerate((0, 0, 1, 1, 2, 2, 2))]
    log: list[Record] = [run_started(at=1_000), *groups[:4]]
    log += [trajectory(group, sample) for group in groups[:2] for sample in (0, 1)]
    log.append(step(0, 0, groups[:2], places_of(log)))
    log += groups[4:]
    log += [trajectory(group, sample) for group in groups[4:6] for sample in (0, 1)]
    view = RunView("r")
    for offset, record in enumerate(log):
        view.handle(Message("r.x", 0, offset, None, 0, {}, record))
    assert view.state is not None
    view.state.newest = 2
    assert {group.group_id for group, _ in view.blocking()} == {"g2", "g3"}


def test_those_that_nobody_works_on_come_first_and_the_rest_is_counted() -> None:
    groups = [admission(number, 1) for number in range(4, 8)]
    worker = status(
        "w2",
        at=99_000,
        version=1,
        capacity=16,
        running=tuple(f"g{number}/{sample}#0" for number in range(4, 8) for sample in (0, 1)),
    )
    snapshot = waiting(*groups, worker).snapshot(100_000)
    assert (len(snapshot.waits), snapshot.waiting_for) == (5, 9)
    assert [wait.group for wait in snapshot.waits] == ["g3", "g4", "g4", "g5", "g5"]
    assert waiting_lines(snapshot)[-1] == "and 4 more trajectories"


def test_without_groups_at_work_the_coordinator_is_waited_for() -> None:
    done = trajectory(admission(3, 1), 1, at=63_000)
    aside = step(1, 1, [admission(3, 1)], {"g3/0": (0, 12), "g3/1": (0, 17)})
    object.__setattr__(aside, "kind", "set_aside")
    object.__setattr__(aside, "version_out", 1)
    object.__setattr__(aside, "set_aside", aside.trained)
    object.__setattr__(aside, "trained", ())
    loading = status("w1", "loading", at=299_000, version=0, message="loading version 1")
    snapshot = waiting(done, aside, loading, now=300_000).snapshot(300_000)
    assert snapshot.waits == ()
    assert snapshot.health == "stalled"
    assert snapshot.reasons[-1] == (
        "version 1 waits for the coordinator to start 1 more group: no worker hosts version 1 "
        "(w1: loading version 1)"
    )


def test_after_the_last_step_only_the_evaluation_is_waited_for() -> None:
    view = waiting(admission(0, 1, purpose="eval"), target=1)
    assert [(group.group_id, sample) for group, sample in view.blocking()] == [("e1-0", 0)]
    assert only(view.snapshot(100_000)).text.startswith(
        "the evaluation of version 1 waits for group e1-0, sample 0, "
    )


def test_the_waits_are_in_the_json() -> None:
    worker = status("w2", at=99_500, version=1, capacity=8, running=("g3/1#1",))
    found = as_object(waiting(start("w2", "g3/1", 1, at=64_000), worker).snapshot(100_000))
    (wait,) = json.loads(json.dumps(found))["waits"]
    assert {
        "version",
        "group",
        "sample",
        "worker",
        "attempt",
        "seconds_without_chunk",
        "state",
    } <= (wait.keys())
    assert (wait["version"], wait["group"], wait["sample"], wait["worker"]) == (1, "g3", 1, "w2")
    assert wait["text"].endswith("36 s without a chunk (attempt 1)")
