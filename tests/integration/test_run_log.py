"""A run's log as people read it: what counts, where it lies, and what is foreign or gone."""

import time

import pytest

from dora.bus import ClusterSettings, LogWriter, TopicAdmin, topic_plan
from dora.core import ring
from dora.errors import RunError, TopicError
from dora.log.run_log import RunLog
from dora.schemas.records import unpack_tokens
from tests.brokers import Cluster
from tests.factories import policy, step
from tests.written_run import (
    DEADLINE,
    EVALUATED,
    OUTSTANDING,
    RING,
    SET_ASIDE,
    TAKEN_OVER,
    UNFINISHED,
    RunWriter,
    WrittenRun,
    admissions,
    config_of,
    response,
    spoil,
    write,
)


@pytest.fixture(scope="module")
def written(kafka: Cluster) -> WrittenRun:
    """Do not change it."""
    made = write(kafka)
    spoil(made)
    return made


@pytest.fixture(scope="module")
def log(written: WrittenRun) -> RunLog:
    return RunLog(written.settings, written.run)


def ids(log: RunLog, *versions: int) -> list[str]:
    return [placed.record.trajectory_id for placed in log.trajectories(versions or None)]


def test_steps_and_what_became_of_each_group(log: RunLog) -> None:
    assert [each.version_out for each in log.steps] == [1, 2, 3]
    assert log.step(2).version_in == 1
    assert log.trained_at() == {"g0": 1, "g1": 1, "g2": 2, "g3": 3, "g4": 3, "g5": 3}
    assert log.set_aside() == {SET_ASIDE: "verifier timed out"}
    assert list(log.admissions) == [each.group_id for each in admissions(log.run)]
    with pytest.raises(RunError, match="no step 9: it has steps 1 to 3"):
        log.step(9)


def test_the_trajectories_of_a_version_are_read_from_where_it_begins(log: RunLog) -> None:
    assert ids(log, 0) == ["g0/0", "g0/1", "g1/0", "g1/1"]
    assert ids(log, 3) == [f"{OUTSTANDING}/0", f"{OUTSTANDING}/1"], "in the slot of version 0"
    assert [placed.offset for placed in log.trajectories({3})] == [4, 5]
    first = ["g2/0", "g2/1", "g3/0", "g3/1", f"{EVALUATED}/0"]
    second = [f"g{ordinal}/{sample}" for ordinal in (4, 5, 6) for sample in (0, 1)]
    both = ids(log, 1, 2)
    assert [identity for identity in both if identity in first] == first
    assert [identity for identity in both if identity not in first] == second


def test_only_trajectories_that_count_are_read_and_foreign_records_are_counted(
    written: WrittenRun,
) -> None:
    log = RunLog(written.settings, written.run)
    found = {placed.record.trajectory_id: placed.record for placed in log.trajectories()}
    wanted = {
        ring.trajectory_id(group.group_id, sample)
        for group in admissions(log.run)
        if group.group_id != UNFINISHED
        for sample in range(group.group_size)
    }
    assert found.keys() == wanted
    assert found["g0/0"].reward == 0.0, "the first finished record counts"
    assert len(log.unreadable) == 3, log.unreadable
    assert "offset 8 is g0/7 of version 0" in log.unreadable[0]
    assert "offset 9 holds a DeadLetter, which does not belong there" in log.unreadable[1]
    assert "offset 10 cannot be read" in log.unreadable[2]
    again = list(log.trajectories())
    assert len(again) == len(wanted) and len(log.unreadable) == 3, "each is told once"
    assert not log.missing


def test_a_log_that_is_held_for_long_can_still_be_read(
    written: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RunLog(written.settings, written.run, deadline=DEADLINE)
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 2 * DEADLINE)
    assert ids(log, 0) == ["g0/0", "g0/1", "g1/0", "g1/1"]


def test_a_span_of_steps_has_both_its_ends(log: RunLog) -> None:
    assert log.span(None, None) == (1, 3)
    assert log.span(2, None) == (2, 3) and log.span(None, 2) == (1, 2)
    for first, last in ((0, None), (None, 4), (2, 4)):
        with pytest.raises(RunError, match="it has steps 1 to 3"):
            log.span(first, last)


def test_a_group_is_read_with_all_its_finished_samples(log: RunLog) -> None:
    group = log.group("g4")
    assert {sample: placed.record.trajectory_id for sample, placed in group.items()} == {
        0: "g4/0",
        1: "g4/1",
    }
    assert group[1].partition == ring.slot(2, RING) and group[1].offset == 1
    assert log.group(UNFINISHED) == {}
    with pytest.raises(RunError, match="no group g10") as told:
        log.group("g10")
    assert told.value.hint == "The nearest ones: g4, g5, g6, g7, g8."


def test_the_chunks_of_one_trajectory_are_those_of_all_its_attempts(log: RunLog) -> None:
    found = [placed.record for placed in log.chunks([TAKEN_OVER])]
    assert [(c.attempt, c.sequence, c.worker) for c in found] == [
        (0, 0, "w0"),
        (1, 0, "w1"),
        (1, 1, "w1"),
    ]
    assert found[1].resumed_tokens == 4
    tokens = b"".join(chunk.token_ids for chunk in found[1:])
    assert unpack_tokens(tokens).tolist() == response(1, 0)
    assert list(log.chunks([])) == []


def test_the_commands_about_a_trajectory(log: RunLog) -> None:
    found = sorted((c.record.attempt, c.record.worker) for c in log.commands([TAKEN_OVER]))
    assert found == [(0, "w0"), (1, "w1")]
    assert list(log.commands([])) == []


@pytest.mark.parametrize(
    ("identity", "says", "nearest"),
    [
        ("g1/7", "no trajectory g1/7", "g1/0, g1/1"),
        ("g50/1", "no trajectory g50/1", "g4/1, g5/1, g6/1, g7/1, g8/1"),
        ("e1-3/0", "no trajectory e1-3/0", "e1-0/0"),
        ("g4", "'g4' is no trajectory id", "g4/0, g4/1"),
        ("g1/01", "leading zeros", "g1/0"),
    ],
)
def test_an_unknown_id_is_refused_with_the_nearest_ones(
    log: RunLog, identity: str, says: str, nearest: str
) -> None:
    for ask in (log.version_of, lambda i: next(log.chunks([i])), lambda i: next(log.commands([i]))):
        with pytest.raises(RunError, match=says) as told:
            ask(identity)
        assert nearest in (told.value.hint or "")


def test_what_retention_deleted_is_named(kafka: Cluster) -> None:
    written = write(kafka)
    trajectories = written.topics.trajectories
    written.delete(trajectories, 0, 5)
    log = RunLog(written.settings, written.run)
    assert ids(log, 3) == [f"{OUTSTANDING}/1"]
    gone = f"{trajectories} partition 0 begins at offset 5: "
    assert log.missing == [gone + "4 to 4 were deleted by retention"]
    assert ids(log, 0) == []
    assert log.missing[1:] == [gone + "0 to 4 were deleted by retention"]
    assert ids(log, 2)[0] == "g4/0" and len(log.missing) == 2, "other partitions are whole"
    written.delete(written.topics.dispatch, 0, 2)
    log = RunLog(written.settings, written.run)
    assert "g0" not in log.admissions and "g2" in log.admissions
    assert log.missing == [
        f"{written.topics.dispatch} partition 0 begins at offset 2: 0 to 1 were deleted by "
        "retention"
    ]
    written.delete(written.topics.steps, 0, 1)
    with pytest.raises(RunError, match=r"has no beginning: .* 0 to 0 were deleted by retention"):
        RunLog(written.settings, written.run)


def test_a_run_that_has_not_begun_or_is_unknown_is_told(
    settings: ClusterSettings, run_name: str
) -> None:
    with pytest.raises(TopicError, match="no run"):
        RunLog(settings, run_name)
    with TopicAdmin(settings) as admin:
        admin.create(topic_plan(config_of(run_name, settings.bootstrap_servers, "model")))
    with pytest.raises(RunError, match="has not begun"):
        RunLog(settings, run_name)


def test_a_ledger_with_foreign_records_is_read_past_them(
    settings: ClusterSettings, run_name: str
) -> None:
    written = RunWriter(settings, run_name, "model").write()
    with LogWriter(settings, client_id="test") as writer:
        writer.send(written.topics.steps, policy(9, run_name), partition=0)
        writer.send(written.topics.policies, step(0, 0, [admissions("r")[4]], {"e1-0/0": (0, 0)}),
                    key="x", partition=0)  # fmt: skip
        writer.flush(DEADLINE)
    log = RunLog(settings, run_name)
    assert len(log.steps) == 3 and set(log.policies) == {0, 1, 2, 3}
    assert [text.rpartition(" offset ")[2] for text in log.unreadable] == [
        "4 holds a Policy, which does not belong there",
        "4 holds a Step, which does not belong there",
    ]
