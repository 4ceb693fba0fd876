"""Committed steps in experiment trackers: TensorBoard always, others when they are asked for.

A tracker never holds up training. Each has a thread of its own; one that fails, or takes too long
for a step, is switched off with a warning. Each step is logged once, with the values that the
ledger has: a file beside the run says how far a tracker has come, and a trainer that starts again
logs what a crash left out. A tracker's own id of a run is the ledger's, so it goes on in the same
place. Each package is imported only when its tracker is opened.
"""

import json
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dora.atomic_write import atomic_write
from dora.config import Config
from dora.core.step_metrics import PART
from dora.errors import ConfigError
from dora.schemas.records import RunStarted, Step
from dora.telemetry.meter import meter

log = logging.getLogger(__name__)

HANG_SECONDS = 120.0
CLOSE_SECONDS = 30.0
_GROUPS = (
    (re.compile(r".*_seconds"), "time"),
    (re.compile(r"logprob_.*"), "mismatch"),
    (re.compile(r"held_out_.*"), "held_out"),
    (re.compile(rf"{PART}.*"), "reward_parts"),
    (re.compile(r"staleness_.*|live_versions|groups_.*|duplicates_.*"), "window"),
)


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is opened for; `first` is the first step that will be logged now."""

    config: Config
    run_id: str
    first: int

    @property
    def settings(self) -> dict[str, str]:
        """What makes the run this run, one line each; it holds no secrets."""
        return dict(_flat(self.config.identity()))


class Tracker(Protocol):
    """What each tracker does; anything that it raises switches it off."""

    def log(self, number: int, created_ms: int, values: Mapping[str, float]) -> None:
        """Keep the values of step `number`, safely, before it returns."""

    def close(self) -> None:
        """End."""


Open = Callable[[TrackedRun], Tracker]


def values_of(step: Step) -> dict[str, float]:
    """What is logged of a step, under names that trackers group by what stands before the `/`."""
    values = {
        **step.metrics,
        "groups_trained": float(len(step.trained)),
        "groups_set_aside": float(len(step.set_aside)),
    }
    return {f"{_group_of(name)}/{name}": value for name, value in sorted(values.items())}


def chosen(config: Config) -> dict[str, Open]:
    """The trackers that the configuration asks for."""
    openers: dict[str, Open] = {"tensorboard": TensorBoard}
    if config.metrics.wandb:
        openers["wandb"] = WeightsAndBiases
    if config.metrics.mlflow:
        openers["mlflow"] = MLflow
    return openers


class Trackers:
    """All trackers of a trainer; nothing happens before `begin`."""

    def __init__(self, config: Config, openers: Mapping[str, Open] | None = None) -> None:
        self._config = config
        self._openers = chosen(config) if openers is None else openers
        self._channels: list[_Channel] = []

    def begin(self, started: RunStarted, recent: Iterable[Step], newest: int) -> None:
        """The trainer goes on after step `newest`; `recent` are the last entries of the ledger."""
        steps = [step for step in recent if step.kind == "step"]
        directory = self._config.run_directory / "trackers"
        for name, opener in self._openers.items():
            mark = ProgressFile(directory / f"{name}.json", started.run_id)
            reached = mark.read()
            left = [step for step in steps if reached < step.version_out <= newest]
            first = min((step.version_out for step in left), default=newest + 1)
            run = TrackedRun(self._config, started.run_id, first)
            channel = _Channel(name, opener, run, mark)
            for step in left:
                channel.put(step)
            self._channels.append(channel)

    def step(self, step: Step) -> None:
        """A step was committed; returns at once."""
        for channel in self._channels:
            channel.put(step)

    def close(self) -> None:
        """Log what is left, for a bounded time."""
        for channel in self._channels:
            channel.end()
        until = time.monotonic() + CLOSE_SECONDS
        for channel in self._channels:
            channel.join(max(0.0, until - time.monotonic()))


class ProgressFile:
    """The file that says how far a tracker has come; one of another run does not count."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path = path
        self._run_id = run_id

    def read(self) -> int:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            return int(content["step"]) if content["run_id"] == self._run_id else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def write(self, number: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self._path, json.dumps({"run_id": self._run_id, "step": number}) + "\n")


class _Channel:
    """One tracker and its thread."""

    def __init__(self, name: str, opener: Open, run: TrackedRun, mark: ProgressFile) -> None:
        self._name = name
        self._opener = opener
        self._run = run
        self._mark = mark
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._off = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, step: Step) -> None:
        since = self._busy_since
        if since is not None and time.monotonic() - since > HANG_SECONDS:
            self._switch_off(f"it has not come back for {HANG_SECONDS:.0f} s")
        if not self._off:
            self._steps.put(step)

    def end(self) -> None:
        self._steps.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._switch_off("it did not end in time")

    def _work(self) -> None:
        try:
            self._busy_since = time.monotonic()
            tracker = self._opener(self._run)
            while True:
                self._busy_since = None
                step = self._steps.get()
                self._busy_since = time.monotonic()
                if self._off:
                    return
                if step is None:
                    tracker.close()
                    return
                tracker.log(step.version_out, step.created_ms, values_of(step))
                self._mark.write(step.version_out)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not stop the trainer
            self._switch_off(f"{type(error).__name__}: {error}")
        finally:
            self._busy_since = None

    def _switch_off(self, why: str) -> None:
        if self._off:
            return
        self._off = True
        meter().count("dora_trainer_tracker_failures_total")
        # an address may hold credentials
        said = re.sub(r"(?<=://)[^/\s@]*@", "", why)
        log.warning("%s is switched off, training goes on: %s", self._name, said)


def _group_of(name: str) -> str:
    return next((group for pattern, group in _GROUPS if pattern.fullmatch(name)), "train")


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


class TensorBoard:
    """Event files in the directory `tensorboard` of the run, written without torch.

    A session that begins at a step hides what earlier ones wrote at or after it (TensorBoard's
    SessionLog.START, the `purge_step` of others).
    """

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run.config.run_directory / "tensorboard"))
        self._writer.add_event(
            Event(step=run.first, session_log=SessionLog(status=SessionLog.START))
        )
        self._writer.flush()

    def log(self, number: int, created_ms: int, values: Mapping[str, float]) -> None:
        make = self._summary.Value
        found = [make(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(
            self._event(
                wall_time=created_ms / 1000, step=number, summary=self._summary(value=found)
            )
        )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Weights & Biases; how it is reached stands in the environment (WANDB_MODE, WANDB_API_KEY)."""

    def __init__(self, run: TrackedRun) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing("wandb") from error
        directory = run.config.run_directory
        directory.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=run.config.metrics.project,
            id=run.run_id,
            name=run.config.run.name,
            resume="allow",
            dir=str(directory),
            config=run.settings,
            # command lines may hold secrets
            settings=wandb.Settings(console="off", silent=True, x_disable_meta=True),
        )

    def log(self, number: int, created_ms: int, values: Mapping[str, float]) -> None:
        # with a step but without `commit` they would stay in this process until the next step
        self._run.log(dict(values), step=number, commit=True)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow: the server of MLFLOW_TRACKING_URI, or a database file in the directory of the run."""

    _TAG = "dora.run_id"

    def __init__(self, run: TrackedRun) -> None:
        try:
            from mlflow.entities import Metric, Param
            from mlflow.environment_variables import MLFLOW_TRACKING_URI
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise missing("mlflow") from error
        self._metric = Metric
        directory = run.config.run_directory
        directory.mkdir(parents=True, exist_ok=True)
        uri = MLFLOW_TRACKING_URI.get() or f"sqlite:///{directory.resolve() / 'mlflow.db'}"
        self._client: Any = MlflowClient(tracking_uri=uri)
        project = run.config.metrics.project
        experiment = self._client.get_experiment_by_name(project)
        if experiment is None:
            artifacts = (
                (directory.resolve() / "mlflow").as_uri() if uri.startswith("sqlite") else None
            )
            number = self._client.create_experiment(project, artifact_location=artifacts)
        else:
            number = experiment.experiment_id
        known = self._client.search_runs([number], f"tags.`{self._TAG}` = '{run.run_id}'")
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        name = run.config.run.name
        made = self._client.create_run(number, run_name=name, tags={self._TAG: run.run_id})
        self._id = made.info.run_id
        settings = [Param(key, value[:500]) for key, value in run.settings.items()]
        self._client.log_batch(self._id, params=settings[:100])

    def log(self, number: int, created_ms: int, values: Mapping[str, float]) -> None:
        make = self._metric
        found = [make(name, value, created_ms, number) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=found)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def missing(package: str) -> ConfigError:
    """The error for a tracker whose package is not there."""
    return ConfigError(
        f"metrics.{package} is on, but the package {package} is not installed",
        hint=f"pip install {package}",
    )
