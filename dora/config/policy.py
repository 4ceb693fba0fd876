"""The sections `policy` and `policy.lora`: the language model that is trained."""

from typing import Annotated, Literal

from pydantic import Field

from dora.config.section import Hook, Positive, Section


class LoraSection(Section):
    """Low-rank adaptation (LoRA, arXiv 2106.09685)."""

    rank: Positive = 16
    """Rank of the adapter."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of the adapter: its product is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers that are adapted; `all-linear` is all but the output head."""


class PolicySection(Section):
    """The language model that is trained."""

    model: str
    """Directory with config.json and *.safetensors, or a Hugging Face model name; `emulated` where
    rollout and trainer are (a vocabulary of 32,000 tokens and no directory)."""
    tokenizer: str | None = None
    """Directory or name of the tokenizer; by default the model's own."""
    prepare: Hook | None = None
    """`module:function` that makes the model directory if it is missing; called with the
    directory and this configuration. The module is looked for beside the configuration file."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights that workers load and the trainer publishes. With bfloat16 the trainer
    keeps float32 masters and adds gradients up in float32, under ZeRO stage 1 instead of 0; see
    data_types.grad_accum_dtype of trainer.deepspeed."""
    attention: str | None = None
    """Attention of the trainer's model, as transformers names it: `sdpa`, `eager`,
    `flash_attention_2`, `flash_attention_3`, `flex_attention`; by default what transformers takes
    for the model. The engine chooses its own."""
    trust_remote_code: bool = False
    """Lets Hugging Face models run code of their own; off unless you trust the model."""
    lora: LoraSection | None = None
    """Train a low-rank adapter instead of all weights: each policy version is an adapter of the
    model, and one engine hosts all live versions at once."""
