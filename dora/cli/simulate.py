"""`dora simulate`: schedules in virtual time, and advice which one to use."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from dora.bench.workloads import config_workload, measured_workload, preset_workload, resized
from dora.cli.console import print_table
from dora.cli.options import json_option
from dora.errors import RunError, UsageError
from dora.simulation.advice import (
    Advice,
    Case,
    Judge,
    Verdict,
    advise,
    best_splits,
    judge,
    judge_in_turn,
)
from dora.simulation.presets import PRESETS, RIVALS, ScheduleVariant, schedule_variant
from dora.simulation.scenario import Impossible, Workload, check
from dora.simulation.simulator import Stuck

C = TypeVar("C", bound=Callable[..., Any])

MOST_STALENESS = 4
"""The largest staleness bound that advice looks at."""


def workload_options(command: C) -> C:
    """The argument CONFIG and the option --preset, one of which names a workload."""
    option = click.option(
        "--preset", metavar="NAME", help=f"Instead of CONFIG: {', '.join(PRESETS)}."
    )
    argument = click.argument(
        "config_path",
        metavar="[CONFIG]",
        required=False,
        type=click.Path(path_type=Path, dir_okay=False),
    )
    return argument(option(command))


def check_workload_named(config_path: Path | None, preset: str | None) -> None:
    """UsageError unless exactly one of them is given."""
    if (config_path is None) == (preset is None):
        raise UsageError(
            "name either a CONFIG or a --preset", hint=f"Presets: {', '.join(PRESETS)}"
        )


@click.command()
@workload_options
@click.option(
    "--schedule", "names", multiple=True, metavar="NAME",
    help="sync, one-step-off, partial[:K], dora:K, dora:K+streamed; may be repeated.",
)  # fmt: skip
@click.option(
    "--max-staleness", type=click.IntRange(0, 64), metavar="K",
    help="Simulate dora with this bound, or with --advise up to it.",
)  # fmt: skip
@click.option("--devices", type=click.IntRange(1, 40_000), metavar="N", help="Devices in all.")
@click.option(
    "--groups-per-step", type=click.IntRange(min=1), metavar="B", help="Groups in one step."
)
@click.option(
    "--rollout", metavar="R|best",
    help="Devices that generate, while the others train. By default the best known number.",
)  # fmt: skip
@click.option(
    "--lengths", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Measured response lengths, one in tokens a line.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), default=6, show_default=True,
              help="Steps to measure.")  # fmt: skip
@click.option("--warmup", type=click.IntRange(min=0), default=4, show_default=True,
              help="Steps before those.")  # fmt: skip
@click.option(
    "--control-seconds", type=click.FloatRange(0, 60), default=0.02, show_default=True,
    help="From an event to the coordinator, and from a command to the worker.",
)  # fmt: skip
@click.option(
    "--tick-seconds", type=click.FloatRange(0, 60), default=0.2, show_default=True,
    help="Between two ticks of the coordinator; longer ones make large clusters cheaper.",
)  # fmt: skip
@click.option(
    "--jobs", type=click.IntRange(min=1), metavar="N", help="Processes. By default one per CPU."
)
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="As in `dora run`.")
@click.option("--advise", "wanted", is_flag=True, help="Recommend a staleness bound and a split.")
@json_option
def simulate(
    config_path: Path | None,
    preset: str | None,
    names: tuple[str, ...],
    max_staleness: int | None,
    devices: int | None,
    groups_per_step: int | None,
    rollout: str | None,
    lengths: Path | None,
    steps: int,
    warmup: int,
    control_seconds: float,
    tick_seconds: float,
    jobs: int | None,
    sets: tuple[str, ...],
    wanted: bool,
    as_json: bool,
) -> None:
    """Run schedules in virtual time and compare them, or recommend one.

    Coordinator, window and placement are those of a real run; engines, training and Kafka are
    latency models. The workload is a --preset or that of a CONFIG: its window, rollout.emulated and
    trainer.emulated. Its workers are all devices.
    """
    check_workload_named(config_path, preset)
    if preset is not None:
        if sets:
            raise UsageError("--set changes a CONFIG; a preset is what it is")
        workload = preset_workload(preset)
    else:
        assert config_path is not None
        workload = config_workload(config_path, sets)
    if lengths is not None:
        workload = measured_workload(workload, lengths)
    workload = resized(workload, devices, groups_per_step)
    variants = _variants(names, max_staleness, advice=wanted)
    times: dict[str, Any] = {
        "steps": warmup + steps,
        "warmup": warmup,
        "control_seconds": control_seconds,
        "tick_seconds": tick_seconds,
    }
    try:
        with _judging(jobs or os.cpu_count() or 1) as judges:
            if wanted:
                advice = advise(workload, variants, judges=judges, **times)
                _show_advice(workload, advice, as_json)
            else:
                verdicts = _simulate(workload, variants, rollout, times, judges)
                _show(workload, verdicts, as_json)
    except Impossible as error:
        raise UsageError(f"this can never run: {error}") from None
    except Stuck as error:
        raise RunError(f"the simulated run is stuck: {error}") from None


def _variants(
    names: Sequence[str], max_staleness: int | None, *, advice: bool
) -> list[ScheduleVariant]:
    texts = list(names)
    if advice and not texts:
        most = MOST_STALENESS if max_staleness is None else max_staleness
        texts = ["sync", *(f"dora:{bound}" for bound in range(1, most + 1))]
    elif max_staleness is not None:
        texts.append(f"dora:{max_staleness}")
    try:
        return list(dict.fromkeys(map(schedule_variant, texts or RIVALS)))
    except ValueError as error:
        raise UsageError(str(error)) from None


def _simulate(
    workload: Workload,
    variants: Sequence[ScheduleVariant],
    rollout: str | None,
    times: dict[str, Any],
    judges: Judge,
) -> list[Verdict]:
    if rollout == "best":
        found = best_splits(workload, variants, judges=judges, **times)
        return [found[variant][0] for variant in variants]
    if rollout is not None and not rollout.isdecimal():
        raise UsageError(f"--rollout {rollout}: a number of devices, or `best`")
    preset = workload.preset
    cases = []
    for variant in variants:
        if preset.devices < 2 and not variant.colocated:
            raise UsageError(f"{variant.name} needs one device to generate and one to train")
        split = preset.rollout_devices(variant) if rollout is None else int(rollout)
        if variant.colocated:
            split = preset.devices
        check(workload, variant, split)
        cases.append(Case(workload, variant, split, **times))
    return list(judges(cases))


@contextmanager
def _judging(processes: int) -> Iterator[Judge]:
    """Judges cases in so many processes."""
    if processes == 1:
        yield judge_in_turn
        return
    with ProcessPoolExecutor(processes) as pool:
        try:
            yield lambda cases: pool.map(judge, cases)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _show_advice(workload: Workload, advice: Advice, as_json: bool) -> None:
    chosen, parts = advice.chosen, advice.parts
    if as_json:
        choice = {
            "schedule": chosen.variant.name,
            "max_staleness": chosen.variant.max_staleness,
            "rollout_devices": chosen.rollout * parts,
            "training_devices": chosen.training * parts,
            "reason": advice.reason,
            "simulated_slice": parts,
        }
        click.echo(json.dumps({**_object(workload, advice.best, parts), "advice": choice}))
        return
    _show(workload, advice.best, False, parts)
    console = Console()
    split = (
        f"all {chosen.rollout * parts} devices in turn"
        if chosen.variant.colocated
        else f"devices: {chosen.rollout * parts} for rollout and {chosen.training * parts} to train"
    )
    console.print(f"Advice: [bold]{chosen.variant.name}[/bold], {split}.")
    console.print(advice.reason[:1].upper() + advice.reason[1:] + ".")
    if parts > 1:
        console.print(f"Simulated was one of {parts} equal slices of the cluster.")


def _show(workload: Workload, verdicts: Sequence[Verdict], as_json: bool, parts: int = 1) -> None:
    if as_json:
        click.echo(json.dumps(_object(workload, verdicts, parts)))
        return
    table = Table(title=f"{workload.preset.name}: {workload.preset.devices} devices, simulated")
    table.add_column("schedule", no_wrap=True)
    for column in (
        "rollout", "training", "step s", "of ideal", "x sync", "trainer idle", "rollout only",
        "staleness", "moves", "broken",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    sync = _sync_seconds(verdicts)
    for verdict in verdicts:
        simulated = verdict.simulated
        table.add_row(
            verdict.variant.name,
            str(verdict.rollout * parts),
            str(verdict.training * parts),
            f"{verdict.step_seconds:.1f}",
            f"{verdict.ideal_share:.3f}",
            "" if sync is None else f"{sync / verdict.step_seconds:.2f}",
            f"{simulated.trainer_idle_share:.1%}",
            f"{simulated.rollout_only_share:.1%}",
            f"{simulated.staleness_mean:.2f} / {simulated.staleness_max}",
            f"{simulated.moves * parts:.0f}",
            str(_violations(verdict)),
        )
    print_table(table, Console())


def _sync_seconds(verdicts: Sequence[Verdict]) -> float | None:
    return next((each.step_seconds for each in verdicts if each.variant.kind == "sync"), None)


def _violations(verdict: Verdict) -> int:
    """All that are not meant to be: `partial` mixes versions by design."""
    found = verdict.simulated
    return found.violations + (found.mixed_version if verdict.variant.kind != "partial" else 0)


def _object(workload: Workload, verdicts: Sequence[Verdict], parts: int) -> dict[str, Any]:
    sync = _sync_seconds(verdicts)
    preset = workload.preset
    return {
        "workload": {
            "name": preset.name,
            "devices": preset.devices,
            "groups_per_step": preset.groups_per_step,
            "group_size": preset.group_size,
            "training_seconds": preset.training_seconds,
        },
        "schedules": {
            verdict.variant.name: {
                "rollout_devices": verdict.rollout * parts,
                "training_devices": verdict.training * parts,
                "step_seconds": verdict.step_seconds,
                "step_times": list(verdict.simulated.step_times),
                "ideal_share": verdict.ideal_share,
                "ratio_to_sync": None if sync is None else sync / verdict.step_seconds,
                "trainer_idle_share": verdict.simulated.trainer_idle_share,
                "rollout_only_share": verdict.simulated.rollout_only_share,
                "staleness_mean": verdict.simulated.staleness_mean,
                "staleness_max": verdict.simulated.staleness_max,
                "migrations": verdict.simulated.moves * parts,
                "switches": verdict.simulated.switches * parts,
                "slots_used_share": verdict.simulated.slots_used,
                "violations": _violations(verdict),
                "mixed_version": verdict.simulated.mixed_version,
            }
            for verdict in verdicts
        },
    }
