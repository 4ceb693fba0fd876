"""Training logged steps again, without generating anything.

Nothing is written, neither to the log nor to the run's directory, so a run that is going on may be
replayed. A replay with the recorded settings trains exactly the groups of each ledger entry in
their order and compares the metrics and the weights' checksums with the ledger.
"""

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dora.bus.reader import LogReader
from dora.bus.settings import ClusterSettings
from dora.config import Config
from dora.config.changes import recorded_values, values_of, with_settings
from dora.consumers.learner.learner import Learner, create_learner, starting_model
from dora.consumers.replay.metrics import Difference, FirstDifference, ReplayedStep, compared, same
from dora.consumers.replay.plan import ReplayPlan, make_plan
from dora.consumers.trainer.recovery import difference_to_published, redo_step
from dora.errors import PolicyError, RunError, WeightsError
from dora.log.recorded_config import RecordedSettings
from dora.log.run_log import RunLog
from dora.log.trained_records import Place, fetch_steps
from dora.schemas.records import Step, Trajectory

log = logging.getLogger(__name__)

TRAJECTORIES_AT_ONCE = 8192
"""Trajectories that are fetched and held in memory together, if a step has not more of them."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The outcome of a replay. `sets` are the changes that were tried out, empty where none were.

    `checksum` is that of the weights at the end. `seconds` is the replay without `loading_seconds`
    (the model, the checkpoint), `train_seconds` what of it the training took.
    """

    run: str
    base_version: int
    checkpoint: str | None
    first: int
    results: tuple[ReplayedStep, ...]
    differing: tuple[Difference, ...]
    first_difference: FirstDifference | None
    sets: tuple[str, ...]
    deterministic: bool
    recorded_ranks: int
    checksum: str
    loading_seconds: float
    seconds: float
    notes: tuple[str, ...]

    @property
    def identical(self) -> bool | None:
        """Whether everything came out bit by bit as recorded; None where changes were tried out."""
        return None if self.sets else self.first_difference is None

    @property
    def asked(self) -> list[ReplayedStep]:
        """The steps that were asked for."""
        return [result for result in self.results if result.asked]

    @property
    def trajectories(self) -> int:
        """Trajectories that were trained, those on the way to the first step included."""
        return sum(result.trajectories for result in self.results)

    @property
    def train_seconds(self) -> float:
        """Seconds of training alone."""
        return sum(result.seconds for result in self.results)

    def to_json(self) -> dict[str, Any]:
        """The report as one JSON object."""
        difference = self.first_difference
        return {
            "run": self.run,
            "identical": self.identical,
            "steps": len(self.asked),
            "first_step": self.first,
            "last_step": self.results[-1].step,
            "redone_before": len(self.results) - len(self.asked),
            "from": self.base_version,
            "checkpoint": self.checkpoint,
            "sets": list(self.sets),
            "deterministic": self.deterministic,
            "first_difference": None if difference is None else asdict(difference),
            "differing": [asdict(each) for each in self.differing],
            "checksum": self.checksum,
            "trajectories": self.trajectories,
            "loading_seconds": self.loading_seconds,
            "seconds": self.seconds,
            "train_seconds": self.train_seconds,
            "trajectories_per_second": self.trajectories / max(self.seconds, 1e-9),
            "train_trajectories_per_second": self.trajectories / max(self.train_seconds, 1e-9),
            "notes": list(self.notes),
            "by_step": [result.to_json() for result in self.results],
        }


def replay(
    run: RunLog,
    config: Config,
    settings: ClusterSettings,
    first: int | None = None,
    last: int | None = None,
    *,
    checkpoints: bool = True,
    what_if: Config | None = None,
    sets: Sequence[str] = (),
    deadline: float = 300.0,
    progress: Progress = lambda done, steps: None,
) -> ReplayReport:
    """Train steps `first` to `last` (by default all) of `run` again and compare.

    `config` is what the run began with; each step is trained with the values of its time. Where
    `what_if` is given, the steps asked for are trained with what it has for the keys of `sets`,
    from the recorded weights before them.
    Without `checkpoints` the replay begins at version 0, so that it depends on the starting model
    and the log alone. `deadline` (seconds) bounds each read of the log; `progress` is called with
    the steps done and their number. Raises RunError if the log cannot be replayed, and what Kafka,
    the model and the disk refuse.
    """
    begin, end = run.span(first, last)
    plan = make_plan(run, config, settings, begin, end, checkpoints=checkpoints)
    notes = list(plan.passed_over)
    if what_if is not None and begin == end:
        notes += _late_effect(run, end, config, sets)
    return _Replay(
        run,
        _without_waits(config),
        settings,
        plan,
        {} if what_if is None else values_of(what_if, [t.partition("=")[0].strip() for t in sets]),
        tuple(sets) if what_if is not None else (),
        deadline,
        progress,
        notes=notes,
    ).carry_out()


def _late_effect(run: RunLog, number: int, config: Config, sets: Sequence[str]) -> Iterator[str]:
    """A note if `sets` change nothing of the step but the weights that it ends with."""
    once = run.settings.config(run.step(number), config).trainer.updates_per_step == 1
    if once and all(text.strip().startswith("trainer.optimizer.") for text in sets):
        yield (
            f"{', '.join(sets)} takes hold at the end of step {number}, when the weights change: "
            "its loss and gradient are of the weights before, as recorded"
        ) + (
            f". Those of step {number + 1} differ: --steps {number}:{number + 1}"
            if run.steps[-1].version_out > number
            else ""
        )


@dataclass
class _Replay:
    """One replay under way."""

    run: RunLog
    recorded: Config
    settings: ClusterSettings
    plan: ReplayPlan
    what_if: dict[str, str]
    sets: tuple[str, ...]
    deadline: float
    progress: Progress
    notes: list[str] = field(default_factory=list)
    results: list[ReplayedStep] = field(default_factory=list)
    differing: list[Difference] = field(default_factory=list)
    first: FirstDifference | None = None
    loading: float = 0.0
    settings_of_steps: RecordedSettings = field(init=False)
    config: Config = field(init=False)
    learner: Learner = field(init=False)

    def __post_init__(self) -> None:
        self.settings_of_steps = self.run.settings

    def carry_out(self) -> ReplayReport:
        """Train everything and report."""
        plan = self.plan
        begin = time.monotonic()
        self._load(self._config_of(plan.steps[0]))
        self.loading = time.monotonic() - begin
        checksum = self.learner.weights_checksum()
        self._compare_weights(plan.base.version, plan.base.expected, checksum)
        begin, before = time.monotonic(), self.loading
        for step, records in self._fetched():
            self._go_on(self._config_of(step))
            checksum = self._train(step, records)
        seconds = time.monotonic() - begin - (self.loading - before)
        return ReplayReport(
            run=self.run.run,
            base_version=plan.base.version,
            checkpoint=plan.base.checkpoint,
            first=plan.first,
            results=tuple(self.results),
            differing=tuple(self.differing),
            first_difference=self.first,
            sets=self.sets,
            deterministic=self.recorded.trainer.deterministic,
            recorded_ranks=self.recorded.trainer.ranks,
            checksum=checksum,
            loading_seconds=self.loading,
            seconds=seconds,
            notes=tuple(self.notes),
        )

    def _load(self, config: Config) -> None:
        self.config = config
        self.learner = create_learner(config, starting_model(config))
        base = self.plan.base
        if base.path is None:
            return
        try:
            self.learner.load_checkpoint(base.path)
        except (PolicyError, WeightsError) as error:
            if not base.path.is_dir():
                error.hint = "A trainer that goes on removes old checkpoints: try again."
            else:
                error.hint = "Replay without checkpoints, from version 0: --no-checkpoint."
            raise

    def _config_of(self, step: Step) -> Config:
        """What `step` is trained with."""
        changes = self.what_if if step.version_out >= self.plan.first else {}
        return with_settings(self.settings_of_steps.config(step, self.recorded), changes)

    def _go_on(self, config: Config) -> None:
        """Go on with `config` from the weights and the optimizer's state as they are."""
        if with_settings(self.config, recorded_values(config)) == config:
            self.config = config  # `redo_step` configures the learner
            return
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="dora-replay-") as name:
            self.learner.save_checkpoint(Path(name))
            self.config = config
            self.learner = create_learner(config, starting_model(config))
            self.learner.load_checkpoint(Path(name))
        self.loading += time.monotonic() - begin

    def _fetched(self) -> Iterator[tuple[Step, dict[Place, Trajectory]]]:
        topic = self.run.topics.trajectories
        with LogReader(self.settings, client_id=f"{self.run.run}.replay") as reader:
            for steps in batches(self.plan.steps):
                records = fetch_steps(reader, topic, steps, self.deadline)
                for step in steps:
                    yield step, records

    def _train(self, step: Step, records: dict[Place, Trajectory]) -> str:
        redone = redo_step(step, records, self.learner, self.config)
        checksum = self.learner.weights_checksum()
        result = ReplayedStep(
            step=step.version_out,
            asked=step.version_out >= self.plan.first,
            trajectories=redone.trajectories,
            recorded=compared(step.metrics),
            replayed=compared(redone.metrics),
            recorded_checksum=step.weights_checksum,
            checksum=checksum,
            seconds=redone.seconds,
        )
        self.results.append(result)
        if not self.what_if or not result.asked:
            metric = next(iter(result.differing), "weights")
            if metric != "weights" and self.first is None:
                old, new = result.recorded[metric], result.replayed[metric]
                assert not same(old, new)
                self.first = FirstDifference(result.step, metric, old, new)
            self._compare_weights(result.step, step.weights_checksum, checksum)
        self.progress(len(self.results), len(self.plan.steps))
        return checksum

    def _compare_weights(self, version: int, announced: str | None, redone: str) -> None:
        if announced is None:
            self.notes.append(f"version {version} is not announced any more: not compared")
            return
        if announced == redone:
            return
        log.info("version %d: %s was announced, %s replayed", version, announced, redone)
        self.differing.append(Difference(version, announced, redone))
        if self.first is None:
            sizes = self._largest(version)
            self.first = FirstDifference(version, "weights", announced, redone, *sizes)

    def _largest(self, version: int) -> tuple[float | None, str | None]:
        """The largest difference to the announced weights and its tensor, if they are stored."""
        policy = self.run.policies.get(version)
        if policy is None or self.config.trainer.engine == "emulated":
            return None, None
        with tempfile.TemporaryDirectory(prefix="dora-replay-") as cache:
            try:
                return difference_to_published(self.learner, policy, self.config, Path(cache))
            except (WeightsError, RunError) as error:
                self.notes.append(f"version {version} cannot be compared: {error.message}")
                return None, None


def batches(steps: Sequence[Step], most: int = TRAJECTORIES_AT_ONCE) -> Iterator[list[Step]]:
    """The steps in runs of at most `most` trajectories, of one step at least."""
    batch: list[Step] = []
    count = 0
    for step in steps:
        size = sum(len(ref.samples) for ref in step.trained)
        if batch and count + size > most:
            yield batch
            batch, count = [], 0
        batch.append(step)
        count += size
    if batch:
        yield batch


def _without_waits(config: Config) -> Config:
    """`config` with an emulated trainer that does not wait: its weights do not depend on that."""
    still = {"step_seconds": 0.0, "seconds_per_token": 0.0, "publish_seconds": 0.0}
    emulated = config.trainer.emulated.model_copy(update=still)
    trainer = config.trainer.model_copy(update={"emulated": emulated})
    return config.model_copy(update={"trainer": trainer})
