"""`dora bench schedules`: compares schedules on emulated devices, over real Kafka."""

import json
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from dora.bench.comparison import compare, limits
from dora.bench.emulated import ScheduleBench, emulated_config, emulated_preset, schedule_plans
from dora.bench.plots import check_plot, plot_schedules
from dora.cli.bench.launch import LocalLauncher
from dora.cli.bench.tables import show_schedules
from dora.cli.options import Command, cluster_options
from dora.cli.simulate import check_workload_named, workload_options
from dora.config.loading import KafkaOverrides
from dora.errors import UsageError
from dora.simulation.presets import RIVALS

_TIME_SCALE = 0.05
"""20 emulated seconds pass in one second here."""


@click.command(cls=Command)
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
        workload = emulated_preset(
            preset, sets, overrides, directory=directory, time_scale=time_scale or _TIME_SCALE
        )
    else:
        assert config_path is not None
        workload = emulated_config(config_path, sets, overrides, time_scale)
    chosen = schedule_plans(workload, [n.strip() for n in names.split(",")], split, warmup, steps)
    bench = ScheduleBench(
        workload, chosen, steps, directory, LocalLauncher(overrides, broker_directory),
        partial(click.echo, err=True), keep=keep, chunks=not no_chunks,
    )  # fmt: skip
    bench.check()
    for repeat in range(repeats):
        # Every other time backwards: a machine that grows slower then slows all schedules.
        for plan in chosen if repeat % 2 == 0 else chosen[::-1]:
            bench.run(plan, repeat)
            if json_path is not None:
                json_path.write_text(json.dumps(bench.to_json(), indent=2) + "\n", encoding="utf-8")
    summaries = compare(bench.results)
    ordered = {p.variant.name: summaries[p.variant.name] for p in chosen}
    show_schedules(ordered, Console(highlight=False))
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
