"""A chaos run small enough for every change: twenty faults on every kind of process."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import psutil

from tests.chaos.campaign import Campaign
from tests.chaos.profiles import PROFILES
from tests.chaos.report import summary

FAULTS = 20
HASTY = replace(PROFILES["emulated"], mix=replace(PROFILES["emulated"].mix, delay=0.5))
"""The same faults as with `make chaos`, with less rest between them."""


def test_nothing_is_lost_whatever_is_killed_or_frozen(tmp_path: Path) -> None:
    findings = Campaign(tmp_path / "run", HASTY, seed=0, faults=FAULTS).run()
    report = findings.to_json()
    told = "\n".join(summary(report))
    assert findings.passed, f"{told}\n{json.dumps(report['list'])}"
    assert sum(report["faults"].values()) == FAULTS, told
    assert all(report["faults_by_victim"].values()), told
    assert set(report["violations"].values()) == {0}, told
    assert report["conserved"], told
    assert report["redo_identical"], told
    assert processes_of(tmp_path) == []
    shutil.rmtree(tmp_path / "run")


def processes_of(directory: Path) -> list[str]:
    """What runs with the directory in its command line or as its own."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if any(str(directory) in text for text in (*words, process.cwd())):
                found.append(" ".join(words))
        except psutil.Error:
            continue  # it is gone
    return found
