"""Redoing committed steps from the log.

Invariant: a redone step trains exactly the trajectories that its ledger entry names, by partition
and offset, in the recorded order; and its weights are compared with what was announced.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from dora.bus.reader import LogReader, Unreadable
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.config import Config
from dora.config_training import LossSection
from dora.consumers.batches import Sample
from dora.consumers.checkpoints import Checkpoints
from dora.consumers.learner import Learner
from dora.consumers.ledger import History
from dora.consumers.planner import prepare_samples
from dora.errors import DeadlineError, RunError
from dora.schemas.records import GroupRef, Step, Trajectory
from dora.weights.store import WeightStore
from dora.weights.tensors import read_tensors

log = logging.getLogger(__name__)

READ_SECONDS = 300.0
"""How long to wait for trajectories that are in the log."""

REDO_TOLERANCE = 1e-2
"""Largest difference, relative to the largest weight of a tensor, that a redo may have where the
trainer is not deterministic."""

Place = tuple[int, int]


def fetch_trajectories(
    reader: LogReader, topic: str, places: Iterable[Place], deadline: float
) -> dict[Place, Trajectory]:
    """The trajectories at the given (partition, offset) places.

    `reader` is used for nothing else. Raises RunError if a place holds something else, BusError if
    retention deleted it, DeadlineError (seconds) if the cluster does not deliver it.
    """
    wanted: dict[int, set[int]] = {}
    for partition, offset in places:
        wanted.setdefault(partition, set()).add(offset)
    found: dict[Place, Trajectory] = {}
    until = time.monotonic() + deadline
    reader.assign({(topic, partition): min(offsets) for partition, offsets in wanted.items()})
    while wanted:
        for message in reader.poll(timeout=0.5):
            missing = wanted.get(message.partition)
            if missing is None:
                continue
            if message.offset in missing:
                if not isinstance(message.value, Trajectory):
                    what = (
                        f"cannot be read ({message.value.reason})"
                        if isinstance(message.value, Unreadable)
                        else f"holds a {type(message.value).__name__}"
                    )
                    raise RunError(
                        f"{topic} partition {message.partition} offset {message.offset}, which the "
                        f"ledger trained, {what}"
                    )
                found[message.partition, message.offset] = message.value
                missing.discard(message.offset)
            if missing and message.offset > min(missing):
                raise RunError(
                    f"{topic} partition {message.partition} has no record at offset "
                    f"{min(missing)}, which the ledger trained"
                )
            if not missing:
                del wanted[message.partition]
        if wanted and time.monotonic() > until:
            partition, offsets = next(iter(wanted.items()))
            raise DeadlineError(
                f"{topic} partition {partition} offset {min(offsets)} did not arrive in "
                f"{deadline:g} s"
            )
    return found


def samples_of_step(
    step: Step,
    fetch: Callable[[list[Place]], Mapping[Place, Trajectory]],
    vocabulary: int,
    settings: LossSection,
) -> list[tuple[Sample, ...]]:
    """The groups that `step` trained, in the recorded order."""
    places = [(s.partition, s.offset) for ref in step.trained for s in ref.samples]
    records = fetch(places)
    return [_samples_of(ref, records, vocabulary, settings) for ref in step.trained]


def _samples_of(
    ref: GroupRef, records: Mapping[Place, Trajectory], vocabulary: int, settings: LossSection
) -> tuple[Sample, ...]:
    trajectories = [records[s.partition, s.offset] for s in ref.samples]
    for sample, trajectory in zip(ref.samples, trajectories, strict=True):
        if (trajectory.group_id, trajectory.sample) != (ref.group_id, sample.sample):
            raise RunError(
                f"partition {sample.partition} offset {sample.offset} holds trajectory "
                f"{trajectory.trajectory_id}, the ledger says {ref.group_id}/{sample.sample}"
            )
    return prepare_samples(trajectories, ref.version, vocabulary, settings)


def check_redone(step: Step, checksum: str, *, deterministic: bool, schedule: str) -> bool:
    """Whether the weights after redoing `step` are bit-identical to the announced ones.

    RunError if they are not although the trainer is deterministic.
    """
    if checksum == step.weights_checksum:
        return True
    if deterministic:
        reasons = "another machine, or another version of torch or DeepSpeed"
        if schedule != "constant":
            reasons += f", or another trainer.steps (the {schedule} schedule depends on it)"
        raise RunError(
            f"redoing step {step.version_in} -> {step.version_out} from the log gave weights with "
            f"checksum {checksum[:16]}, the ledger says {step.weights_checksum[:16]}",
            hint=f"Something that the result depends on changed: {reasons}. Restore it, or set "
            "trainer.deterministic = false to accept small differences.",
        )
    return False


def check_close(state: Mapping[str, torch.Tensor], published: Path, version: int) -> float:
    """Largest difference between redone weights and the published ones of `version`, relative to
    the largest weight of each tensor; RunError if it exceeds REDO_TOLERANCE."""
    largest = 0.0
    for name, expected in read_tensors(published).items():
        if name not in state:
            raise RunError(f"the published version {version} has {name}, the trainer does not")
        found = state[name].detach().cpu().float()
        scale = max(float(expected.float().abs().max()), 1e-8)
        difference = float((found - expected.float()).abs().max()) / scale
        largest = max(largest, difference if math.isfinite(difference) else math.inf)
    if largest > REDO_TOLERANCE:
        raise RunError(
            f"redone weights of version {version} differ from the published ones by {largest:.2g} "
            f"of the largest weight; {REDO_TOLERANCE:g} is accepted",
            hint="Redo on the machine and with the software that trained first.",
        )
    return largest


class Recovery:
    """Brings a fresh learner to the newest committed version of a run."""

    def __init__(
        self,
        config: Config,
        settings: ClusterSettings,
        learner: Learner,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._settings = settings
        self._learner = learner
        self._say = say
        self._topic = RunTopics(config.run.name).trajectories
        self._checkpoints = Checkpoints(config.run_directory / "checkpoints")

    def run(self, history: History, newest: int) -> None:
        """Load the newest checkpoint (without one, the starting model is loaded already), and redo
        the steps after it.

        Raises RunError if the weights differ from what the ledger announced, WeightsError if the
        checkpoint is damaged, and what `fetch_trajectories` raises.
        """
        source = self._restore(history)
        identical = True
        if history.redo:
            reader = LogReader(self._settings, client_id="trainer-recovery")
            try:
                for step in history.redo:
                    identical = self._redo(step, reader)
            finally:
                reader.close()
        if not identical:
            store = WeightStore.of(self._config)
            scratch = self._config.run_directory / "scratch"
            published = store.fetch(history.policies[newest], scratch)
            difference = check_close(self._learner.export_state(), published, newest)
            log.warning("redone weights differ from the published ones by %.2g", difference)
        log.info(
            "recovered version %d from %s, %d steps redone from the log",
            newest,
            source,
            len(history.redo),
        )

    def _restore(self, history: History) -> str:
        if history.base is not None and history.base.checkpoint is not None:
            name = history.base.checkpoint
            self._learner.load_checkpoint(self._checkpoints.path(name))
            expected, source = history.base.weights_checksum, f"checkpoint {name}"
        else:
            if 0 not in history.policies:
                raise RunError("the policies topic has no version 0, although the run has begun")
            expected, source = history.policies[0].weights_checksum, "the starting model"
        found = self._learner.weights_checksum()
        if found != expected:
            raise RunError(
                f"{source} has weights with checksum {found[:16]}, the ledger says {expected[:16]}",
                hint="The files were changed or damaged since. Restore them; a damaged checkpoint "
                "may be removed, its steps are then redone from the log.",
            )
        return source

    def _redo(self, step: Step, reader: LogReader) -> bool:
        self._say(f"redoing step {step.version_in} -> {step.version_out}")
        loss = self._config.trainer.loss
        groups = samples_of_step(
            step,
            lambda places: fetch_trajectories(reader, self._topic, places, READ_SECONDS),
            self._learner.vocabulary,
            loss,
        )
        self._learner.update(groups, step.version_in)
        return check_redone(
            step,
            self._learner.weights_checksum(),
            deterministic=self._config.trainer.deterministic,
            schedule=self._config.trainer.optimizer.schedule,
        )
