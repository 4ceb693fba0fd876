"""Redoing a whole run: every committed step again, from version 0 and the log alone.

Invariant: nothing is written, neither to the log nor to the run's directory, so that a run that is
going on may be redone beside it; and no checkpoint is read, so that what is compared depends on the
starting model and on the logged trajectories only.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dora.bus.reader import LogReader
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.config import Config
from dora.consumers.learning import create_learner, starting_model
from dora.consumers.ledger import History, new_state, read_ledger
from dora.consumers.recovery import fetch_steps, samples_of_step
from dora.errors import RunError

log = logging.getLogger(__name__)

STEPS_AT_ONCE = 64
"""Steps whose trajectories are fetched and held in memory together."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A version whose redone weights are not those that were announced."""

    version: int
    announced: str
    redone: str


@dataclass(frozen=True, slots=True)
class RedoReport:
    """The outcome of redoing `steps` steps. `checksum` is that of the last version's weights."""

    run: str
    steps: int
    checksum: str
    differing: tuple[Difference, ...]

    @property
    def identical(self) -> bool:
        """Whether every version came out bit by bit as it was announced."""
        return not self.differing

    def to_json(self) -> dict[str, Any]:
        """The report as one JSON object."""
        return {"identical": self.identical, **asdict(self)}


def redo_run(
    config: Config,
    settings: ClusterSettings,
    *,
    deadline: float = 300.0,
    progress: Callable[[int, int], None] = lambda done, steps: None,
) -> RedoReport:
    """Train the run of `config` again as its ledger says, and compare the weights' checksum with
    the announced one at version 0 and after every step.

    `deadline` (seconds) bounds each read of the log; `progress` is called with the steps redone and
    their number. A difference is reported and the redo goes on with the weights that it has, so
    that later versions differ too. Raises RunError if the run has not begun or its log cannot be
    redone, and what Kafka and the model refuse.
    """
    history = _history(config, settings, deadline)
    learner = create_learner(config, starting_model(config))
    differing: list[Difference] = []

    def compare(version: int, announced: str) -> str:
        redone = learner.weights_checksum()
        if redone != announced:
            log.warning("version %d: %s was announced, %s redone", version, announced, redone)
            differing.append(Difference(version, announced, redone))
        return redone

    checksum = compare(0, history.policies[0].weights_checksum)
    done, topic = 0, RunTopics(config.run.name).trajectories
    with LogReader(settings, client_id=f"{config.run.name}.redo") as reader:
        for start in range(0, len(history.redo), STEPS_AT_ONCE):
            steps = history.redo[start : start + STEPS_AT_ONCE]
            records = fetch_steps(reader, topic, steps, deadline)
            for step in steps:
                groups = samples_of_step(step, records, learner.vocabulary, config)
                learner.update(groups, step.version_in)
                checksum = compare(step.version_out, step.weights_checksum)
                done += 1
                progress(done, len(history.redo))
    return RedoReport(config.run.name, done, checksum, tuple(differing))


def _history(config: Config, settings: ClusterSettings, deadline: float) -> History:
    """The committed ledger, with every step in `redo`."""
    state = new_state(config)
    topics = RunTopics(config.run.name)
    with LogReader(settings, client_id=f"{config.run.name}.redo") as reader:
        history = read_ledger(reader, topics, state, (), deadline)
    if history.started is None or 0 not in history.policies:
        raise RunError(f"run {config.run.name} has not begun: there is nothing to redo")
    return history
