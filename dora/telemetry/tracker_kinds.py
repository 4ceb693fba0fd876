"""The experiment trackers, each imported only when it is opened.

Invariant: a run that goes on after a restart goes on in the same place of its tracker, known by the
id that the ledger gave it.
"""

from collections.abc import Mapping
from typing import Any

from dora.errors import ConfigError
from dora.telemetry.trackers import TrackedRun


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
        """See `Tracker`."""
        make = self._summary.Value
        found = [make(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(
            self._event(
                wall_time=created_ms / 1000, step=number, summary=self._summary(value=found)
            )
        )
        self._writer.flush()

    def close(self) -> None:
        """See `Tracker`."""
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
        """See `Tracker`."""
        # with a step but without `commit` they would stay in this process until the next step
        self._run.log(dict(values), step=number, commit=True)

    def close(self) -> None:
        """See `Tracker`."""
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
        """See `Tracker`."""
        make = self._metric
        found = [make(name, value, created_ms, number) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=found)

    def close(self) -> None:
        """See `Tracker`."""
        self._client.set_terminated(self._id)


def missing(package: str) -> ConfigError:
    """The error for a tracker whose package is not there."""
    return ConfigError(
        f"metrics.{package} is on, but the package {package} is not installed",
        hint=f"pip install {package}",
    )
