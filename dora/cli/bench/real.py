"""`dora bench real`: compares schedules with vLLM and DeepSpeed on this machine.

Trainer and engines have processors of their own, so that no schedule gains by taking the other
side's. Every mode trains on the same prompts from the same starting policy.
"""

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dora.bench.plots import check_plot, plot_curves
from dora.cli.bench.run import figures_table, spread, staleness, violations
from dora.cli.console import wide_console
from dora.cli.options import ConfigSource, cluster_options
from dora.config import Config
from dora.config.loading import KafkaOverrides, load_config
from dora.errors import PolicyError, UsageError
from dora.simulation.presets import schedule_variant

MODES = "sync,dora:1,dora:2,dora:3"
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


@click.command()
@click.argument(
    "config_path",
    metavar="[CONFIG]",
    default=Path("examples/spell_backward.toml"),
    type=click.Path(path_type=Path, dir_okay=False),
)
@click.option(
    "--lora", "lora_path", type=click.Path(path_type=Path, dir_okay=False), metavar="CONFIG",
    help="The same job with policy.lora: its modes are compared as well, as dora:3+lora.",
)  # fmt: skip
@click.option(
    "--schedules", "names", default=MODES, show_default=True, metavar="NAMES",
    help="As in `dora bench schedules`.",
)  # fmt: skip
@click.option(
    "--lora-schedules", "lora_names", default=MODES, show_default=True, metavar="NAMES",
    help="The same for --lora.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True)
@click.option(
    "--warmup", type=click.IntRange(min=0), default=3, show_default=True,
    help="The first of the --steps, which the rates leave out.",
)  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--seeds", default="0", show_default=True, metavar="NUMBERS", help="Each is a run of its own."
)
@click.option("--trainer-cores", metavar="NUMBERS", help="Processors of the trainer.")
@click.option("--rollout-cores", metavar="NUMBERS", help="Processors of the workers.")
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="As in `dora run`.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.png")
@click.option(
    "--directory", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    default=Path("runs/bench"), show_default=True, help="For logs and weights.",
)  # fmt: skip
@click.option("--keep", is_flag=True, help="Keep topics and files of finished runs.")
@cluster_options
def real(
    config_path: Path,
    lora_path: Path | None,
    names: str,
    lora_names: str,
    steps: int,
    warmup: int,
    repeats: int,
    seeds: str,
    trainer_cores: str | None,
    rollout_cores: str | None,
    sets: tuple[str, ...],
    json_path: Path | None,
    plot: Path | None,
    directory: Path,
    keep: bool,
    overrides: KafkaOverrides,
    broker_directory: Path,
) -> None:
    """Train the job of CONFIG with several schedules in turn, trainer and engines on processors of
    their own, and compare speed and learning.

    Each (seed, repeat, schedule) is a run from the starting policy; held-out prompts are solved
    before the first and after the last step only.
    """
    if warmup >= steps:
        raise UsageError(f"--warmup {warmup} leaves nothing of --steps {steps} to measure")
    check_plot(plot)
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise UsageError(f"--json {json_path}: there is no such directory")
    cores = _cores(trainer_cores, rollout_cores)
    modes = _modes(config_path, names, sets, "")
    if lora_path is not None:
        modes += _modes(lora_path, lora_names, sets, "+lora")
    bench = RealBench(steps, warmup, cores, directory, overrides, broker_directory, keep=keep)
    for mode in modes:
        bench.load(mode, "bench", 0)  # refuses what is impossible before hours have passed
    for seed in _numbers("--seeds", seeds):
        for repeat in range(repeats):
            for mode in modes if (seed + repeat) % 2 == 0 else modes[::-1]:
                bench.run(mode, seed, repeat)
                if json_path is not None:
                    text = json.dumps(bench.report(), indent=2)
                    json_path.write_text(text + "\n", encoding="utf-8")
    summaries = bench.summaries()
    ordered = {mode.name: summaries[mode.name] for mode in modes}
    show(ordered, wide_console())
    if plot is not None:
        curves = {name: [run["curve"] for run in bench.runs[name]] for name in ordered}
        plot_curves(plot, f"{config_path.stem}: learning by schedule", curves)


@dataclass(slots=True)
class RealBench:
    """Carries out runs and keeps their results by mode."""

    steps: int
    warmup: int
    cores: Mapping[str, frozenset[int]]
    directory: Path
    overrides: KafkaOverrides
    broker_directory: Path
    keep: bool
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def load(self, mode: Mode, name: str, seed: int) -> tuple[Config, ConfigSource]:
        """The configuration of one run; ConfigError if it is impossible."""
        own = (
            f"run.name={name}",
            f"run.directory={self.directory.absolute() / 'runs'}",
            f"run.seed={seed}",
            f"trainer.steps={self.steps}",
            "evaluation.every=0",
        )
        source = ConfigSource(mode.path, (*mode.sets, *own), self.broker_directory)
        return load_config(source.path, sets=source.sets, kafka=self.overrides), source

    def run(self, mode: Mode, seed: int, repeat: int) -> None:
        """Run one mode to its end, measure and audit it, and remove what it left."""
        from dora.bench.measures import Emulation, measure
        from dora.bus.settings import cluster_settings
        from dora.bus.topics import TopicAdmin
        from dora.cli.bench.run import find_cluster, run_name, run_steps
        from dora.consumers.audit import audit_run
        from dora.consumers.monitor.monitor import RunMonitor
        from dora.consumers.monitor.summary import summarize
        from dora.log.schedule_log import read_schedule_log

        name = run_name(mode.name)
        config, source = self.load(mode, name, seed)

        def report(text: str) -> None:
            click.echo(f"{mode.name}, seed {seed}, repeat {repeat + 1}: {text}", err=True)

        config = find_cluster(config, self.broker_directory, report)
        _prepare(config, source, report)
        settings = cluster_settings(config.kafka)
        began = time.monotonic()
        measured = self.steps - self.warmup
        followed = run_steps(
            config, source, settings, warmup=self.warmup, steps=measured, report=report,
            cores=self.cores, ends_by_itself=True,
        )  # fmt: skip
        log = read_schedule_log(settings, name, _READ_SECONDS)
        measures = measure(log, self.warmup, measured, Emulation(1.0))
        monitor = RunMonitor(settings, name, steps_target=self.steps)
        try:
            monitor.catch_up()
            summary = summarize(monitor.snapshot())
        finally:
            monitor.close()
        audit = audit_run(settings, name)
        partial = config.schedule.kind == "partial"
        violations = {k: n for k, n in audit.violations.items() if n}
        if partial:
            violations.pop("mixed_version", None)
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
                "violations": sum(violations.values()),
                "processor_share": followed.processor_share,
                "curve": {
                    "step": [step.version_out for step in log.steps],
                    "seconds": [(step.created_ms - zero) / 1000 for step in log.steps],
                    "success": [step.metrics.get("success_rate", 0.0) for step in log.steps],
                },
            }
        )
        if not self.keep:
            with TopicAdmin(settings) as admin:
                admin.delete(name)
            shutil.rmtree(config.run_directory)
        report(
            f"{1 / measures.step_seconds:.3f} steps/s, success {summary['success_last']:.3f} "
            f"({time.monotonic() - began:.0f} s)"
        )

    def summaries(self) -> dict[str, dict[str, Any]]:
        """By mode: means of `FIGURES` over its runs, and their ranges under `spread`."""
        return {name: summary_of(runs) for name, runs in self.runs.items()}

    def report(self) -> dict[str, Any]:
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


def show(summaries: Mapping[str, dict[str, Any]], console: Console) -> None:
    """Print the table."""
    heads = (
        "mode", "runs", "steps/s", "trajectories/s", "trainer idle", "rollout only",
        "staleness mean/max", "success first", "success last", "violations",
    )  # fmt: skip
    table = figures_table("real engines: mean (smallest-largest over runs)", heads)
    for name, summary in summaries.items():
        table.add_row(
            name,
            str(summary["runs"]),
            spread(summary, "steps_per_second", "{:.3f}"),
            spread(summary, "trajectories_per_second", "{:.1f}"),
            spread(summary, "trainer_idle_share", "{:.2f}"),
            spread(summary, "rollout_only_share", "{:.2f}"),
            staleness(summary),
            spread(summary, "success_first", "{:.3f}"),
            spread(summary, "success_last", "{:.3f}"),
            violations(summary),
        )
    console.print(table)


def _modes(path: Path, names: str, sets: tuple[str, ...], suffix: str) -> list[Mode]:
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


def _cores(trainer: str | None, rollout: str | None) -> dict[str, frozenset[int]]:
    """Processors by role; by default those that this process may use, half each."""
    if not hasattr(os, "sched_getaffinity"):
        raise UsageError("processes can be kept to processors on Linux only")
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        raise UsageError("trainer and engines need a processor each; this process may use only one")
    half = len(allowed) // 2
    chosen = {"trainer": allowed[:half], "rollout": allowed[half : 2 * half]}
    for role, text in (("trainer", trainer), ("rollout", rollout)):
        if text is not None:
            chosen[role] = _numbers(f"--{role}-cores", text)
            foreign = set(chosen[role]) - set(allowed)
            if foreign:
                raise UsageError(
                    f"--{role}-cores {text}: this process may use {_list(allowed)} only"
                )
    return {role: frozenset(numbers) for role, numbers in chosen.items()}


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"{option} {text}: numbers separated by commas are expected")
    return [int(part) for part in parts]


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _prepare(config: Config, source: ConfigSource, report: Any) -> None:
    """Make the starting policy if it is missing, before any clock runs."""
    from dora.cli.prepare import needs_preparation
    from dora.cli.run.processes import child_command, child_environment

    if not needs_preparation(config):
        return
    report(f"making {config.policy.model}")
    done = subprocess.run(
        child_command(config, source, "prepare"), env=child_environment(config), check=False,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise PolicyError(
            f"policy.prepare = {config.policy.prepare} failed: {done.stderr or done.stdout}"
        )
