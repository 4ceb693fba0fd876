"""Redoing committed steps from the log: `redo_step` for recovery, replay and `dora inspect`, and
the trainer's recovery.

A redone step trains exactly the trajectories that its ledger entry names, by partition and offset,
in the recorded order. Recovery compares its weights with the announced ones and loads a checkpoint
only if the ledger names it and all its bytes are as they were written.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dora.bus.reader import LogReader
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.config import Config
from dora.config.trainer import RecoverySection, TrainerSection
from dora.consumers.learner.learner import Learner
from dora.consumers.trainer.batch_builder import prepare_samples
from dora.consumers.trainer.checkpoints import Checkpoints, starting_checkpoint
from dora.errors import BusError, RunError, WeightsError
from dora.log.ledger import History, whole_ledger
from dora.log.trained_records import Place, fetch_steps, places_of
from dora.schemas.records import GroupRef, Policy, Step, Trajectory
from dora.telemetry.meter import meter
from dora.weights.store import WeightStore
from dora.weights.tensors import read_tensors

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

READ_SECONDS = 300.0
"""How long to wait for trajectories that are in the log."""


class RedoStoppedError(Exception):
    """The trainer was asked to end during a redo. Nothing was written: the next start redoes it."""


@dataclass(frozen=True, slots=True)
class RedoneStep:
    """What training a step again gave. `seconds` is the training alone."""

    metrics: dict[str, float]
    trajectories: int
    seconds: float


def redo_step(
    step: Step, records: Mapping[Place, Trajectory], learner: Learner, config: Config
) -> RedoneStep:
    """Train `step` again on exactly its trajectories, which `records` hold, in the recorded order,
    with the values of `config`, those of its time (`RecordedSettings`).

    RunError or RecordError if these are not what the ledger says; raises what `learner` raises.
    """
    learner.configure(config)
    newest = step.version_in if config.schedule.kind == "partial" else None
    groups = [
        prepare_samples(
            _trajectories_of(ref, records),
            ref.version,
            learner.vocabulary,
            config.trainer.loss,
            newest,
        )
        for ref in step.trained
    ]
    begin = time.monotonic()
    metrics = learner.update(groups, step.version_in, places=places_of(step.trained))
    return RedoneStep(metrics, sum(map(len, groups)), time.monotonic() - begin)


def _trajectories_of(ref: GroupRef, records: Mapping[Place, Trajectory]) -> list[Trajectory]:
    trajectories = [records[s.partition, s.offset] for s in ref.samples]
    for sample, trajectory in zip(ref.samples, trajectories, strict=True):
        if (trajectory.group_id, trajectory.sample) != (ref.group_id, sample.sample):
            raise RunError(
                f"partition {sample.partition} offset {sample.offset} holds trajectory "
                f"{trajectory.trajectory_id}, the ledger says {ref.group_id}/{sample.sample}"
            )
    return trajectories


@dataclass(frozen=True, slots=True)
class Deviation:
    """Redone weights of `version` that are not those that were announced."""

    version: int
    announced: str
    redone: str
    largest: float | None
    """Largest difference relative to the largest weight of its tensor (infinite where a weight is
    no number); None if the announced weights are not stored any more."""
    tensor: str | None
    """The tensor with the largest difference."""

    def __str__(self) -> str:
        text = (
            f"redoing step {self.version - 1} -> {self.version} from the log gave weights with "
            f"checksum {self.redone[:16]}, the ledger says {self.announced[:16]}; "
        )
        if self.largest is None:
            return text + "by how much they differ is not known: the announced ones are not kept"
        if self.tensor is None:
            return text + "the values are equal"
        return (
            text + f"the largest difference is {self.largest:.2g} of the largest weight of its "
            f"tensor, in {self.tensor}"
        )


def largest_difference(
    redone: "Mapping[str, torch.Tensor]", announced: "Mapping[str, torch.Tensor]"
) -> tuple[float, str | None]:
    """Largest difference relative to the largest weight of each tensor, and the tensor it is in.

    RunError if the tensors are not the same ones.
    """
    largest, where = 0.0, None
    if redone.keys() != announced.keys():
        odd = sorted(redone.keys() ^ announced.keys())[0]
        raise RunError(f"{odd} is in only one of the redone and the announced weights")
    for name, expected in announced.items():
        if not expected.numel():
            continue
        found = redone[name].detach().cpu().float()
        scale = max(float(expected.float().abs().max()), 1e-8)
        difference = float((found - expected.float()).abs().max()) / scale
        if not difference <= largest:  # no number is the largest difference of all
            largest = difference if math.isfinite(difference) else math.inf
            where = name
    return largest, where


def difference_to_published(
    learner: Learner, policy: Policy, config: Config, cache: Path
) -> tuple[float, str | None]:
    """`largest_difference` of the learner's weights and the published ones of `policy`, which are
    fetched into `cache`. WeightsError if they are not stored any more."""
    directory = WeightStore.of(config).fetch(policy, cache)
    return largest_difference(learner.export_state(), read_tensors(directory))


def check_allowed(deviation: Deviation, trainer: TrainerSection, recovery: RecoverySection) -> None:
    """RunError if the configuration does not allow such a difference."""
    allowed = 0.0 if trainer.deterministic else recovery.tolerance
    within = deviation.largest is not None and deviation.largest <= allowed
    if recovery.on_mismatch == "accept" or (within and not trainer.deterministic):
        return
    reasons = (
        "another machine, another version of torch or DeepSpeed, or another trainer.deepspeed, "
        "trainer.ranks or trainer.deterministic"
    )
    demanded = (
        "bit-identical weights are demanded (trainer.deterministic)"
        if trainer.deterministic
        else f"{recovery.tolerance:g} is allowed (recovery.tolerance)"
    )
    raise RunError(
        f"{deviation}; {demanded}",
        hint=f"Something that the result depends on changed: {reasons}. Restore it, or set "
        'recovery.on_mismatch = "accept" to go on with the redone weights.',
    )


class Recovery:
    """Brings a fresh learner to the newest committed version of a run.

    `report` is called with what is going on. Between two steps `stop` is looked at. `damaged` names
    the checkpoints that could not be used.
    """

    def __init__(
        self,
        config: Config,
        settings: ClusterSettings,
        learner: Learner,
        report: Callable[[str], None],
        stop: threading.Event,
    ) -> None:
        self._config = config
        self._settings = settings
        self._learner = learner
        self._report = report
        self._stop = stop
        self._topic = RunTopics(config.run.name).trajectories
        self._checkpoints = Checkpoints(config.run_directory / "checkpoints")
        self.damaged: list[str] = []

    def run(self, history: History) -> Deviation | None:
        """Load the newest checkpoint that is whole, or what the run began with, and redo the steps
        after it. A difference that is returned was accepted.

        Raises RunError if the weights differ from what the ledger announced by more than is
        allowed, or a step cannot be redone; WeightsError and PolicyError if a checkpoint cannot be
        loaded; RedoStoppedError if `stop` is set; and what `fetch_trajectories` raises.
        """
        base = self._intact_checkpoint(history.bases)
        if base is None and self.damaged:
            # this history begins at a checkpoint that turned out to be damaged
            log.warning("no checkpoint is left: redoing the run from version 0")
            history = whole_ledger(self._config, self._settings, READ_SECONDS)
        source = self._restore(base, history)
        steps = history.redo_after(base)
        if steps:
            samples = sum(len(ref.samples) for step in steps for ref in step.trained)
            seconds = sum(step.metrics.get("train_seconds", 0.0) for step in steps)
            text = (
                f"redoing {len(steps)} steps, {samples:,} trajectories, from {source}; "
                f"training them took {seconds:.0f} s before"
            )
            log.info("%s", text)
            self._report(text)
        deviation = self._redo_all(steps, history)
        last = steps[-1] if steps else base
        newest = 0 if last is None else last.version_out
        count = len(steps)
        log.info(
            "recovered version %d from %s, %d steps redone from the log", newest, source, count
        )
        return deviation

    def _intact_checkpoint(self, bases: Sequence[Step]) -> Step | None:
        by_name = {step.checkpoint: step for step in bases if step.checkpoint is not None}
        name, damaged = self._checkpoints.newest_intact(list(by_name))
        for other, reason in damaged.items():
            log.warning(
                "checkpoint %s is damaged, so an older one is used and more steps are redone: %s",
                other,
                reason,
            )
        self.damaged = list(damaged)
        return None if name is None else by_name[name]

    def _restore(self, base: Step | None, history: History) -> str:
        if base is not None and base.checkpoint is not None:
            self._learner.load_checkpoint(self._checkpoints.path(base.checkpoint))
            expected, source = base.weights_checksum, f"checkpoint {base.checkpoint}"
        else:
            if 0 not in history.policies or history.started is None:
                raise RunError("the policies topic has no version 0, although the run has begun")
            expected, source = history.policies[0].weights_checksum, "the starting model"
            name = starting_checkpoint(history.started, history.policies[0])
            if name is not None:
                source = f"checkpoint {name}, with which the run began"
                self._checkpoints.verify(name)
                self._learner.load_checkpoint(self._checkpoints.path(name))
        found = self._learner.weights_checksum()
        if found != expected:
            raise RunError(
                f"{source} has weights with checksum {found[:16]}, the ledger says {expected[:16]}",
                hint="The files were changed since. Restore them; a checkpoint may be removed, its "
                "steps are then redone from the log.",
            )
        return source

    def _redo_all(self, steps: Sequence[Step], history: History) -> Deviation | None:
        deviation: Deviation | None = None
        deterministic = self._config.trainer.deterministic
        if not steps:
            return None
        with LogReader(self._settings, client_id="trainer-recovery") as reader:
            for done, step in enumerate(steps):
                if self._stop.is_set():
                    raise RedoStoppedError
                text = (
                    f"redoing step {step.version_in} -> {step.version_out}, "
                    f"{done + 1} of {len(steps)}"
                )
                log.info("%s", text)
                self._report(text)
                self._redo(step, reader, history)
                # an accepted difference stays in all later steps: only its size at the end matters
                known = deviation is not None or not deterministic
                if step is not steps[-1] and known:
                    continue
                redone = self._learner.weights_checksum()
                if redone != step.weights_checksum:
                    deviation = self._deviation(step, redone, history)
                    check_allowed(deviation, self._config.trainer, self._config.recovery)
                    log.warning("accepted: %s", deviation)
                elif step is steps[-1]:
                    deviation = None
        self._learner.configure(self._config)
        return deviation

    def _deviation(self, step: Step, redone: str, history: History) -> Deviation:
        version = step.version_out
        largest: float | None = None
        tensor: str | None = None
        scratch = self._config.run_directory / "scratch"
        try:
            largest, tensor = difference_to_published(
                self._learner, history.policies[version], self._config, scratch
            )
        except WeightsError as error:
            if not self._config.trainer.deterministic:
                raise  # there is nothing else to compare with
            log.warning("version %d cannot be compared: %s", version, error.message)
        return Deviation(version, step.weights_checksum, redone, largest, tensor)

    def _redo(self, step: Step, reader: LogReader, history: History) -> None:
        try:
            records = fetch_steps(reader, self._topic, [step], READ_SECONDS)
            assert history.settings is not None, "a run with a step has begun"
            config = history.settings.config(step, self._config)
            redo_step(step, records, self._learner, config)
        except BusError as error:
            if not self.damaged:
                raise
            raise RunError(
                f"step {step.version_in} -> {step.version_out} cannot be redone: {error.message}",
                hint=f"It is needed because checkpoint {', '.join(self.damaged)} is damaged. "
                "Restore that, or give run.name another value.",
            ) from error
        meter().count("dora_trainer_redone_steps_total")
