"""What `dora bench schedules` runs: a workload from a preset or a configuration, and what each
schedule changes in it.

All schedules of a bench get the same devices, prompts, lengths and training; only the schedule, its
staleness bound and the number of generating devices differ. Every run's configuration is loaded and
checked before the first run starts.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dora.bench.measures import Emulation
from dora.cli.options import ConfigSource
from dora.cli.simulate.workload import config_workload as simulated_workload
from dora.config import Config
from dora.config.loading import KafkaOverrides, load_config
from dora.core.scheduling.schedules import Schedule
from dora.errors import UsageError
from dora.simulation.presets import Preset, ScheduleVariant, preset_named, schedule_variant
from dora.simulation.scenario import Impossible, check
from dora.simulation.scenario import Workload as Work

CHUNK_TOKENS = 2048
"""Tokens per chunk record in presets. Their devices yield a million and more tokens in a second of
this machine: chunks of the usual size would measure the machine."""
_WORKERS_PER_PROCESS = 64
_LONGEST_HEARTBEAT = 120.0

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
class Workload:
    """Devices and work of a bench, and the configuration file that says so."""

    work: Work
    path: Path
    sets: tuple[str, ...]
    time_scale: float

    @property
    def preset(self) -> Preset:
        """The devices and the work of a step."""
        return self.work.preset


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """A schedule on a workload: `rollout` of the devices generate, and the steps after the first
    `warmup` are measured."""

    variant: ScheduleVariant
    rollout: int
    warmup: int
    sets: tuple[str, ...]
    emulation: Emulation


def preset_workload(
    name: str,
    sets: Sequence[str],
    kafka: KafkaOverrides,
    *,
    directory: Path,
    time_scale: float,
) -> Workload:
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
    workload = config_workload(path, sets, kafka, time_scale)
    named = replace(workload.preset, name=name, description=preset.description)
    known = replace(named, splits=preset.splits)
    work = replace(workload.work, preset=known if known == preset else named)
    return replace(workload, work=work)


def config_workload(
    path: Path, sets: Sequence[str], kafka: KafkaOverrides, time_scale: float | None
) -> Workload:
    """The workload of a configuration: its workers are all devices, and its training time is that
    on all of them. UsageError if it emulates not both."""
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
    work = simulated_workload(path, sets)
    return Workload(work, path, tuple(sets), scale)


def plans(
    workload: Workload, schedules: Sequence[str], split: str, warmup: int | None, steps: int
) -> list[BenchPlan]:
    """A plan for each schedule, for runs of which `steps` are measured.

    `split` is a number of devices, or `auto`: the best known rollout share of each schedule, or
    where none is known, that at which full batches keep pace with training.
    Without `warmup` each schedule gets the steps after which its window is full: one for `sync`,
    K + 2 for the others. UsageError for what is no schedule and for what can never run.
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
    workload: Workload, variant: ScheduleVariant, split: str, warmup: int | None, steps: int
) -> BenchPlan:
    if warmup is None:
        warmup = 1 if variant.kind == "sync" else variant.max_staleness + 2
    preset = workload.preset
    rollout = preset.devices if variant.colocated else _rollout(preset, variant, split)
    try:
        check(workload.work, variant, rollout)
    except Impossible as error:
        raise UsageError(f"{variant.name} can never run: {error}") from None
    share = 1.0 if variant.colocated else preset.devices / (preset.devices - rollout)
    seconds = preset.training_seconds * share
    per_token = workload.work.training_seconds_per_token * share
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


def run_source(
    workload: Workload, plan: BenchPlan, name: str, directory: Path, broker_directory: Path
) -> ConfigSource:
    """The configuration of one run of a plan, as its processes load it."""
    own = (f"run.name={name}", f"run.directory={directory.absolute()}")
    return ConfigSource(workload.path, (*plan.sets, *own), broker_directory)


def load_source(source: ConfigSource, kafka: KafkaOverrides) -> Config:
    """The configuration of a source; ConfigError if it is impossible."""
    return load_config(source.path, sets=source.sets, kafka=kafka)


def emulated_model(directory: Path) -> Path:
    """A model directory of which emulated parts read nothing but the size of the vocabulary."""
    model = directory / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text('{"vocab_size": 32768}\n', encoding="utf-8")
    return model
