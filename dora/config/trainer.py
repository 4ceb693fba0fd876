"""The sections `trainer` and `recovery`: training, its loss and its optimizer."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dora.config.emulation import EmulatedTrainerSection
from dora.config.section import Positive, Seconds, Section

KINDS: dict[str, dict[str, Any]] = {
    "gspo": {
        "normalization": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "importance_level": "sequence",
    },
    "cispo": {"clip_low": 1.0},
}
"""Defaults of a `kind` that differ from those of the fields."""

PRESETS: dict[str, dict[str, Any]] = {
    "dapo": {"clip_high": 0.28, "mask_overlong": True, "drop_no_signal": True},
    "dr_grpo": {"advantage_std": False, "normalization": "constant"},
    "gspo": {"kind": "gspo"},
    "cispo": {"kind": "cispo", "clip_high": 4.0, "drop_no_signal": True},
    "longcat": {"normalization": "constant", "clip_dual": 3.0, "importance_cap": 2.0},
}
"""Defaults of a `preset`; docs/losses.md has the sources."""
_RESERVED = {
    "optimizer": "trainer.optimizer",
    "scheduler": "trainer.optimizer.schedule",
    "gradient_clipping": "trainer.optimizer.gradient_clip",
    "gradient_accumulation_steps": "trainer.max_tokens_per_micro_batch",
    "train_batch_size": "window.groups_per_step",
    "train_micro_batch_size_per_gpu": "trainer.max_tokens_per_micro_batch",
    "bf16": "policy.dtype",
    "fp16": "policy.dtype",
}
"""Keys of DeepSpeed's configuration that dora sets, and the setting to use instead."""


class LossSection(Section):
    """The policy-gradient loss; docs/losses.md has formulas, sources and presets."""

    preset: Literal["dapo", "dr_grpo", "gspo", "cispo", "longcat"] | None = None
    """A paper whose settings are the defaults of the other keys, which may be set beside it."""
    kind: Literal["grpo", "gspo", "cispo"] = "grpo"
    """Ratio per token and clipped (grpo), per sequence (gspo), or clipped weight (cispo)."""
    advantage_std: bool = True
    """Divide a group's advantages by the standard deviation of its rewards."""
    normalization: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens, mean of sequence means (the default of gspo), or sum over a constant
    length."""
    constant_length: Positive | None = None
    """Divisor of `constant` normalisation; by default rollout.max_new_tokens."""
    clip_low: Annotated[float, Field(gt=0)] = 0.2
    """Ratios below 1 - clip_low give no gradient when the advantage is negative. By default 3e-4
    for gspo, whose ratios are means over a sequence, and 1, no lower bound, for cispo."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """Ratios above 1 + clip_high give no gradient when the advantage is positive. By default 4e-4
    for gspo."""
    clip_dual: Annotated[float, Field(gt=1)] | None = None
    """Triplet clipping: upper bound of the ratio for negative advantages."""
    importance_cap: Annotated[float, Field(gt=0)] | None = None
    """Truncated importance weight between engine and trainer: weights above it are cut to it."""
    importance_level: Literal["token", "sequence", "sequence_mean"] = "token"
    """That weight per token, as the product over a sequence (the default of gspo), or as the
    geometric mean over it."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty to the starting policy; 0 keeps no reference model."""
    mask_overlong: bool = False
    """Leave trajectories out of the loss that were cut at max_new_tokens."""
    drop_no_signal: bool = False
    """Dynamic sampling: set groups aside whose rewards are all equal, so that each batch is full
    of groups with signal."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        preset = PRESETS.get(str(given.get("preset")), {})
        kind = given.get("kind", preset.get("kind", "grpo"))
        return KINDS.get(str(kind), {}) | preset | given


class OptimizerSection(Section):
    """AdamW and its schedule."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of Adam's moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer updates over which the learning rate rises linearly from zero."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """What the learning rate does after warm-up, until trainer.steps."""
    gradient_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the gradient."""


class TrainerSection(Section):
    """The trainer."""

    steps: Positive
    """Committed steps after which the run is complete."""
    updates_per_step: Positive = 1
    """Optimizer updates in one step; must divide window.groups_per_step."""
    max_tokens_per_micro_batch: Positive = 16_384
    """Token budget of one forward and backward pass, padding included where there is any."""
    logits_mib: Annotated[float, Field(gt=0)] = 256.0
    """Memory in MiB for logits: they exist for as many tokens at a time as fit, and are computed
    again in the backward pass. The output head's gradient needs its own size beside it."""
    packing: bool | Literal["auto"] = "auto"
    """Put the sequences of a micro-batch one after the other instead of padding them; `auto` does
    on GPUs with attention of variable length (policy.attention)."""
    checkpoint_every: Positive = 1
    """Steps between full DeepSpeed checkpoints; the steps after the last are redone on recovery."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints that are kept."""
    deterministic: bool = True
    """Use deterministic algorithms, so that a redo gives identical weights."""
    threads: Positive = 1
    """CPU only: threads of the trainer."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    deepspeed: dict[str, Any] = {}
    """DeepSpeed configuration, merged over what dora sets (`zero_optimization.stage` and so on)."""
    batch_timeout_seconds: Seconds = 1800.0
    """How long the trainer waits for an admissible batch. Then it ends and says what is missing."""
    max_set_aside_in_row: Annotated[int, Field(ge=0)] | None = None
    """The run stops with the commonest reason once so many groups were set aside and none trained
    since: everything fails alike then. By default those of eight steps; 0 never stops."""
    ranks: Positive = 1
    """Trainer processes on this machine that share each step, started by DeepSpeed's launcher, on
    the first devices of CUDA_VISIBLE_DEVICES. For several machines start `dora train` with a
    launcher that sets RANK and WORLD_SIZE."""
    sequence_parallel: Positive = 1
    """Ranks that share each sequence, for long ones (DeepSpeed's Ulysses); must divide the ranks
    and the model's attention heads. Each pass then has one sequence, and the mismatch between
    engine and trainer is not measured."""
    rank_timeout_seconds: Seconds = 300.0
    """How long a rank waits for the others before all of them stop."""
    streamed: bool = False
    """Begin forward and backward passes on groups as they finish, and update once the batch is
    complete; the same gradients, up to rounding, sooner. For one rank; not
    with ZeRO stage 3 or float16."""
    engine: Literal["deepspeed", "emulated"] = "deepspeed"
    """What trains: DeepSpeed, or a latency model that waits and leaves the weights as they are."""
    emulated: EmulatedTrainerSection = EmulatedTrainerSection()
    """Parameters of the emulated trainer."""
    loss: LossSection = LossSection()
    """The loss."""
    optimizer: OptimizerSection = OptimizerSection()
    """The optimizer."""

    @model_validator(mode="after")
    def _settings_fit(self) -> "TrainerSection":
        for key in self.deepspeed:
            if key in _RESERVED:
                raise ValueError(f"trainer.deepspeed.{key}: set {_RESERVED[key]} instead")
        if self.ranks > 1 and self.ranks % self.sequence_parallel:
            raise ValueError(
                f"trainer.ranks ({self.ranks}) must be a multiple of trainer.sequence_parallel "
                f"({self.sequence_parallel})"
            )
        return self


class RecoverySection(Section):
    """What the trainer does when it redoes committed steps after a crash."""

    on_mismatch: Literal["stop", "accept"] = "stop"
    """When redone weights differ from the announced ones by more than is allowed: stop, or go on
    with the redone weights and report the difference. With trainer.deterministic no difference is
    allowed, otherwise recovery.tolerance."""
    tolerance: Annotated[float, Field(ge=0)] = 1e-2
    """Largest difference, relative to the largest weight of a tensor, if the trainer is not
    deterministic."""


def check_streaming(trainer: TrainerSection, dtype: str, colocated: bool) -> None:
    """ValueError if a trainer cannot stream (`trainer.streamed`) policies of this `dtype`."""
    if trainer.ranks > 1:
        raise ValueError("trainer.streamed needs trainer.ranks = 1")
    if trainer.sequence_parallel > 1:
        raise ValueError("trainer.streamed needs trainer.sequence_parallel = 1")
    if colocated:
        raise ValueError(
            "trainer.streamed trains while groups are generated: remove schedule.colocated"
        )
    zero = trainer.deepspeed.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if trainer.engine == "deepspeed" and (stage not in (0, 1, 2) or dtype == "float16"):
        raise ValueError(
            "trainer.streamed divides gradients once a step is complete, which is possible under "
            f"ZeRO stages 0, 1 and 2 (not {stage}) and with policy.dtype float32 or bfloat16 (not "
            f"{dtype})"
        )
