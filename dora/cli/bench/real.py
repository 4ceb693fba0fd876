"""`dora bench real`: compares schedules with vLLM and DeepSpeed on this machine."""

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from dora.bench.plots import check_plot, plot_curves
from dora.bench.real import RealBench, modes_of
from dora.cli.bench.launch import LocalLauncher
from dora.cli.bench.tables import show_modes
from dora.cli.options import Command, cluster_options
from dora.config.loading import KafkaOverrides
from dora.errors import UsageError

MODES = "sync,dora:1,dora:2,dora:3"


@click.command(cls=Command)
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
    modes = modes_of(config_path, names, sets, "")
    if lora_path is not None:
        modes += modes_of(lora_path, lora_names, sets, "+lora")
    launcher = LocalLauncher(overrides, broker_directory)
    bench = RealBench(
        steps, warmup, cores, directory, launcher, partial(click.echo, err=True), keep=keep
    )
    for mode in modes:
        bench.check(mode)  # refuses what is impossible before hours have passed
    for seed in _numbers("--seeds", seeds):
        for repeat in range(repeats):
            for mode in modes if (seed + repeat) % 2 == 0 else modes[::-1]:
                bench.run(mode, seed, repeat)
                if json_path is not None:
                    text = json.dumps(bench.to_json(), indent=2)
                    json_path.write_text(text + "\n", encoding="utf-8")
    summaries = bench.summaries()
    ordered = {mode.name: summaries[mode.name] for mode in modes}
    show_modes(ordered, Console(highlight=False))
    if plot is not None:
        curves = {name: [run["curve"] for run in bench.runs[name]] for name in ordered}
        plot_curves(plot, f"{config_path.stem}: learning by schedule", curves)


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
