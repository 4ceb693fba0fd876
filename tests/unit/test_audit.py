"""A clean log passes; each kind of violation, forged into one, is found."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from dora.core import ring
from dora.core.audit import Audit
from dora.core.audit_report import KINDS, AuditReport
from dora.schemas.records import Admission, GroupRef, VersionRun
from tests.damaged_log import (
    LANES,
    RING,
    Log,
    admission,
    chunk,
    clean_log,
    policy,
    step,
    trajectory,
)


@pytest.fixture
def log() -> Log:
    return clean_log()


def found(report: AuditReport) -> dict[str, int]:
    return {kind: count for kind, count in report.violations.items() if count}


def test_a_clean_log_has_no_violation(log: Log) -> None:
    report = log.audit()
    assert not report.violated
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
        "max_staleness": 1,
        "trajectories": 12,
        "duplicates_ignored": 0,
    }
    assert {key: printed[key] for key in expected} == expected


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
    group = Admission("r", ring.eval_group_id(0, 0), 0, 0, 1, "eval", 0)
    log.journal.append(group)  # version 0 has left the window: train groups would be lost
    log.finish(trajectory(group, 0))
    report = log.audit()
    assert not report.violated
    assert report.groups_started == 6
    assert report.groups_outstanding == 2


def test_a_group_set_aside_with_a_reason_is_no_violation(log: Log) -> None:
    ref = log.group(admission(6, 1))
    entry = replace(step(2), kind="set_aside", version_out=2)
    log.ledger.append(replace(entry, set_aside=(replace(ref, reason="no_signal"),)))
    report = log.audit()
    assert not report.violated
    assert report.groups_set_aside == 1
    assert report.steps == 2


def test_an_attempt_that_resumed_another_is_no_violation(log: Log) -> None:
    log.rewrite("g0/0", attempt=1, chunks=1)
    samples = log.step(1).trained[0].samples
    ref = replace(log.step(1).trained[0], samples=(replace(samples[0], attempt=1), *samples[1:]))
    log.change(1, trained=(ref, *log.step(1).trained[1:]))
    log.chunks = [each for each in log.chunks if each.trajectory_id != "g0/0"]
    first, second = trajectory(log.journal[0], 0), trajectory(log.journal[0], 0, attempt=1)
    log.chunks += [chunk(first, 0, 0, 2), chunk(second, 0, 2, 1)]
    assert not log.audit().violated


def test_a_live_run_before_its_first_step_is_no_violation(log: Log) -> None:
    log.ledger = log.ledger[:1]
    log.policies = log.policies[:1]
    report = log.audit()
    assert not report.violated
    assert report.groups_outstanding == 6
    assert report.max_staleness == 0


def forge_abandoned_group(log: Log) -> None:
    log.group(admission(6, 0))


def forge_missing_trajectory(log: Log) -> None:
    ref = log.step(1).trained[0].samples[0]
    log.trajectories[ref.partition] = [
        entry for entry in log.trajectories[ref.partition] if entry[0] != ref.offset
    ]


def forge_skipped_ordinals(log: Log) -> None:
    log.journal.append(admission(8, 2))


def forge_trained_without_admission(log: Log) -> None:
    log.journal[3] = replace(log.journal[3], group_id="other", policy_version=1)


def forge_missing_chunk(log: Log) -> None:
    log.chunks.remove(next(each for each in log.chunks if each.trajectory_id == "g1/1"))


def forge_short_chunk(log: Log) -> None:
    index = next(i for i, each in enumerate(log.chunks) if each.sequence == 1)
    log.chunks[index] = replace(log.chunks[index], token_ids=b"", logprobs=b"")


def forge_all_chunks_gone(log: Log) -> None:
    log.chunks = [each for each in log.chunks if each.trajectory_id != "g0/0"]


def forge_no_reason(log: Log) -> None:
    ref = log.group(admission(6, 1))
    log.change(2, set_aside=(ref,))


def forge_trained_twice(log: Log) -> None:
    log.change(2, trained=(log.step(1).trained[0], log.step(2).trained[1]))  # and g2 never


def forge_admitted_twice(log: Log) -> None:
    log.journal.append(log.journal[5])


def forge_ordinal_twice(log: Log) -> None:
    log.journal.append(replace(log.journal[5], group_id="g5b"))


def forge_mixed_tokens(log: Log) -> None:
    log.rewrite("g0/0", version_runs=(VersionRun(0, 1), VersionRun(1, 2)))


def forge_tokens_of_another_version(log: Log) -> None:
    log.rewrite("g0/0", version_runs=(VersionRun(1, 3),))


def forge_mixed_tokens_not_trained_yet(log: Log) -> None:
    log.rewrite("g5/1", version_runs=(VersionRun(1, 1), VersionRun(2, 2)))


def forge_version_of_group(log: Log) -> None:
    log.rewrite("g0/1", policy_version=1)


def forge_version_in_ledger(log: Log) -> None:
    ref = replace(log.step(1).trained[0], version=1)
    log.change(1, trained=(ref, log.step(1).trained[1]))


def forge_stale(log: Log) -> None:
    log.change(0, max_staleness=0)
    log.journal = log.journal[:4]


def forge_from_the_future(log: Log) -> None:
    ref = log.group(admission(6, 3))
    log.ledger.append(step(2, ref, log.group(admission(7, 1))))
    log.policies.append(policy(3))
    log.journal = [
        replace(each, policy_version=2) if each.ordinal in (4, 5) else each for each in log.journal
    ]


def forge_missing_sample(log: Log) -> None:
    first, second = log.step(1).trained
    log.change(1, trained=(replace(first, samples=first.samples[:1]), second))


def forge_repeated_sample(log: Log) -> None:
    first, second = log.step(1).trained
    log.change(1, trained=(replace(first, samples=(first.samples[0],) * 2), second))


def forge_sequence_gap(log: Log) -> None:
    log.change(2, sequence=5)


def forge_version_gap(log: Log) -> None:
    log.change(2, version_in=0, version_out=1)
    log.policies.pop()


def forge_no_policy(log: Log) -> None:
    log.policies.pop()


def forge_no_step(log: Log) -> None:
    log.policies.append(policy(3))


def forge_small_batch(log: Log) -> None:
    aside = replace(log.step(2).trained[1], reason="x")
    log.change(2, trained=log.step(2).trained[:1], set_aside=(aside,))


def forge_training_set_aside_entry(log: Log) -> None:
    refs = log.group(admission(6, 1)), log.group(admission(7, 1))
    log.ledger.append(replace(step(2, *refs), kind="set_aside", version_out=2))


def forge_not_the_first_record(log: Log) -> None:
    later = log.finish(trajectory(log.journal[0], 0, attempt=1))
    first, second = log.step(1).trained
    log.change(1, trained=(replace(first, samples=(later, first.samples[1])), second))
    again = trajectory(log.journal[0], 0, attempt=1)
    log.chunks += [chunk(again, 0, 0, 2), chunk(again, 1, 2, 1)]


def forge_attempt(log: Log) -> None:
    first, second = log.step(1).trained
    samples = (replace(first.samples[0], attempt=7), first.samples[1])
    log.change(1, trained=(replace(first, samples=samples), second))


def forge_second_start(log: Log) -> None:
    log.ledger.append(log.ledger[0])


def forge_no_start(log: Log) -> None:
    del log.ledger[0]


def forge_version_published_twice(log: Log) -> None:
    log.policies.append(replace(policy(2), weights_checksum="other"))


def forge_eval_group_trained(log: Log) -> None:
    log.journal[5] = replace(log.journal[5], purpose="eval")
    log.change(2, set_aside=(GroupRef("g5", 5, 1, (), "x"),))


def forge_checksum(log: Log) -> None:
    log.change(2, weights_checksum="other")


@pytest.mark.parametrize(
    ("forge", "expected"),
    [
        (forge_abandoned_group, {"lost": 1}),
        (forge_missing_trajectory, {"lost": 1}),
        (forge_skipped_ordinals, {"lost": 2}),
        (forge_trained_without_admission, {"lost": 1}),
        (forge_missing_chunk, {"lost": 1}),
        (forge_short_chunk, {"lost": 1}),
        (forge_all_chunks_gone, {"lost": 1}),
        (forge_no_reason, {"lost": 1}),
        (forge_trained_twice, {"duplicated": 1, "lost": 1}),
        (forge_admitted_twice, {"duplicated": 1}),
        (forge_ordinal_twice, {"duplicated": 1}),
        (forge_mixed_tokens, {"mixed_version": 1}),
        (forge_tokens_of_another_version, {"mixed_version": 1}),
        (forge_mixed_tokens_not_trained_yet, {"mixed_version": 1}),
        (forge_version_of_group, {"mixed_version": 1}),
        (forge_version_in_ledger, {"mixed_version": 1}),
        (forge_stale, {"stale": 2}),
        (forge_from_the_future, {"stale": 1}),
        (forge_missing_sample, {"incomplete_group": 1}),
        (forge_repeated_sample, {"incomplete_group": 1}),
        (forge_sequence_gap, {"torn_step": 1}),
        (forge_version_gap, {"torn_step": 1}),
        (forge_no_policy, {"torn_step": 1}),
        (forge_no_step, {"torn_step": 1}),
        (forge_small_batch, {"torn_step": 1}),
        (forge_training_set_aside_entry, {"torn_step": 1}),
        (forge_not_the_first_record, {"torn_step": 1}),
        (forge_attempt, {"torn_step": 1}),
        (forge_second_start, {"torn_step": 1}),
        (forge_no_start, {"torn_step": 1}),
        (forge_version_published_twice, {"torn_step": 1}),
        (forge_eval_group_trained, {"torn_step": 1}),
        (forge_checksum, {"checksum": 1}),
    ],
)
def test_a_forged_log_is_found_out(
    log: Log, forge: Callable[[Log], None], expected: dict[str, int]
) -> None:
    forge(log)
    report = log.audit()
    assert found(report) == expected, report.findings
    assert report.violated
    assert {finding.kind for finding in report.findings} == set(expected)
    assert all(finding.sentence for finding in report.findings)


def test_a_finding_names_group_record_and_offset(log: Log) -> None:
    forge_missing_trajectory(log)
    ref = log.step(1).trained[0].samples[0]
    (finding,) = log.audit().to_json()["findings"]
    assert finding["ids"] == ["g0", "g0/0"]
    assert finding["offsets"][1] == {
        "topic": "r.trajectories",
        "partition": ref.partition,
        "offset": ref.offset,
    }
    assert f"r.trajectories[{ref.partition}]@{ref.offset}" in finding["sentence"]


def test_chunks_are_not_expected_when_they_are_left_out(log: Log) -> None:
    log.chunks.clear()
    assert log.audit().violations["lost"] == 8
    assert not log.audit(chunks=False).violated


def test_chunks_that_retention_deleted_are_a_note(log: Log) -> None:
    log.chunks.clear()
    audit = Audit()
    for partition in range(RING * LANES):
        audit.begins("chunks", partition, 10)
    for offset, entry in enumerate(log.ledger):
        audit.feed(entry, "r.steps", 0, offset)
    for version, published in enumerate(log.policies):
        audit.feed(published, "r.policies", 0, version)
    for offset, started in enumerate(log.journal):
        audit.feed(started, "r.dispatch", 0, offset)
    for partition, records in log.trajectories.items():
        for offset, finished in records:
            audit.feed(finished, "r.trajectories", partition, offset)
    report = audit.report()
    assert not report.violated
    assert "8 trained trajectories" in report.notes[0]


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
