"""Which versions of a run are closed, where they lie, and which records are theirs."""

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest

from dora.core import ring
from dora.core.closed_versions import RunVersions, TopicBounds
from dora.schemas.records import Admission, SlotOffset, Step
from tests import factories
from tests.factories import RING, B, admission, policy, run_started, trajectory

TOPIC = "r.trajectories"
GROUPS = [admission(n, n // B) for n in range(6)]
"""Two under each of the versions 0 to 2."""


def step(version: int, groups: Iterable[Admission], aside: Iterable[Admission] = ()) -> Step:
    """The step that made the version after `version`."""
    places = {f"{group.group_id}/{n}": (0, 40 + n) for group in GROUPS for n in range(2)}
    return factories.step(version, version, groups, places, aside=aside)


def versions(
    ledger: Iterable[Step],
    groups: Iterable[Admission] = GROUPS,
    *,
    steps: int = 9,
    starts: dict[int, int] | None = None,
    begins: dict[int, int] | None = None,
    **options: bool,
) -> RunVersions:
    """Of a run with a lane, K = 1 and a ring of 3, whose versions begin at `starts`."""
    policies = {
        version: policy(version, slots=(SlotOffset(TOPIC, ring.slot(version, RING), at),))
        for version, at in (starts or {}).items()
    }
    bounds = TopicBounds(
        TOPIC, dict.fromkeys(range(RING), 0) | (begins or {}), {0: 90, 1: 91, 2: 92}
    )
    started = replace(run_started(), config=json.dumps({"trainer": {"steps": steps}}))
    admissions = {group.group_id: group for group in groups}
    return RunVersions(started, policies, admissions, ledger, bounds, **options)


def test_a_version_is_closed_when_it_left_the_window_and_all_its_groups_have_a_fate() -> None:
    found = versions([step(0, GROUPS[:1]), step(1, GROUPS[2:3], aside=GROUPS[1:2])])
    assert found.numbers == [0, 1, 2]
    assert found.open_reason(0) is None
    assert found.open_reason(1) == "groups may still start under it"
    late = versions([step(0, GROUPS[:1]), step(1, GROUPS[2:3])])
    assert late.open_reason(0) == "1 of its groups were never trained: see `dora audit`"


def test_of_a_run_that_has_done_its_steps_the_last_versions_close_too() -> None:
    ledger = [step(0, GROUPS[:2]), step(1, GROUPS[2:4])]
    over = versions(ledger, steps=2)
    assert over.open_reason(1) is None
    assert over.open_reason(2) == "2 of its groups are outstanding"
    assert versions(ledger, ended=True).open_reason(2) is None
    assert versions(ledger).outstanding(2) == versions(ledger).started(2) == 2


def test_evaluations_do_not_keep_a_version_open_but_may_still_come_until_its_slot_is_used_again(
) -> None:  # fmt: skip
    groups = [*GROUPS, admission(0, 0, purpose="eval")]
    ledger = [step(0, GROUPS[:2]), step(1, GROUPS[2:4])]
    found = versions(ledger, groups)
    assert found.open_reason(0) is None
    assert found.unevaluated(0, ()) == "not evaluated to the end: e0-0"
    assert found.unevaluated(0, {"e0-0/0"}) is None
    assert versions(ledger, groups, starts={0: 0, 3: 50}).unevaluated(0, ()) is None
    assert versions(ledger, groups, ended=True).unevaluated(0, ()) is None


def test_a_version_ends_where_the_next_one_of_its_slot_begins() -> None:
    forged = 3 * 2**60
    found = versions([], starts={forged: 80, 0: 3, 3: 50, 1: 7})
    assert [found.extent(v) for v in (0, 3, 1)] == [{0: (3, 50)}, {0: (50, 80)}, {1: (7, 91)}]


def test_what_retention_deleted_of_a_version_is_named() -> None:
    found = versions([], starts={0: 3, 3: 50}, begins={0: 10})
    assert found.gone_reason(0) == (
        "r.trajectories partition 0 begins at offset 10: 3 to 9, which are its, were deleted by "
        "retention"
    )
    assert found.gone_reason(1) is found.gone_reason(3) is None
    headless = versions([step(0, GROUPS[:2])], GROUPS[2:], journal_whole=False)
    assert headless.gone_reason(0) == (
        "its part of the journal of admissions was deleted by retention"
    )
    assert headless.gone_reason(1) is None


@pytest.mark.parametrize(
    ("fields", "place", "reason"),
    [
        ({}, 1, None),
        ({"run": "s"}, 1, "is of run s"),
        ({"group_id": "g99", "trajectory_id": "g99/0"}, 1, "is of group g99, which never started"),
        ({"policy_version": 4}, 1, "is g2/0 of version 4, but that group started with 2 samples"),
        ({"sample": 2, "trajectory_id": "g2/2"}, 1, "is g2/2 of version 1, but that group started"),
        ({"sample": -1}, 1, "but that group started with 2 samples under version 1"),
        ({"trajectory_id": "g3/1"}, 1, "is called g3/1, but is sample 0 of group g2"),
        ({}, 0, "is g2/0, whose partition is 1"),
    ],
)
def test_a_record_that_does_not_belong_there_is_told_apart(
    fields: dict[str, object], place: int, reason: str | None
) -> None:
    found = versions([]).misfit(trajectory(GROUPS[2], **fields), place)  # type: ignore[arg-type]
    assert found is None if reason is None else reason in (found or "")


def test_without_the_journals_beginning_nobody_knows_whether_a_group_started() -> None:
    record = trajectory(GROUPS[0])
    assert versions([], GROUPS[1:], journal_whole=False).misfit(record, 0) is None
    assert versions([], GROUPS[1:]).misfit(record, 0) is not None


def test_samples_that_the_ledger_names_and_nobody_found_are_named() -> None:
    found = versions([step(0, GROUPS[:2])])
    assert found.lost(0, {"g0/0", "g0/1", "g1/0", "g1/1"}) is None
    assert found.lost(0, {"g0/0", "g1/0", "g1/1"}) == (
        "the ledger names g0/1 (partition 0 offset 41), which cannot be read there"
    )
    assert (found.lost(0, ()) or "").endswith("offset 40) and 1 more, which cannot be read there")
