"""What a simulation is of: devices, work, schedule, and what happens to the workers meanwhile.

Invariant: a scenario determines its simulation; two runs of the same one give the same result.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dora.core.coordination import Rules
from dora.core.device import DeviceSpec

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
    - `control_seconds`: from an event to whoever is told of it, and from a command to its effect.
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
