"""Committed steps in experiment trackers, and trackers that misbehave."""

import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dora.config import Config
from dora.schemas.records import Step
from dora.telemetry import trackers as tracking
from dora.telemetry.trackers import TensorBoard, TrackedRun, Trackers, WeightsAndBiases, values_of
from tests import factories
from tests.configurations import emulated
from tests.factories import run_started

DEADLINE = 60.0


def step(number: int, value: float | None = None) -> Step:
    metrics = {"loss": float(number) if value is None else value, "step_seconds": 2.0}
    return factories.step(number - 1, number - 1, at=1000, **metrics)


class Kept:
    """A tracker that keeps what it is told."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.logged: list[int] = []
        self.closed = False

    def log(self, number: int, created_ms: int, values: Mapping[str, float]) -> None:
        self.logged.append(number)

    def close(self) -> None:
        self.closed = True


def session(tmp: Path, newest: int, recent: list[Step], new: list[Step]) -> Kept:
    """A trainer's life with one tracker: it goes on after `newest` and commits `new`."""
    made: list[Kept] = []

    def opener(run: TrackedRun) -> Kept:
        made.append(Kept(run))
        return made[0]

    trackers = Trackers(emulated(tmp), {"kept": opener})
    trackers.begin(run_started(), recent, newest)
    for each in new:
        trackers.step(each)
    trackers.close()
    return made[0]


def test_names_are_grouped_by_what_they_are_about() -> None:
    assert values_of(step(1)) == {
        "train/loss": 1.0,
        "time/step_seconds": 2.0,
        "window/groups_trained": 0.0,
        "window/groups_set_aside": 0.0,
    }


def test_a_step_that_a_crash_left_out_is_logged_by_the_next_trainer(tmp_path: Path) -> None:
    assert session(tmp_path, 0, [], [step(1), step(2)]).logged == [1, 2]
    # step 3 was committed and then the process died; the ledger's last entries are at hand
    after = session(tmp_path, 3, [step(2), step(3)], [step(4)])
    assert (after.run.first, after.logged, after.closed) == (3, [3, 4], True)
    assert session(tmp_path, 4, [step(3), step(4)], []).logged == []


def test_the_mark_of_an_older_run_of_the_same_name_counts_for_nothing(tmp_path: Path) -> None:
    session(tmp_path, 0, [], [step(1), step(2)])
    trackers = Trackers(emulated(tmp_path), {"kept": Kept})
    path = tmp_path / "r" / "trackers" / "kept.json"
    path.write_text('{"run_id": "another", "step": 7}')
    trackers.begin(run_started(), [step(1)], 1)
    trackers.close()
    assert '"step": 1' in path.read_text()


def scalars(tmp: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(tmp / "r" / "tensorboard"))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_tensorboard_has_every_step_once_after_crashes(tmp_path: Path) -> None:
    def life(newest: int, recent: list[Step], new: list[Step]) -> None:
        trackers = Trackers(emulated(tmp_path), {"tensorboard": TensorBoard})
        trackers.begin(run_started(), recent, newest)
        for each in new:
            trackers.step(each)
        trackers.close()

    life(0, [], [step(1), step(2)])
    mark = tmp_path / "r" / "trackers" / "tensorboard.json"
    written = mark.read_text()
    # dies between the file and the mark: the next one writes step 3 again, and it shows once
    life(2, [step(2)], [step(3)])
    mark.write_text(written)
    life(3, [step(2), step(3)], [step(4)])
    assert scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert scalars(tmp_path, "time/step_seconds") == [(n, 2.0) for n in range(1, 5)]


class Broken:
    def __init__(self, run: TrackedRun) -> None:
        raise OSError("https://me:secret@host/api does not answer")


def test_a_tracker_that_fails_is_switched_off_with_a_word_and_without_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[Kept] = []

    def good(run: TrackedRun) -> Kept:
        kept.append(Kept(run))
        return kept[0]

    trackers = Trackers(emulated(tmp_path), {"broken": Broken, "kept": good})
    trackers.begin(run_started(), [], 0)
    for number in range(1, 5):
        trackers.step(step(number))
    trackers.close()
    assert kept[0].logged == [1, 2, 3, 4]
    said = [record.getMessage() for record in caplog.records if "switched off" in record.message]
    assert len(said) == 1 and "https://host/api" in said[0] and "secret" not in said[0]


def test_a_tracker_that_hangs_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "HANG_SECONDS", 0.05)
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 0.1)
    free = threading.Event()
    logged: list[int] = []

    class Hanging(Kept):
        def log(self, number: int, created_ms: int, values: Mapping[str, float]) -> None:
            logged.append(number)
            free.wait(DEADLINE)

    trackers = Trackers(emulated(tmp_path), {"hanging": Hanging})
    trackers.begin(run_started(), [], 0)
    until = time.monotonic() + DEADLINE
    number = 0
    while not any("switched off" in r.message for r in caplog.records):
        assert time.monotonic() < until
        number += 1
        trackers.step(step(number))
        time.sleep(0.01)
    trackers.step(step(number + 1))
    trackers.close()
    free.set()
    assert logged == [1], "nothing more is handed to one that hung"


class HoldingRun:
    """As a run of wandb: values of a step stay with it until they are committed."""

    def __init__(self) -> None:
        self.held: dict[str, float] = {}
        self.sent: list[tuple[int, dict[str, float]]] = []

    def log(self, data: dict[str, float], step: int, commit: bool = False) -> None:
        self.held.update(data)
        if commit:
            self.sent.append((step, self.held))
            self.held = {}


def test_the_last_step_does_not_stay_in_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = HoldingRun()
    wandb = SimpleNamespace(init=lambda **given: run, Settings=lambda **given: given)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tracker = WeightsAndBiases(TrackedRun(emulated(tmp_path), "id", 1))
    tracker.log(1, 1000, {"train/loss": 0.5})
    assert run.sent == [(1, {"train/loss": 0.5})]


def test_packages_that_are_missing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    given: dict[str, Any] = emulated(tmp_path).model_dump() | {"metrics": {"wandb": True}}
    trackers = Trackers(Config.model_validate(given))
    trackers.begin(run_started(), [], 0)
    trackers.close()
    assert any("wandb is not installed" in record.getMessage() for record in caplog.records)
