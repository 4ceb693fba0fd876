"""Schedules against one another on emulated devices: what is run, and the runs.

All schedules get the same devices, prompts, lengths and training. They differ in the schedule, its
staleness bound and how many devices generate. The configuration of every run is loaded, and refused
if it is impossible, before the first run starts.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dora.bench.comparison import RunResult, Timeline, compare, limits, timeline
from dora.bench.measures import Emulation, measure
from dora.bench.runs import Launcher, Report, remove_run, run_name, run_steps, violations_of
from dora.bench.workloads import config_workload
from dora.bus.settings import cluster_settings
from dora.config.loading import KafkaOverrides, load_config
from dora.consumers.audit import audit_run
from dora.core.scheduling.schedules import Schedule
from dora.errors import UsageError
from dora.log.schedule_log import read_schedule_log
from dora.simulation.presets import Preset, ScheduleVariant, preset_named, schedule_variant
from dora.simulation.scenario import Impossible, Workload, check

CHUNK_TOKENS = 2048
"""Tokens per chunk record in presets. Their devices yield a million and more tokens in a second of
this machine: chunks of the usual size would measure the machine."""
_WORKERS_PER_PROCESS = 64
_LONGEST_HEARTBEAT = 120.0
_READ_SECONDS = 1800.0

PRESET_TEXT = """\
# {description}
# Written by `dora bench schedules`; what differs between schedules is set on the command line.

[run]
name = "bench"
directory = {runs}

[kafka]
dispatch_partitions = 2

[policy]
model = {model}

[task]
kind = "synthetic"
synthetic_prompt_tokens = {prompt_tokens}
max_prompt_tokens = {prompt_tokens}
held_out_fraction = 0.0

[window]
groups_per_step = {groups_per_step}
group_size = {group_size}

[rollout]
workers = {devices}
workers_per_process = {workers_per_process}
engine = "emulated"
capacity = {slots}
max_new_tokens = {max_new_tokens}
chunk_tokens = {chunk_tokens}
seeded = false
heartbeat_seconds = 1.0
heartbeat_timeout_seconds = {heartbeat_timeout}

[rollout.emulated]
iteration_seconds = {iteration_seconds}
iteration_seconds_per_sequence = {iteration_seconds_per_sequence}
iteration_seconds_per_context_token = {iteration_seconds_per_context_token}
prefill_seconds_per_token = {prefill_seconds_per_token}
load_seconds = {load_seconds}
{kv_cache}length = "lognormal"
length_mean = {length_mean}
length_sigma = {length_sigma}
length_prompt_share = {length_prompt_share}
speeds = {speeds}
time_scale = {time_scale}

[trainer]
steps = 1
engine = "emulated"
checkpoint_every = 1000000

[trainer.emulated]
step_seconds = {training_seconds}
publish_seconds = {publish_seconds}
"""

REBALANCE_SECONDS = Schedule().rebalance_seconds


@dataclass(frozen=True, slots=True)
class EmulatedWorkload:
    """Devices and work of a bench, and the configuration file that describes them."""

    simulated: Workload
    path: Path
    sets: tuple[str, ...]
    time_scale: float

    @property
    def preset(self) -> Preset:
        """The devices and the work of a step."""
        return self.simulated.preset


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """A schedule on a workload: `rollout` of the devices generate, and the steps after the first
    `warmup` are measured."""

    variant: ScheduleVariant
    rollout: int
    warmup: int
    sets: tuple[str, ...]
    emulation: Emulation


def emulated_preset(
    name: str,
    sets: Sequence[str],
    kafka: KafkaOverrides,
    *,
    directory: Path,
    time_scale: float,
) -> EmulatedWorkload:
    """The workload of a preset, its configuration written into `directory`; UsageError if there is
    no such preset. With `sets` that change the devices or their work, the best known splits are
    not those of the preset any more."""
    try:
        preset = preset_named(name)
    except ValueError as error:
        raise UsageError(str(error)) from None
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.toml"
    cache = preset.kv_cache_tokens
    values = {field: getattr(preset, field) for field in Preset.__dataclass_fields__}
    path.write_text(
        PRESET_TEXT.format(
            **values | {"speeds": list(preset.speeds)},
            kv_cache="" if cache is None else f"kv_cache_tokens = {cache}\n",
            runs=json.dumps(str(directory.absolute() / "runs")),
            model=json.dumps(str(emulated_model(directory).absolute())),
            workers_per_process=min(preset.devices, _WORKERS_PER_PROCESS),
            chunk_tokens=CHUNK_TOKENS,
            heartbeat_timeout=_LONGEST_HEARTBEAT,
            time_scale=time_scale,
        ),
        encoding="utf-8",
    )
    workload = emulated_config(path, sets, kafka, time_scale)
    named = replace(workload.preset, name=name, description=preset.description)
    known = replace(named, splits=preset.splits)
    simulated = replace(workload.simulated, preset=known if known == preset else named)
    return replace(workload, simulated=simulated)


def emulated_config(
    path: Path, sets: Sequence[str], kafka: KafkaOverrides, time_scale: float | None
) -> EmulatedWorkload:
    """The workload of a configuration: its workers are all devices, and its training time is that
    on all of them. UsageError if engine or trainer is not emulated."""
    config = load_config(path, sets=sets, kafka=kafka)
    rollout, trainer, device = config.rollout, config.trainer, config.rollout.emulated
    if rollout.engine != "emulated" or trainer.engine != "emulated":
        raise UsageError(
            f"{path}: schedules are compared on emulated devices",
            hint="Set rollout.engine and trainer.engine to emulated, or see `dora bench real`.",
        )
    scale = device.time_scale if time_scale is None else time_scale
    if scale <= 0:
        raise UsageError(
            f"{path}: rollout.emulated.time_scale = 0 waits for nothing, so nothing is measured",
            hint="Give --time-scale.",
        )
    return EmulatedWorkload(config_workload(path, sets), path, tuple(sets), scale)


def schedule_plans(
    workload: EmulatedWorkload, schedules: Sequence[str], split: str, warmup: int | None, steps: int
) -> list[BenchPlan]:
    """A plan for each schedule, for runs of which `steps` are measured.

    `split` is a number of devices, or `auto`: the best known rollout share of each schedule, or
    where none is known, that at which full batches keep pace with training.
    Without `warmup` each schedule gets the steps after which its window is full: one for `sync`,
    K + 2 for the others. UsageError for an unknown schedule and for one that can never run.
    """
    found: list[BenchPlan] = []
    for text in schedules:
        try:
            variant = schedule_variant(text)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if any(plan.variant == variant for plan in found):
            raise UsageError(f"schedule {variant.name} is named twice")
        found.append(_plan(workload, variant, split, warmup, steps))
    return found


def _plan(
    workload: EmulatedWorkload, variant: ScheduleVariant, split: str, warmup: int | None, steps: int
) -> BenchPlan:
    if warmup is None:
        warmup = 1 if variant.kind == "sync" else variant.max_staleness + 2
    preset = workload.preset
    rollout = preset.devices if variant.colocated else _rollout(preset, variant, split)
    try:
        check(workload.simulated, variant, rollout)
    except Impossible as error:
        raise UsageError(f"{variant.name} can never run: {error}") from None
    share = 1.0 if variant.colocated else preset.devices / (preset.devices - rollout)
    seconds = preset.training_seconds * share
    per_token = workload.simulated.training_seconds_per_token * share
    # Towards its end a run starts no group that would not be trained any more: what is measured
    # must lie before that.
    last = warmup + steps + variant.max_staleness
    sets = (
        *workload.sets,
        f"schedule.kind={variant.kind}",
        f"schedule.colocated={str(variant.colocated).lower()}",
        # like all times of an emulated cluster
        f"schedule.rebalance_seconds={REBALANCE_SECONDS * workload.time_scale!r}",
        f"trainer.streamed={str(variant.streamed).lower()}",
        f"window.max_staleness={variant.max_staleness}",
        f"rollout.workers={rollout}",
        f"rollout.emulated.time_scale={workload.time_scale!r}",
        f"trainer.steps={last}",
        f"trainer.emulated.step_seconds={seconds!r}",
        f"trainer.emulated.seconds_per_token={per_token!r}",
    )
    emulation = Emulation(
        time_scale=workload.time_scale,
        train_seconds=seconds,
        train_seconds_per_token=per_token,
        publish_seconds=preset.publish_seconds,
        load_seconds=preset.load_seconds,
    )
    return BenchPlan(variant, rollout, warmup, sets, emulation)


def _rollout(preset: Preset, variant: ScheduleVariant, split: str) -> int:
    if preset.devices < 2:
        raise UsageError(
            f"{variant.name} needs one device to generate and one to train: "
            f"{preset.name} has {preset.devices}"
        )
    if split == "auto":
        return preset.rollout_devices(variant)
    if not split.isdecimal() or not 1 <= int(split) < preset.devices:
        raise UsageError(
            f"--split {split}: `auto`, or 1 to {preset.devices - 1} of the {preset.devices} devices"
        )
    return int(split)


def run_sets(plan: BenchPlan, name: str, directory: Path) -> tuple[str, ...]:
    """What the configuration of one run of a plan changes in the workload's file."""
    return (*plan.sets, f"run.name={name}", f"run.directory={directory.absolute()}")


def emulated_model(directory: Path) -> Path:
    """A model directory of which emulated parts read nothing but the size of the vocabulary."""
    model = directory / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text('{"vocab_size": 32768}\n', encoding="utf-8")
    return model


@dataclass(slots=True)
class ScheduleBench:
    """Carries out runs and keeps their results. `report` gets lines for people; with `keep` topics
    and files of finished runs stay, without `chunks` the audit leaves token chunks out."""

    workload: EmulatedWorkload
    plans: list[BenchPlan]
    steps: int
    directory: Path
    launcher: Launcher
    report: Report
    keep: bool
    chunks: bool
    chunk_tokens: int = 0
    results: list[RunResult] = field(default_factory=list)
    timelines: dict[str, Timeline] = field(default_factory=dict)

    def check(self) -> None:
        """Load the configuration of every plan; ConfigError if one is impossible."""
        for plan in self.plans:
            sets = run_sets(plan, "bench", self.directory / "runs")
            config = self.launcher.load(self.workload.path, sets)
            self.chunk_tokens = config.rollout.chunk_tokens

    def run(self, plan: BenchPlan, repeat: int) -> None:
        """Run one schedule, measure and audit it, and remove what it left."""
        schedule = plan.variant.name
        name = run_name(schedule)
        path = self.workload.path
        sets = (*run_sets(plan, name, self.directory / "runs"), f"run.seed={repeat}")

        def report(text: str) -> None:
            self.report(f"{schedule}, repeat {repeat + 1}: {text}")

        config = self.launcher.find_cluster(self.launcher.load(path, sets), report)
        settings = cluster_settings(config.kafka)
        began = time.monotonic()
        report(f"{config.rollout.workers} devices generate; {plan.warmup} steps of warm-up")
        processes = self.launcher.processes(config, path, sets)
        processor_share = run_steps(
            config, processes, settings, warmup=plan.warmup, steps=self.steps, report=report
        )
        log = read_schedule_log(settings, name, _READ_SECONDS)
        measures = measure(log, plan.warmup, self.steps, plan.emulation)
        audit = audit_run(settings, name, chunks=self.chunks, deadline=_READ_SECONDS)
        partial = plan.variant.kind == "partial"
        violations, mixed = violations_of(audit, partial=partial)
        result = RunResult(
            schedule, repeat, plan.rollout, measures,
            self.workload.simulated.ideal_seconds(measures.tokens),
            processor_share, violations, mixed,
        )  # fmt: skip
        self.results.append(result)
        self.timelines[schedule] = timeline(
            log, schedule, plan.warmup, self.steps, self.workload.time_scale, interrupts=partial
        )
        for finding in audit.findings:
            if not partial or finding.kind != "mixed_version":
                report(f"audit: {finding.sentence}")
        if not self.keep:
            remove_run(config, settings)
        report(
            f"{measures.step_seconds:.0f} s a step, {result.ideal_share:.3f} of the ideal "
            f"({time.monotonic() - began:.0f} s)"
        )

    def to_json(self) -> dict[str, Any]:
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
