"""Schedules against one another with the real engines and the real trainer.

Trainer and engines have processors of their own, so that no schedule gains by taking the other
side's. Every mode trains on the same prompts from the same starting policy.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora.bench.measures import Emulation, measure
from dora.bench.runs import Cores, Launcher, Report, remove_run, run_name, run_steps, violations_of
from dora.bus.settings import cluster_settings
from dora.consumers.audit import audit_run
from dora.consumers.monitor.monitor import RunMonitor
from dora.consumers.monitor.summary import summarize
from dora.errors import UsageError
from dora.log.schedule_log import read_schedule_log
from dora.simulation.presets import schedule_variant

FIGURES = (
    "steps_per_second",
    "trajectories_per_second",
    "trainer_idle_share",
    "rollout_only_share",
    "staleness_mean",
    "success_first",
    "success_last",
)
_READ_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Mode:
    """A schedule, by full weights or by adapters; `path` is its configuration."""

    name: str
    path: Path
    sets: tuple[str, ...]


def modes_of(path: Path, names: str, sets: tuple[str, ...], suffix: str) -> list[Mode]:
    """The schedules `names` (separated by commas) of the job in `path`; UsageError for an unknown
    one."""
    modes: list[Mode] = []
    for text in names.split(","):
        try:
            variant = schedule_variant(text.strip())
        except ValueError as error:
            raise UsageError(str(error)) from None
        own = (
            f"schedule.kind={variant.kind}",
            # both sides have processors of their own
            "schedule.colocated=false",
            f"trainer.streamed={str(variant.streamed).lower()}",
            f"window.max_staleness={variant.max_staleness}",
        )
        modes.append(Mode(variant.name + suffix, path, (*sets, *own)))
    return modes


@dataclass(slots=True)
class RealBench:
    """Carries out runs and keeps their results by mode. `report` gets lines for people; with `keep`
    topics and files of finished runs stay."""

    steps: int
    warmup: int
    cores: Cores
    directory: Path
    launcher: Launcher
    report: Report
    keep: bool
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def check(self, mode: Mode) -> None:
        """Load the configuration of a mode; ConfigError if it is impossible."""
        self.launcher.load(mode.path, self._sets(mode, "bench", 0))

    def run(self, mode: Mode, seed: int, repeat: int) -> None:
        """Run one mode to its end, measure and audit it, and remove what it left."""
        name = run_name(mode.name)
        sets = self._sets(mode, name, seed)

        def report(text: str) -> None:
            self.report(f"{mode.name}, seed {seed}, repeat {repeat + 1}: {text}")

        config = self.launcher.find_cluster(self.launcher.load(mode.path, sets), report)
        self.launcher.prepare(config, mode.path, sets, report)
        settings = cluster_settings(config.kafka)
        began = time.monotonic()
        measured = self.steps - self.warmup
        processes = self.launcher.processes(config, mode.path, sets, self.cores)
        processor_share = run_steps(
            config, processes, settings, warmup=self.warmup, steps=measured, report=report,
            ends_by_itself=True,
        )  # fmt: skip
        log = read_schedule_log(settings, name, _READ_SECONDS)
        measures = measure(log, self.warmup, measured, Emulation(1.0))
        with closing(RunMonitor(settings, name, steps_target=self.steps)) as monitor:
            monitor.catch_up()
            summary = summarize(monitor.snapshot())
        audit = audit_run(settings, name)
        violations, _ = violations_of(audit, partial=config.schedule.kind == "partial")
        zero = log.announced_ms[0]
        self.runs.setdefault(mode.name, []).append(
            {
                "seed": seed,
                "repeat": repeat,
                "steps_per_second": 1 / measures.step_seconds,
                "trajectories_per_second": (
                    measures.trajectories / measured / measures.step_seconds
                ),
                "trainer_idle_share": measures.trainer_idle_share,
                "rollout_only_share": measures.rollout_only_share,
                "staleness_mean": measures.staleness_mean,
                "staleness_max": measures.staleness_max,
                "success_first": summary["success_first"],
                "success_last": summary["success_last"],
                "success_source": summary["success_source"],
                "violations": violations,
                "processor_share": processor_share,
                "curve": {
                    "step": [step.version_out for step in log.steps],
                    "seconds": [(step.created_ms - zero) / 1000 for step in log.steps],
                    "success": [step.metrics.get("success_rate", 0.0) for step in log.steps],
                },
            }
        )
        if not self.keep:
            remove_run(config, settings)
        report(
            f"{1 / measures.step_seconds:.3f} steps/s, success {summary['success_last']:.3f} "
            f"({time.monotonic() - began:.0f} s)"
        )

    def _sets(self, mode: Mode, name: str, seed: int) -> tuple[str, ...]:
        return (
            *mode.sets,
            f"run.name={name}",
            f"run.directory={self.directory.absolute() / 'runs'}",
            f"run.seed={seed}",
            f"trainer.steps={self.steps}",
            "evaluation.every=0",
        )

    def summaries(self) -> dict[str, dict[str, Any]]:
        """By mode: means of `FIGURES` over its runs, and their ranges under `spread`."""
        return {name: summary_of(runs) for name, runs in self.runs.items()}

    def to_json(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "steps": self.steps,
            "warmup": self.warmup,
            "cores": {role: sorted(numbers) for role, numbers in self.cores.items()},
            "modes": self.summaries(),
            "runs": self.runs,
        }


def summary_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means and ranges over the runs of a mode."""
    values = {name: [run[name] for run in runs if run[name] is not None] for name in FIGURES}
    summary: dict[str, Any] = {n: statistics.fmean(v) if v else None for n, v in values.items()}
    return summary | {
        "spread": {name: [min(each), max(each)] for name, each in values.items() if each},
        "staleness_max": max(run["staleness_max"] for run in runs),
        "violations": sum(run["violations"] for run in runs),
        "runs": len(runs),
    }
