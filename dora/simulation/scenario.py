"""From a workload and a schedule to a scenario: what `dora simulate` simulates.

All schedules of a workload get the same devices, prompts, lengths and training; they
differ in nothing but the schedule, its staleness bound, and how many devices generate. A workload
that can never fit is refused before anything is simulated, with the numbers.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dora.core.scheduling.scheduler import Rules
from dora.core.scheduling.schedules import Schedule
from dora.core.window import Window
from dora.simulation.device import DeviceSpec
from dora.simulation.lengths import Lengths
from dora.simulation.presets import Preset, ScheduleVariant

LengthOf = Callable[[str, int], int]
"""Response length in tokens of the trajectory with this id, of the prompt at this ordinal."""


@dataclass(frozen=True, slots=True)
class Change:
    """At `time` (seconds) the worker with this number joins, leaves in order, or crashes."""

    time: float
    worker: int
    kind: Literal["join", "leave", "crash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Times in seconds of virtual time, lengths in tokens.

    - `workers` of `slots` sequences each; worker `i` has speed `speeds[i mod len(speeds)]`.
    - `training_seconds` is a step's training on the devices that train, whatever is in it;
      `training_seconds_per_token` what each of its tokens adds.
    - `streamed`: groups are trained as they finish, each for its equal share of the training time.
    - `interrupts`: the schedule `partial`, in which attempts go on over a switch of versions.
    - `adapters`: versions that a worker hosts at once; 0 for one at a time, with full weights.
    - The simulation ends when `steps` steps are committed; the first `warmup` are not measured.
    - `control_seconds`: from an event to its readers, and from a command to its effect.
      `tick_seconds`: decisions are made at multiples of it; 0 decides at once.
    - `heartbeat_seconds`: between two statuses of a worker.
    - `patience_seconds`: without a step for this long, the run is taken for stuck.
    - `changes`: workers that come and go; one whose first change is `join` comes then.
    - `reported_rates`: what workers say of their tokens per second instead of the truth.
    """

    rules: Rules
    workers: int
    slots: int
    device: DeviceSpec
    lengths: LengthOf
    training_seconds: float
    steps: int
    warmup: int = 0
    training_seconds_per_token: float = 0.0
    publish_seconds: float = 0.0
    speeds: tuple[float, ...] = ()
    prompt_tokens: int = 0
    streamed: bool = False
    interrupts: bool = False
    adapters: int = 0
    control_seconds: float = 0.02
    tick_seconds: float = 0.2
    heartbeat_seconds: float = 30.0
    patience_seconds: float = 100_000.0
    changes: tuple[Change, ...] = ()
    reported_rates: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.workers < 1 or self.slots < 1:
            raise ValueError(f"{self.workers} workers of {self.slots} slots generate nothing")
        if not 0 <= self.warmup < self.steps:
            raise ValueError(
                f"{self.warmup} of {self.steps} steps to warm up leave none to measure"
            )
        if self.steps > self.rules.steps:
            raise ValueError(
                f"{self.steps} steps are to be simulated, the run ends at {self.rules.steps}"
            )
        if self.heartbeat_seconds >= self.rules.heartbeat_timeout:
            raise ValueError("workers would be given up between two heartbeats")

    def speed(self, worker: int) -> float:
        """Relative speed of a worker."""
        return self.speeds[worker % len(self.speeds)] if self.speeds else 1.0


class Impossible(ValueError):
    """A workload that can never fit on the devices it is for; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class CutLengths:
    """Lengths as the emulated engine draws them, cut at `longest`; of `prompts` different prompts
    that come again in turn."""

    lengths: Lengths
    longest: int
    prompts: int
    seed: int

    def __call__(self, trajectory_id: str, ordinal: int) -> int:
        """Length in tokens."""
        prompt = ordinal % self.prompts
        return min(self.longest, self.lengths.draw(self.seed, trajectory_id, prompt))


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be generated and trained, on which devices.

    `preset` describes both; `measured` are lengths in tokens to draw from instead of its
    distribution, `prompts` how many different prompts there are. `training_seconds_per_token` is
    what each trained token adds to the training on all devices, `tokens_per_step` a budget that
    ends batches earlier. `model_limit` is the longest sequence that the model takes. With `lora` a
    worker hosts all live versions, as far as it has `adapters` (None: enough).
    """

    preset: Preset
    measured: tuple[int, ...] = ()
    training_seconds_per_token: float = 0.0
    tokens_per_step: int | None = None
    model_limit: int | None = None
    lora: bool = False
    adapters: int | None = None
    prompts: int = 1_024
    seed: int = 0

    @property
    def lengths(self) -> CutLengths:
        """Length of each response."""
        preset = self.preset
        drawn = Lengths(
            "empirical" if self.measured else "lognormal",
            preset.length_mean,
            preset.length_sigma,
            preset.length_prompt_share,
            self.measured,
        )
        return CutLengths(drawn, preset.max_new_tokens, self.prompts, self.seed)

    def ideal_seconds(self, tokens: float) -> float:
        """The ideal step with so many generated tokens."""
        return self.preset.ideal_seconds(tokens) + self.training_seconds_per_token * tokens


def with_measured(workload: Workload, lengths: Sequence[int]) -> Workload:
    """The workload with measured lengths. Impossible if there is none, or one is no length."""
    if not lengths:
        raise Impossible("no length was measured")
    wrong = [length for length in lengths if length < 1]
    if wrong:
        raise Impossible(f"{wrong[0]} is no length in tokens: at least 1 is needed")
    preset = workload.preset
    ordered = tuple(sorted(lengths))
    cut = bisect_left(ordered, preset.max_new_tokens)
    mean = (sum(ordered[:cut]) + (len(ordered) - cut) * preset.max_new_tokens) / len(ordered)
    spread = [math.log(length) for length in ordered]
    middle = sum(spread) / len(spread)
    sigma = math.sqrt(sum((each - middle) ** 2 for each in spread) / len(spread))
    return replace(
        workload,
        preset=replace(preset, length_mean=mean, length_sigma=sigma, splits=()),
        measured=ordered,
    )


def check(workload: Workload, variant: ScheduleVariant, rollout: int) -> None:
    """Raises Impossible if the schedule can never run the workload on `rollout` workers."""
    preset = workload.preset
    longest = preset.prompt_tokens + preset.max_new_tokens
    limit = workload.model_limit
    if limit is not None and longest > limit:
        raise Impossible(
            f"a sample may reach {longest} tokens ({preset.prompt_tokens} of the prompt and "
            f"{preset.max_new_tokens} of the response), but the model takes {limit}"
        )
    cache = preset.kv_cache_tokens
    if cache is not None and longest > cache:
        raise Impossible(
            f"a sample may reach {longest} tokens ({preset.prompt_tokens} of the prompt and "
            f"{preset.max_new_tokens} of the response), but the key-value cache of a worker holds "
            f"{cache}"
        )
    if cache is not None and preset.group_size * preset.prompt_tokens > rollout * cache:
        raise Impossible(
            f"the prompts of one group take {preset.group_size} x {preset.prompt_tokens} tokens, "
            f"but the key-value caches of {rollout} workers hold {rollout} x {cache}"
        )
    if preset.group_size > rollout * preset.slots:
        raise Impossible(
            f"a group has {preset.group_size} samples, but {rollout} workers generate at most "
            f"{rollout * preset.slots} at once"
        )
    versions = variant.max_staleness + 1
    if workload.lora and workload.adapters is not None and workload.adapters < versions:
        raise Impossible(
            f"max_staleness = {variant.max_staleness} keeps {versions} versions alive, but a "
            f"worker holds {workload.adapters} adapters"
        )
    if workload.tokens_per_step is not None and variant.max_staleness < 1:
        raise Impossible(
            f"a budget of {workload.tokens_per_step} tokens per step needs max_staleness = 1 or "
            f"more, {variant.name} has {variant.max_staleness}"
        )
    if not variant.colocated and not 1 <= rollout < preset.devices:
        raise Impossible(
            f"{rollout} of {preset.devices} devices for rollout: {variant.name} needs at least "
            "one to generate and one to train"
        )


def scenario_of(
    workload: Workload,
    variant: ScheduleVariant,
    rollout: int,
    *,
    steps: int,
    warmup: int,
    control_seconds: float = 0.02,
    tick_seconds: float = 0.2,
) -> Scenario:
    """The scenario of a schedule with `rollout` generating devices (all where they take turns).

    As in `dora bench`, the run goes on beyond the `steps` that are looked at, so that they do not
    feel its end. Raises Impossible; see `check`.
    """
    preset = workload.preset
    rollout = preset.devices if variant.colocated else rollout
    check(workload, variant, rollout)
    bound = variant.max_staleness
    share = 1.0 if variant.colocated else preset.devices / (preset.devices - rollout)
    return Scenario(
        rules=Rules(
            window=Window(bound, preset.groups_per_step, workload.tokens_per_step),
            group_size=preset.group_size,
            steps=steps + bound,
            heartbeat_timeout=120.0,
            schedule=Schedule(
                kind=variant.kind, colocated=variant.colocated, adapters=workload.lora
            ),
        ),
        workers=rollout,
        slots=preset.slots,
        device=DeviceSpec(
            preset.iteration_seconds,
            preset.iteration_seconds_per_sequence,
            preset.iteration_seconds_per_context_token,
            preset.prefill_seconds_per_token,
            preset.load_seconds,
            preset.kv_cache_tokens,
        ),
        speeds=preset.speeds,
        lengths=workload.lengths,
        training_seconds=preset.training_seconds * share,
        training_seconds_per_token=workload.training_seconds_per_token * share,
        publish_seconds=preset.publish_seconds,
        prompt_tokens=preset.prompt_tokens,
        streamed=variant.streamed,
        interrupts=variant.kind == "partial",
        adapters=(workload.adapters or bound + 2) if workload.lora else 0,
        steps=steps,
        warmup=warmup,
        control_seconds=control_seconds,
        tick_seconds=tick_seconds,
    )
