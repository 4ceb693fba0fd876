"""Workloads and clusters with names, and what would be ideal on them.

A preset describes the devices, the work of a step and its training, and nothing of a
schedule. Whatever schedule runs on it is measured against the same ideal.

A *device* is what one generator group decodes with (in the paper, several accelerators that share a
model). `N` devices generate and train: schedules that alternate use all of them for both, the
others give `R` to rollout and the rest to training, which then takes `T * N / (N - R)`.
"""

import math
from dataclasses import dataclass, replace

from dora.core.scheduling.schedules import ScheduleKind


@dataclass(frozen=True, slots=True)
class ScheduleVariant:
    """A schedule with its staleness bound K. `colocated`: rollout and training take turns on all
    devices. `streamed`: a step trains groups as they finish."""

    kind: ScheduleKind
    max_staleness: int
    colocated: bool
    streamed: bool = False

    @property
    def whole_name(self) -> str:
        """Without what is streamed: the name by which splits are known."""
        if self.kind == "dora" or (self.kind == "partial" and self.max_staleness != 1):
            return f"{self.kind}:{self.max_staleness}"
        return self.kind

    @property
    def name(self) -> str:
        """As `schedule_variant` reads it."""
        return self.whole_name + (STREAMED if self.streamed else "")


STREAMED = "+streamed"


def schedule_variant(text: str) -> ScheduleVariant:
    """Reads `sync`, `one-step-off`, `partial`, `partial:K` or `dora:K`; `dora` alone is K=1, and
    `+streamed` behind `one-step-off` or `dora:K` trains groups as they finish.

    `partial` without a bound keeps one more batch outstanding than is trained: K=1. ValueError for
    anything else.
    """
    whole = text.removesuffix(STREAMED)
    if whole != text:
        variant = schedule_variant(whole)
        if variant.colocated:
            raise ValueError(f"{text!r} is no schedule: {whole} takes turns on the same devices")
        return replace(variant, streamed=True)
    kind, separator, bound = text.partition(":")
    if separator and (kind not in ("dora", "partial") or not bound.isdecimal()):
        raise ValueError(f"{text!r} is no schedule: only dora and partial take a bound, as dora:3")
    if kind == "dora":
        return ScheduleVariant("dora", int(bound or 1), colocated=False)
    if kind == "sync":
        return ScheduleVariant("sync", 0, colocated=True)
    if kind == "one-step-off":
        return ScheduleVariant("one-step-off", 1, colocated=False)
    if kind == "partial":
        return ScheduleVariant("partial", int(bound or 1), colocated=True)
    raise ValueError(
        f"{text!r} is no schedule: sync, one-step-off, partial or dora:K, the "
        f"last and one-step-off also with {STREAMED}"
    )


RIVALS = ("sync", "one-step-off", "partial", "dora:1", "dora:2", "dora:3")
"""The schedules that are compared where none is named."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A cluster and its work; times in seconds of the device, lengths in tokens.

    `length_*` have the meaning of `rollout.emulated.length_*`; longer responses are cut at
    `max_new_tokens`. `training_seconds` is a step on all devices. `speeds` are relative speeds of
    the devices, repeated in turn; () is 1 for all. `splits` are rollout shares that did well, of
    the schedules that split the devices, by the variant's name.
    """

    name: str
    description: str
    devices: int
    training_seconds: float
    groups_per_step: int = 512
    group_size: int = 16
    slots: int = 256
    prompt_tokens: int = 512
    max_new_tokens: int = 30_000
    length_mean: float = 2_400.0
    length_sigma: float = 1.0
    length_prompt_share: float = 0.0
    iteration_seconds: float = 0.024
    iteration_seconds_per_sequence: float = 0.0001
    iteration_seconds_per_context_token: float = 0.0
    prefill_seconds_per_token: float = 0.00001
    kv_cache_tokens: int | None = None
    load_seconds: float = 2.0
    publish_seconds: float = 1.0
    speeds: tuple[float, ...] = ()
    splits: tuple[tuple[str, int], ...] = ()

    @property
    def samples_per_step(self) -> int:
        """Trajectories of one step."""
        return self.groups_per_step * self.group_size

    def speed(self, device: int) -> float:
        """Relative speed of the device with this number."""
        return self.speeds[device % len(self.speeds)] if self.speeds else 1.0

    def mean_tokens(self) -> float:
        """Expected length of a response, the cut at `max_new_tokens` included."""
        if self.length_sigma == 0:
            return min(self.length_mean, self.max_new_tokens)
        return _clipped_moment(self, 1)

    def mean_context(self) -> float:
        """Context in tokens that a generated token sees on average."""
        if self.length_sigma == 0:
            return self.prompt_tokens + self.mean_tokens() / 2
        return self.prompt_tokens + _clipped_moment(self, 2) / (2 * self.mean_tokens())

    def full_batch_rate(self, devices: int | None = None) -> float:
        """Tokens per second that this many devices (by default all) decode with full batches."""
        count = self.devices if devices is None else devices
        batch = float(self.slots)
        if self.kv_cache_tokens is not None:
            batch = min(batch, max(1.0, self.kv_cache_tokens / self.mean_context()))
        iteration = (
            self.iteration_seconds
            + self.iteration_seconds_per_sequence * batch
            + self.iteration_seconds_per_context_token * batch * self.mean_context()
        )
        return sum(self.speed(device) for device in range(count)) * batch / iteration

    def ideal_seconds(self, tokens: float | None = None) -> float:
        """The ideal step: its tokens (by default the expected ones) at the full-batch decode rate
        of all devices, plus training on all devices."""
        if tokens is None:
            tokens = self.mean_tokens() * self.samples_per_step
        return tokens / self.full_batch_rate() + self.training_seconds

    def training_seconds_beside(self, rollout: int) -> float:
        """A step's training on the devices that `rollout` leaves; ValueError if none is left."""
        if not 0 <= rollout < self.devices:
            raise ValueError(
                f"{rollout} of {self.devices} devices for rollout leave none for training"
            )
        return self.training_seconds * self.devices / (self.devices - rollout)

    def balanced_rollout(self) -> int:
        """Devices for rollout with which generation at full batches keeps pace with training: what
        a schedule that never waits would take."""
        tokens = self.mean_tokens() * self.samples_per_step

        def step(rollout: int) -> float:
            return max(
                tokens / self.full_batch_rate(rollout), self.training_seconds_beside(rollout)
            )

        return min(range(1, self.devices), key=step)

    def rollout_devices(self, variant: ScheduleVariant) -> int:
        """Devices for rollout: all where they take turns, else a split that did well."""
        if variant.colocated:
            return self.devices
        return dict(self.splits).get(variant.whole_name) or self.balanced_rollout()


def _clipped_moment(preset: Preset, order: int) -> float:
    """E[min(L, cut)^order] of the log-normal length L."""
    sigma, cut = preset.length_sigma, float(preset.max_new_tokens)
    mu = math.log(preset.length_mean) - sigma**2 / 2
    z = (math.log(cut) - mu) / sigma
    below = math.exp(order * mu + (order * sigma) ** 2 / 2) * _phi(z - order * sigma)
    return below + cut**order * _phi(-z)


def _phi(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "paper-16",
            "dense 32B as in arXiv 2604.26256: 16 generator groups, 8,192 samples a step, mean "
            "length 2.4 K, longest 30 K, training 480 s on all devices",
            devices=16,
            training_seconds=480.0,
            splits=(("one-step-off", 8), ("dora:1", 6), ("dora:2", 6), ("dora:3", 6)),
        ),
        Preset(
            "paper-32",
            "the same work on 32 generator groups, training 327 s on all devices",
            devices=32,
            training_seconds=327.0,
            splits=(("one-step-off", 17), ("dora:1", 13), ("dora:2", 10), ("dora:3", 9)),
        ),
        Preset(
            "mixed-speed",
            "16 devices of two generations, every second one at 0.55 of the speed",
            devices=16,
            training_seconds=480.0,
            speeds=(1.0, 0.55),
        ),
        Preset(
            "agentic-tail",
            "long multi-turn responses: mean length 4 K with a heavier tail up to 64 K, alike "
            "within a group; attention and key-value memory count",
            devices=16,
            training_seconds=700.0,
            groups_per_step=256,
            group_size=16,
            prompt_tokens=2_048,
            max_new_tokens=64_000,
            length_mean=4_000.0,
            length_sigma=1.4,
            length_prompt_share=0.3,
            iteration_seconds_per_context_token=1.0e-8,
            kv_cache_tokens=1_500_000,
        ),
    )
}


def preset_named(name: str) -> Preset:
    """The preset with this name; ValueError that lists the names otherwise."""
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
