"""A chaos run: starts everything, strikes it as planned, lets it end in order, proves.

Invariant: each fault is made on a victim that is well (the run has recovered from its last fault).
Whatever happens, nothing that was started outlives `run`.
"""

import logging
import time
from pathlib import Path

from dora.errors import DoraError
from tests.chaos.agenda import Agenda
from tests.chaos.plan import plan
from tests.chaos.profiles import Profile
from tests.chaos.proof import prove
from tests.chaos.report import Findings, Outcome
from tests.chaos.scene import Scene
from tests.chaos.upkeep import ChaosFailure, Upkeep

log = logging.getLogger(__name__)

_WARM_STEPS = 2
_LAST_SECONDS = 300.0
_ORDERLY_SECONDS = 90.0


class Campaign:
    """One chaos run in `directory`; `run` does everything."""

    def __init__(self, directory: Path, profile: Profile, seed: int, faults: int) -> None:
        self._profile = profile
        self._begun = time.monotonic()
        planned = plan(seed, faults, profile.mix)
        self._agenda = Agenda(list(planned), profile.at_once)
        self.findings = Findings(
            seed,
            profile.engine,
            [Outcome(fault) for fault in planned],
            max_staleness_allowed=profile.max_staleness,
        )
        self._scene = Scene(directory, profile, seed)
        self._upkeep = Upkeep(self._scene, profile, self._agenda, self.findings)

    def run(self) -> Findings:
        """Start, faults, end, proof. What the run does wrong is in the findings' failures."""
        try:
            try:
                self._start()
                self._strike()
                self._finish()
            except DoraError as error:
                self._failed(error)
            self._upkeep.processes.end()
            if self._scene.broker_lives:
                log.info("audit, conservation and redo of the whole ledger")
                prove(self._scene, self.findings)
            self.findings.disk_mib = self._scene.disk_mib()
        except DoraError as error:
            self.findings.failures.append(str(error))
        finally:
            self._upkeep.processes.end()
            self._scene.close()
            self.findings.wall_seconds = time.monotonic() - self._begun
        return self.findings

    def _failed(self, error: DoraError) -> None:
        log.error("%s\nthe processes' last words:\n%s", error, self._upkeep.processes.tails())
        self.findings.failures.append(str(error))
        self._upkeep.thaw_broker()

    def _start(self) -> None:
        upkeep = self._upkeep
        log.info("starting a broker and the run in %s", self._scene.directory)
        self._scene.start()
        upkeep.start()
        upkeep.until(
            lambda: upkeep.progress.newest >= _WARM_STEPS,
            self._profile.patience,
            lambda: f"version {_WARM_STEPS} after the start",
        )

    def _strike(self) -> None:
        upkeep, agenda = self._upkeep, self._agenda
        log.info("%d faults are to come", len(agenda.pending))
        agenda.begin((*upkeep.posts, "broker"), time.monotonic())
        while not agenda.done or upkeep.busy():
            now = time.monotonic()
            agenda.settle(upkeep.busy(), now)
            fault = agenda.take(upkeep.busy(), now)
            if fault is not None:
                upkeep.strike(fault)
            upkeep.turn()

    def _finish(self) -> None:
        """Train what is outstanding, and let everything end by itself."""
        upkeep = self._upkeep
        log.info("all faults are made: letting the run end")
        upkeep.ending = True
        # Both have to hear which step is the last.
        upkeep.end_in_order(("trainer", "coordinator"), _ORDERLY_SECONDS)
        upkeep.observe_rest()
        last = upkeep.progress.newest + self._profile.max_staleness + 2
        upkeep.settings["trainer.steps"] = str(last)
        for post in ("trainer", "coordinator"):
            upkeep.launch(post)
        upkeep.until(
            lambda: upkeep.all_ended,
            _LAST_SECONDS,
            lambda: (
                "the end of "
                + ", ".join(child.name for child in upkeep.processes.children)
                + f" after version {last}"
            ),
        )
        upkeep.observe_rest()
        progress = upkeep.progress
        if progress.newest != last or progress.outstanding:
            raise ChaosFailure(
                f"the run ended at version {progress.newest} of {last} with "
                f"{len(progress.outstanding)} groups outstanding: "
                + ", ".join(sorted(progress.outstanding)[:10])
            )
