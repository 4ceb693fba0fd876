"""The sections for emulated devices: a latency model in place of accelerators.

All times are seconds of the emulated device; `time_scale` alone says how long they take here.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from dora.config.section import Positive, Section

NotNegative = Annotated[float, Field(ge=0)]


class EmulatedSection(Section):
    """Latency model of an accelerator, for schedules and faults at sizes no test machine has."""

    iteration_seconds: NotNegative = 0.024
    """Time of one decode iteration with an empty batch."""
    iteration_seconds_per_sequence: NotNegative = 0.0001
    """What each running sequence adds to the iteration."""
    iteration_seconds_per_context_token: NotNegative = 0.0
    """What each token of context in the batch adds to the iteration (attention reads it all)."""
    prefill_seconds_per_token: NotNegative = 0.00001
    """Time to read one prompt token."""
    load_seconds: NotNegative = 0.5
    """Time to apply new weights."""
    kv_cache_tokens: Positive | None = None
    """Tokens that the key-value cache holds; when it is full the youngest sequence is preempted
    and read again later. Without it memory has no limit."""
    length: Literal["fixed", "uniform", "lognormal", "empirical"] = "lognormal"
    """Distribution of response lengths."""
    length_mean: Annotated[float, Field(gt=0)] = 64.0
    """Mean response length in tokens."""
    length_sigma: NotNegative = 1.0
    """lognormal: sigma of the logarithm; the larger, the heavier the tail."""
    length_file: Path | None = None
    """empirical: file with one length in tokens a line, drawn from with replacement; relative to
    the configuration file."""
    length_prompt_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """lognormal: share of the logarithm's variance that belongs to the prompt: trajectories of one
    group resemble one another, and a repeated prompt has similar lengths again."""
    speeds: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Relative speeds of the workers, by the number at the end of their names, repeated in turn;
    without it all have speed 1."""
    time_scale: NotNegative = 1.0
    """Wall-clock seconds per emulated second; 0 does not wait at all."""
    success_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of emulated trajectories that get reward 1; their text is not scored."""

    @model_validator(mode="after")
    def _empirical_has_a_file(self) -> "EmulatedSection":
        if self.length == "empirical" and self.length_file is None:
            raise ValueError("rollout.emulated.length_file is needed: one length a line")
        return self


class EmulatedTrainerSection(Section):
    """Latency model of training; waits instead of computing. Scaled by
    rollout.emulated.time_scale."""

    step_seconds: NotNegative = 1.0
    """Fixed time of one training step."""
    seconds_per_token: NotNegative = 0.0
    """What each trained token adds."""
    publish_seconds: NotNegative = 0.0
    """Time to store a version's weights."""
