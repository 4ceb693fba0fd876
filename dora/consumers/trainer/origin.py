"""A run that begins with a step of another run: with its weights and its optimizer's state.

The step comes back from the other run's nearest checkpoint and a redo of the steps after it from
that run's log, and must have the weights that its ledger names. It is kept as a checkpoint of
version 0 of the new run, whose recovery and replays begin there.
"""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dora.bus.reader import LogReader
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics, TopicAdmin
from dora.config import Config
from dora.consumers.learner.learner import Learner
from dora.consumers.replay.plan import make_plan
from dora.consumers.trainer.checkpoints import Checkpoints, checkpoint_name
from dora.consumers.trainer.recovery import READ_SECONDS, redo_step
from dora.core.identity import differences
from dora.errors import RunError, UsageError
from dora.log.continuation import recorded_start
from dora.log.recorded_config import recorded_config
from dora.log.run_log import RunLog
from dora.log.trained_records import fetch_steps

log = logging.getLogger(__name__)

_FORM = re.compile(r"([a-z0-9][a-z0-9_-]*)@(\d+)")


@dataclass(frozen=True, slots=True)
class Origin:
    """The step of `run` that made version `step`; 0 is what that run began with."""

    run: str
    step: int

    @classmethod
    def parse(cls, text: str) -> "Origin":
        """Of `RUN@STEP`; UsageError for anything else."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise UsageError(f"--from {text}: not of the form RUN@STEP, such as demo@12")
        return cls(match[1], int(match[2]))

    def __str__(self) -> str:
        return f"{self.run}@{self.step}"


def find_origin(config: Config, settings: ClusterSettings, origin: Origin) -> "OriginStep | None":
    """The step, with all that can be checked before it is loaded; None if the run of `config` began
    from it already.

    RunError if that run began otherwise, if its model or trainer is of another kind than the
    origin's, or if the step's weights and optimizer cannot be had.
    """
    run = config.run.name
    if run == origin.run:
        raise UsageError(f"--from {origin}: name the new run with --as NEWRUN, or run.name")
    with TopicAdmin(settings) as admin:
        begun = RunTopics(run).steps in admin.existing(run)
    started = recorded_start(run, settings) if begun else None
    if started is None:
        return OriginStep(config, settings, origin)
    if started.origin != str(origin):
        raise RunError(
            f"run {run} began from {started.origin or 'its model'} already, not from {origin}",
            hint="Give the new run another name: --as NEWRUN.",
        )
    return None


class OriginStep:
    """A step of another run, in whose log and checkpoints it is; raises as `find_origin`."""

    def __init__(self, config: Config, settings: ClusterSettings, origin: Origin) -> None:
        self.origin = origin
        self._config = config
        self._settings = settings
        self._run = RunLog(settings, origin.run)
        self._run.check_version(origin.step)
        self._recorded = recorded_config(self._run.started, config.kafka)
        self._check_same_kind()
        ranks = config.trainer.ranks
        first, last = origin.step + 1, origin.step
        self._plan = make_plan(self._run, self._recorded, settings, first, last, ranks=ranks)
        if ranks > 1 and self._plan.steps:
            kept = Checkpoints(self._recorded.run_directory / "checkpoints").names()
            there = [s.version_out for s in self._run.steps if s.checkpoint in kept]
            raise RunError(
                f"--from {origin}: there is no checkpoint of this step, and several ranks cannot "
                f"redo the way to it; there are those of {', '.join(map(str, there)) or 'none'}",
                hint="Begin with trainer.ranks = 1, or from a step with a checkpoint.",
            )

    def _check_same_kind(self) -> None:
        given, recorded = _kind(self._config), _kind(self._recorded)
        changed = differences(recorded, given)
        if changed:
            told = "; ".join(f"{key}: {values}" for key, values in changed.items())
            raise RunError(
                f"{self.origin} cannot be trained on: {told}",
                hint="To take only its weights, with a fresh optimizer, set policy.model to the "
                "directory of its version in the weight store.",
            )

    def load(self, learner: Learner, report: Callable[[str], None]) -> None:
        """Bring a fresh `learner` to the step, with a count of updates that begins at 0, and keep
        that as the checkpoint of version 0.

        RunError if its weights differ from the ledger's; raises what `fetch_steps` and `learner`
        raise.
        """
        base, steps = self._plan.base, self._plan.steps
        if not steps:
            if base.path is not None:
                learner.load_checkpoint(base.path, updates=0)
        else:
            self._redo(learner, report)
        found, expected = learner.weights_checksum(), self._expected()
        if found != expected and self._config.recovery.on_mismatch != "accept":
            raise RunError(
                f"{self.origin} has weights with checksum {found[:16]} here, its ledger says "
                f"{expected[:16]}",
                hint="Files were changed, or a redo gives other bits on this machine or with this "
                'trainer.deepspeed. recovery.on_mismatch = "accept" begins with these weights.',
            )
        Checkpoints(self._config.run_directory / "checkpoints").write(
            checkpoint_name(0, found), learner.save_checkpoint
        )
        log.info("the run begins with %s, from %s, %d steps redone from the log", self.origin,
                 base.checkpoint or "its starting model", len(steps))  # fmt: skip

    def _redo(self, learner: Learner, report: Callable[[str], None]) -> None:
        base, settings = self._plan.base, self._run.settings
        if base.path is not None:
            learner.load_checkpoint(base.path)
        with LogReader(self._settings, client_id="origin") as reader:
            for step in self._plan.steps:
                report(f"redoing step {step.version_out} of {self.origin}")
                topic = self._run.topics.trajectories
                records = fetch_steps(reader, topic, [step], READ_SECONDS)
                redo_step(step, records, learner, settings.config(step, self._recorded))
        learner.configure(self._config)
        learner.updates = 0

    def _expected(self) -> str:
        if self.origin.step:
            return self._run.step(self.origin.step).weights_checksum
        return self._run.policies[0].weights_checksum


def _kind(config: Config) -> Mapping[str, Any]:
    """What a checkpoint depends on. With an adapter also its base model, which is not in it."""
    policy, lora = config.policy, config.policy.lora
    adapted = None if lora is None else {"model": policy.model, **lora.model_dump(mode="json")}
    return {
        "policy": {"dtype": policy.dtype, "lora": adapted},
        "trainer": {"engine": config.trainer.engine},
    }
