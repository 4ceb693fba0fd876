"""A clean log passes; each kind of violation, forged into one, is found."""

import json
from copy import deepcopy
from dataclasses import replace

import pytest

from dora.core import ring
from dora.core.audit.audit import Audit
from dora.core.audit.report import KINDS
from dora.schemas.records import Admission, VersionRun, pack_logprobs, pack_tokens
from tests.damaged_log import (
    LANES,
    RING,
    Log,
    admission,
    chunk,
    finished_log,
    live_log,
    step,
    trajectory,
)
from tests.forgeries import (
    FORGERIES,
    Forgery,
    a_group_left_behind,
    a_named_trajectory_missing,
    in_order,
    ordinals_skipped,
    take_over,
    told,
)


@pytest.fixture(params=[live_log, finished_log], ids=["live", "finished"])
def log(request: pytest.FixtureRequest) -> Log:
    made: Log = request.param()
    return made


def test_a_clean_live_log_has_no_violation() -> None:
    report = live_log().audit()
    assert not report.violated and report.conserved
    assert report.findings == () and report.notes == ()
    printed = json.loads(json.dumps(report.to_json()))
    assert printed["violations"] == dict.fromkeys(KINDS, 0)
    expected = {
        "run": "r",
        "steps": 2,
        "groups_started": 6,
        "groups_trained": 4,
        "groups_set_aside": 0,
        "groups_outstanding": 2,
        "conserved": True,
        "max_staleness": 1,
        "trajectories": 12,
        "duplicates_ignored": 0,
    }
    assert {key: printed[key] for key in expected} == expected


def test_a_clean_finished_log_has_no_violation() -> None:
    report = finished_log().audit()
    assert not report.violated and report.conserved
    assert (report.steps, report.groups_trained, report.groups_outstanding) == (3, 6, 0)


def test_a_group_left_behind_is_not_outstanding(log: Log) -> None:
    outstanding = log.audit().groups_outstanding
    a_group_left_behind(log)
    report = log.audit()
    assert report.groups_outstanding == outstanding
    assert not report.conserved


def test_a_duplicate_of_a_worker_believed_dead_is_no_violation(log: Log) -> None:
    again = trajectory(log.journal[0], 0, attempt=1)
    log.finish(again)
    log.chunks.append(chunk(again, 0, 0, 3))
    report = log.audit()
    assert not report.violated
    assert report.duplicates_ignored == 1


def test_a_foreign_version_that_does_not_count_is_no_violation(log: Log) -> None:
    log.finish(trajectory(replace(log.journal[0], policy_version=1), 0, attempt=1))
    assert not log.audit().violated


def test_eval_groups_are_left_out(log: Log) -> None:
    before = log.audit()
    group = Admission("r", ring.eval_group_id(0, 0), 0, 0, 1, "eval", 0)
    log.journal.append(group)  # version 0 has left the window: train groups would be lost
    log.finish(trajectory(group, 0))
    report = log.audit()
    assert not report.violated
    assert report.groups_started == before.groups_started
    assert report.groups_outstanding == before.groups_outstanding


def test_a_group_set_aside_with_a_reason_is_no_violation(log: Log) -> None:
    ref = replace(log.group(admission(6, log.newest)), reason="no_signal")
    entry = step(len(log.ledger) - 1, aside=(ref,))
    log.ledger.append(
        replace(entry, kind="set_aside", version_in=log.newest, version_out=log.newest)
    )
    report = log.audit()
    assert not report.violated and report.conserved
    assert report.groups_set_aside == 1
    assert report.steps == log.newest


@pytest.mark.parametrize(
    "attempts",
    [
        ((0, 0, 2), (1, 2, 3)),
        ((0, 0, 2), (1, 0, 1), (2, 2, 3)),  # goes on from the longest
        ((0, 0, 1), (1, 1, 2), (2, 2, 3)),  # goes on from one that went on itself
        ((0, 0, 1), (1, 1, 1), (2, 1, 3)),  # the second one died before a token of its own
        ((0, 0, 3), (1, 3, 3)),  # nothing was left to generate
    ],
)
def test_an_attempt_that_resumed_another_is_no_violation(
    log: Log, attempts: tuple[tuple[int, int, int], ...]
) -> None:
    take_over(log, *attempts)
    report = log.audit()
    assert not report.violated, report.findings


def test_a_zombie_that_goes_on_after_the_takeover_is_no_violation(log: Log) -> None:
    take_over(log, (0, 0, 2), (1, 2, 3))
    first = trajectory(log.journal[0], 0)
    log.chunks.insert(-1, chunk(first, 1, 2, 1))  # between the scan and the takeover
    log.chunks.append(chunk(first, 2, 3, 0))
    log.finish(first)
    report = log.audit()
    assert not report.violated, report.findings
    assert report.duplicates_ignored == 1


def test_turns_of_an_environment_are_in_no_chunk(log: Log) -> None:
    """Tokens 1 and 3 are generated, 2 came from outside between them."""
    log.rewrite("g0/0", mask=b"\0\1\0\1", version_runs=(VersionRun(0, 2),))
    first, second = log.chunk_index("g0/0", 0), log.chunk_index("g0/0", 1)
    log.chunks[first] = chunk(trajectory(log.journal[0], 0), 0, 0, 1)
    log.chunks[second] = replace(
        log.chunks[second], position=1, token_ids=pack_tokens([3]), logprobs=pack_logprobs([-1])
    )
    report = log.audit()
    assert not report.violated, report.findings


def test_a_live_run_before_its_first_step_is_no_violation() -> None:
    log = live_log()
    log.ledger = log.ledger[:1]
    log.policies = log.policies[:1]
    report = log.audit()
    assert not report.violated
    assert report.groups_outstanding == 6
    assert report.max_staleness == 0


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_a_forgery_is_found_with_its_ids_and_offsets(log: Log, forge: Forgery) -> None:
    expected = forge(log)
    report = log.audit()
    assert told(report.findings) == in_order(expected), report.findings
    assert report.violated
    assert all(finding.sentence for finding in report.findings)


def test_every_kind_of_violation_is_forged(log: Log) -> None:
    assert {kind for forge in FORGERIES for kind, _, _ in forge(deepcopy(log))} == set(KINDS)


def test_skipped_ordinals_count_one_by_one(log: Log) -> None:
    ordinals_skipped(log)
    assert log.audit().violations["lost"] == 2


def test_a_finding_names_group_record_and_offset(log: Log) -> None:
    ref = log.step(1).trained[0].samples[0]
    a_named_trajectory_missing(log)
    (finding,) = log.audit().to_json()["findings"]
    assert finding["ids"] == ["g0", "g0/0"]
    assert finding["offsets"][1] == {
        "topic": "r.trajectories",
        "partition": ref.partition,
        "offset": ref.offset,
    }
    assert f"r.trajectories[{ref.partition}]@{ref.offset}" in finding["sentence"]


def test_chunks_are_not_expected_when_they_are_left_out(log: Log) -> None:
    trained = log.audit().groups_trained
    log.chunks.clear()
    assert log.audit().violations["lost"] == 2 * trained
    assert not log.audit(chunks=False).violated


def test_chunks_that_retention_deleted_are_a_note(log: Log) -> None:
    audit = Audit()
    for partition in range(RING * LANES):
        audit.begins("chunks", partition, 10)
    for record, place in log.records(chunks=False):
        audit.feed(record, place.topic, place.partition, place.offset)
    report = audit.report()
    assert not report.violated
    assert f"{2 * report.groups_trained} trained trajectories" in report.notes[0]


def test_findings_are_bounded_and_counts_are_not(log: Log) -> None:
    for ordinal in range(6, 1006):
        log.journal.append(admission(ordinal, 0))
    report = log.audit()
    assert report.violations["lost"] == 1000
    assert len(report.findings) < 1000


def test_an_unreadable_record_is_a_note() -> None:
    audit = Audit()
    audit.unreadable("r.chunks", 1, 5, "truncated")
    assert audit.report().notes == ("r.chunks[1]@5 cannot be read: truncated",)
