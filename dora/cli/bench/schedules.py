"""`dora bench schedules`: compares schedules on emulated devices, over real Kafka."""

import json
import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dora.bench.comparison import RunResult, Timeline, compare, limits, timeline
from dora.bench.plots import check_plot, plot_schedules
from dora.cli.bench.run import figures_table, spread, staleness, violations
from dora.cli.bench.workload import (
    BenchPlan,
    Workload,
    config_workload,
    load_source,
    plans,
    preset_workload,
    run_source,
)
from dora.cli.console import wide_console
from dora.cli.options import cluster_options
from dora.cli.simulate.workload import check_workload_named, workload_options
from dora.config.loading import KafkaOverrides
from dora.errors import UsageError
from dora.simulation.presets import RIVALS

_READ_SECONDS = 1800.0
_TIME_SCALE = 0.05
"""20 emulated seconds pass in one second here."""


@click.command()
@workload_options
@click.option(
    "--schedules",
    "names",
    default=",".join(RIVALS),
    show_default=True,
    metavar="NAMES",
    help="sync, one-step-off, partial[:K], dora:K, dora:K+streamed; separated by commas.",
)
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--warmup", type=click.IntRange(min=0), metavar="STEPS",
    help="Steps before the measured ones. [default: 1 for sync, K + 2 for others]",
)  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--time-scale",
    type=click.FloatRange(min=0, min_open=True),
    help=f"Seconds here per emulated second. [default: {_TIME_SCALE}, or CONFIG's]",
)
@click.option(
    "--split", default="auto", show_default=True, metavar="auto|R",
    help="Devices that generate, if rollout and training have devices of their own.",
)  # fmt: skip
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="As in `dora run`.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.png")
@click.option(
    "--directory", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    default=Path("runs/bench"), show_default=True, help="For configurations, logs and weights.",
)  # fmt: skip
@click.option("--keep", is_flag=True, help="Keep topics and files of finished runs.")
@click.option("--no-chunks", is_flag=True, help="Leave token chunks out of the audits: faster.")
@cluster_options
def schedules(
    config_path: Path | None,
    preset: str | None,
    names: str,
    steps: int,
    warmup: int | None,
    repeats: int,
    time_scale: float | None,
    split: str,
    sets: tuple[str, ...],
    json_path: Path | None,
    plot: Path | None,
    directory: Path,
    keep: bool,
    no_chunks: bool,
    overrides: KafkaOverrides,
    broker_directory: Path,
) -> None:
    """Run schedules in turn on one workload and compare them.

    The workload is a --preset or a CONFIG with emulated engine and trainer, whose workers are all
    devices. Coordinator, trainer, workers and Kafka are the real ones; only the devices are
    emulated. Each run is measured from its log and audited. docs/performance.md defines the
    figures.
    """
    check_workload_named(config_path, preset)
    check_plot(plot)
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise UsageError(f"--json {json_path}: there is no such directory")
    if preset is not None:
        workload = preset_workload(
            preset, sets, overrides, directory=directory, time_scale=time_scale or _TIME_SCALE
        )
    else:
        assert config_path is not None
        workload = config_workload(config_path, sets, overrides, time_scale)
    chosen = plans(workload, [n.strip() for n in names.split(",")], split, warmup, steps)
    bench = ScheduleBench(
        workload, chosen, steps, directory, overrides, broker_directory,
        keep=keep, chunks=not no_chunks,
    )  # fmt: skip
    bench.check()
    for repeat in range(repeats):
        # Every other time backwards, so that a machine that grows slower hurts all alike.
        for plan in chosen if repeat % 2 == 0 else chosen[::-1]:
            bench.run(plan, repeat)
            if json_path is not None:
                json_path.write_text(json.dumps(bench.report(), indent=2) + "\n", encoding="utf-8")
    summaries = compare(bench.results)
    ordered = {p.variant.name: summaries[p.variant.name] for p in chosen}
    show(ordered, wide_console())
    found = limits(bench.results)
    for sentence in found:
        click.echo(f"warning: {sentence}", err=True)
    if found:
        click.echo(
            "This machine, not the schedule alone, set the pace there: what is shown is less than "
            "the schedule can do. Take a larger --time-scale.",
            err=True,
        )
    if plot is not None:
        title = f"{workload.preset.name}: {workload.preset.devices} devices, over Apache Kafka"
        plot_schedules(plot, title, ordered, [bench.timelines[name] for name in ordered])


@dataclass(slots=True)
class ScheduleBench:
    """Carries out runs and keeps their results."""

    workload: Workload
    plans: list[BenchPlan]
    steps: int
    directory: Path
    overrides: KafkaOverrides
    broker_directory: Path
    keep: bool
    chunks: bool
    chunk_tokens: int = 0
    results: list[RunResult] = field(default_factory=list)
    timelines: dict[str, Timeline] = field(default_factory=dict)

    def check(self) -> None:
        """Load the configuration of every plan; ConfigError if one is impossible."""
        for plan in self.plans:
            source = run_source(
                self.workload, plan, "bench", self.directory / "runs", self.broker_directory
            )
            self.chunk_tokens = load_source(source, self.overrides).rollout.chunk_tokens

    def run(self, plan: BenchPlan, repeat: int) -> None:
        """Run one schedule, measure and audit it, and remove what it left."""
        from dora.bench.measures import measure
        from dora.bus.settings import cluster_settings
        from dora.bus.topics import TopicAdmin
        from dora.cli.bench.run import find_cluster, run_name, run_steps
        from dora.consumers.audit import audit_run
        from dora.log.schedule_log import read_schedule_log

        schedule = plan.variant.name
        partial = plan.variant.kind == "partial"
        name = run_name(schedule)
        runs = self.directory / "runs"
        source = run_source(self.workload, plan, name, runs, self.broker_directory)
        source = replace(source, sets=(*source.sets, f"run.seed={repeat}"))

        def report(text: str) -> None:
            click.echo(f"{schedule}, repeat {repeat + 1}: {text}", err=True)

        config = load_source(source, self.overrides)
        config = find_cluster(config, self.broker_directory, report)
        settings = cluster_settings(config.kafka)
        began = time.monotonic()
        report(f"{config.rollout.workers} devices generate; {plan.warmup} steps of warm-up")
        followed = run_steps(
            config, source, settings, warmup=plan.warmup, steps=self.steps, report=report
        )
        log = read_schedule_log(settings, name, _READ_SECONDS)
        measures = measure(log, plan.warmup, self.steps, plan.emulation)
        audit = audit_run(settings, name, chunks=self.chunks, deadline=_READ_SECONDS)
        broken = dict(audit.violations)
        mixed = broken.pop("mixed_version") if partial else 0
        scale = self.workload.time_scale
        ideal = self.workload.work.ideal_seconds(measures.tokens)
        result = RunResult(
            schedule, repeat, plan.rollout, measures, ideal, followed.processor_share,
            sum(broken.values()), mixed,
        )  # fmt: skip
        self.results.append(result)
        self.timelines[schedule] = timeline(
            log, schedule, plan.warmup, self.steps, scale, interrupts=partial
        )
        for finding in audit.findings:
            if not partial or finding.kind != "mixed_version":
                report(f"audit: {finding.sentence}")
        if not self.keep:
            with TopicAdmin(settings) as admin:
                admin.delete(name)
            shutil.rmtree(config.run_directory)
        report(
            f"{measures.step_seconds:.0f} s a step, {result.ideal_share:.3f} of the ideal "
            f"({time.monotonic() - began:.0f} s)"
        )

    def report(self) -> dict[str, Any]:
        """The JSON object: workload, a figure of each name by schedule, runs and timelines."""
        preset = self.workload.preset
        return {
            "workload": asdict(preset),
            "time_scale": self.workload.time_scale,
            "warmup": {plan.variant.name: plan.warmup for plan in self.plans},
            "steps": self.steps,
            "chunk_tokens": self.chunk_tokens,
            "schedules": compare(self.results),
            "limits": limits(self.results),
            "runs": [
                asdict(result) | {"ideal_share": result.ideal_share} for result in self.results
            ],
            "timelines": {name: asdict(each) for name, each in self.timelines.items()},
        }


def show(summaries: dict[str, dict[str, Any]], console: Console) -> None:
    """Print the table."""
    heads = (
        "schedule", "R", "step s", "of ideal", "x sync", "trainer idle", "rollout only",
        "staleness mean/max", "moves/step", "overhead", "violations",
    )  # fmt: skip
    table = figures_table("schedules: mean (smallest-largest over repeats)", heads)
    for name, summary in summaries.items():
        table.add_row(
            name,
            str(summary["rollout_devices"]),
            spread(summary, "step_seconds", "{:.0f}"),
            spread(summary, "ideal_share", "{:.3f}"),
            spread(summary, "ratio_to_sync", "{:.2f}"),
            spread(summary, "trainer_idle_share", "{:.2f}"),
            spread(summary, "rollout_only_share", "{:.2f}"),
            staleness(summary),
            spread(summary, "migrations", "{:.1f}"),
            f"{summary['overhead_share']:.2%}",
            violations(summary),
        )
    console.print(table)
