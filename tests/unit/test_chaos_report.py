"""When a chaos run passes, and what its report says."""

import pytest

from tests.chaos.plan import Fault, Mix, plan
from tests.chaos.profiles import PROFILES
from tests.chaos.report import Conservation, Findings, Outcome, conservation, summary

MIX = PROFILES["emulated"].mix


AUDIT = {
    "groups_started": 3,
    "groups_trained": 2,
    "groups_set_aside": 1,
    "groups_outstanding": 0,
    "max_staleness": 1,
    "duplicates_ignored": 4,
    "violations": {"lost": 0, "duplicated": 0},
    "findings": [],
    "notes": [],
}


def findings() -> Findings:
    faults = plan(0, 3, Mix({"worker": 1.0}, {"worker": {"kill": 1.0}}, ("w0",), 0.0))
    outcomes = [Outcome(fault, at=1.0, recovery=float(i + 1)) for i, fault in enumerate(faults)]
    return Findings(
        seed=0, engine="emulated", outcomes=outcomes, audit=AUDIT, max_staleness_allowed=1,
        conservation=conservation(AUDIT, [0, 1, 2]),
        redo={"identical": True, "steps": 1, "differing": []},
    )  # fmt: skip


def test_a_run_in_which_nothing_was_found_passes_and_its_report_says_so() -> None:
    report = findings().to_json()
    assert report["passed"] and report["conserved"] and report["redo_identical"]
    assert report["faults"] == {"kill": 3, "freeze": 0, "point": 0}
    assert report["faults_by_victim"] == {"trainer": 0, "coordinator": 0, "worker": 3, "broker": 0}
    assert (report["recovery_seconds_median"], report["recovery_seconds_max"]) == (2.0, 3.0)
    assert report["violations"] == AUDIT["violations"]
    assert [entry["recovery_seconds"] for entry in report["list"]] == [1.0, 2.0, 3.0]
    assert any("chaos passed" in line for line in summary(report))


def broken(found: Findings, what: str) -> None:
    match what:
        case "violation":
            found.audit = {**AUDIT, "violations": {"lost": 1, "duplicated": 0}}
        case "staleness":
            found.audit = {**AUDIT, "max_staleness": 2}
        case "not conserved":
            found.conservation = Conservation(3, 2, 0, 0, 0, 0)
        case "prompt skipped":
            found.conservation = conservation(AUDIT, [0, 1, 3])
        case "prompt repeated":
            found.conservation = conservation(AUDIT, [0, 1, 1])
        case "groups that the audit does not know":
            found.conservation = conservation(AUDIT, [0, 1, 2, 3])
        case "redo":
            found.redo = {"identical": False, "steps": 1, "differing": [{}]}
        case "no redo":
            found.redo = None
        case "no audit":
            found.audit = None
        case "not recovered":
            found.outcomes[1].recovery = None
        case "failure":
            found.failures.append("the run hung")


@pytest.mark.parametrize(
    "what",
    [
        "violation",
        "staleness",
        "not conserved",
        "prompt skipped",
        "prompt repeated",
        "groups that the audit does not know",
        "redo",
        "no redo",
        "no audit",
        "not recovered",
        "failure",
    ],
)
def test_a_run_fails_for(what: str) -> None:
    found = findings()
    broken(found, what)
    report = found.to_json()
    assert not found.passed and not report["passed"]
    assert any("chaos FAILED" in line for line in summary(report))


def test_a_run_that_failed_early_still_has_a_report() -> None:
    faults: list[Fault] = plan(0, 5, MIX)
    found = Findings(0, "emulated", [Outcome(f) for f in faults], failures=["no broker"])
    report = found.to_json()
    assert report["violations"] is None and not report["conserved"]
    assert not report["redo_identical"] and report["recovery_seconds_max"] is None
    assert "failure: no broker" in summary(report)
