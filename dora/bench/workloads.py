"""What is simulated or emulated: a workload from a preset or a configuration, on as many devices as
are asked for.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dora.config import Config
from dora.config.loading import KafkaOverrides, load_config
from dora.errors import UsageError
from dora.simulation.presets import Preset, preset_named
from dora.simulation.scenario import Impossible, Workload, with_measured


def preset_workload(name: str) -> Workload:
    """The workload of a preset; UsageError if there is none of that name."""
    try:
        return Workload(preset_named(name))
    except ValueError as error:
        raise UsageError(str(error)) from None


def config_workload(path: Path, sets: Sequence[str]) -> Workload:
    """The workload of a run's configuration: its window, and the latency models of its sections
    rollout.emulated and trainer.emulated, whatever engines it is for. Its workers are all devices,
    and trainer.emulated is training on all of them. Raises ConfigError."""
    config = load_config(path, sets=sets, kafka=KafkaOverrides(None, {}, ()))
    device, rollout = config.rollout.emulated, config.rollout
    workload = Workload(
        _cluster_of(config, path),
        training_seconds_per_token=config.trainer.emulated.seconds_per_token,
        tokens_per_step=config.window.tokens_per_step,
        model_limit=rollout.max_model_len,
        lora=config.policy.lora is not None,
        adapters=rollout.adapters,
        prompts=config.task.synthetic_prompts,
        seed=config.run.seed,
    )
    if device.length == "empirical" and device.length_file is not None:
        return measured_workload(workload, config.home / device.length_file)
    if device.length == "uniform":
        return with_measured(workload, range(1, max(2, round(2 * device.length_mean))))
    return workload


def _cluster_of(config: Config, path: Path) -> Preset:
    device, rollout, trainer = config.rollout.emulated, config.rollout, config.trainer.emulated
    synthetic = config.task.kind == "synthetic"
    return Preset(
        name=config.run.name,
        description=str(path),
        devices=rollout.workers,
        training_seconds=trainer.step_seconds,
        groups_per_step=config.window.groups_per_step,
        group_size=config.window.group_size,
        slots=rollout.capacity,
        prompt_tokens=(
            config.task.synthetic_prompt_tokens if synthetic else config.task.max_prompt_tokens
        ),
        max_new_tokens=rollout.max_new_tokens,
        length_mean=device.length_mean,
        length_sigma=device.length_sigma if device.length == "lognormal" else 0.0,
        length_prompt_share=device.length_prompt_share,
        iteration_seconds=device.iteration_seconds,
        iteration_seconds_per_sequence=device.iteration_seconds_per_sequence,
        iteration_seconds_per_context_token=device.iteration_seconds_per_context_token,
        prefill_seconds_per_token=device.prefill_seconds_per_token,
        kv_cache_tokens=device.kv_cache_tokens,
        load_seconds=device.load_seconds,
        publish_seconds=trainer.publish_seconds,
        speeds=device.speeds,
    )


def measured_workload(workload: Workload, path: Path) -> Workload:
    """The workload with the lengths of a file, one in tokens a line; UsageError if it cannot be
    read or a line is no length."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the lengths in {path}: {error}") from error
    lengths = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            length = int(line)
        except ValueError:
            length = 0
        if length < 1:
            raise UsageError(f"{path}, line {number}: {line.strip()!r} is no length in tokens")
        lengths.append(length)
    try:
        return with_measured(workload, lengths)
    except Impossible as error:
        raise UsageError(f"{path}: {error}") from None


def resized(workload: Workload, devices: int | None, groups_per_step: int | None) -> Workload:
    """The workload on so many devices, with so many groups in a step: training takes longer in
    proportion to the groups, and less on more devices."""
    preset = workload.preset
    count, groups = devices or preset.devices, groups_per_step or preset.groups_per_step
    if (count, groups) == (preset.devices, preset.groups_per_step):
        return workload
    fewer = preset.devices / count
    return replace(
        workload,
        preset=replace(
            preset,
            devices=count,
            groups_per_step=groups,
            training_seconds=preset.training_seconds * fewer * groups / preset.groups_per_step,
            splits=(),
        ),
        training_seconds_per_token=workload.training_seconds_per_token * fewer,
    )
