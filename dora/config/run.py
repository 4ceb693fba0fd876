"""The sections about the run as a whole: where its files go, its weights, its evaluations."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from dora.config.section import Positive, Section


class RunSection(Section):
    """Identity of the run and where its files go."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,99}$")]
    """Prefixes the run's topics and names its directory: lower-case letters, digits, - and _."""
    directory: Path = Path("runs")
    """Directory in which `<name>/` holds logs, weights, checkpoints and the summary."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seeds the prompt stream, the sampling and the trainer."""
    max_restarts: Annotated[int, Field(ge=0)] = 20
    """Restarts of processes that died, in all, before `dora run` gives up."""
    accept_changed: tuple[str, ...] = ()
    """Inputs of the run (`task.path`, `task.verifier`, `policy.tokenizer` ...) that may differ from
    those in the ledger, which then records the new ones. Set by `--accept-changed`."""


class WeightsSection(Section):
    """Where policy versions are stored."""

    store: str | None = None
    """URL of the weight store (`file:///...`, or anything that fsspec opens); by default the
    directory `weights` of the run."""
    keep: Positive = 2
    """Versions kept beyond those of the window."""


class EvaluationSection(Section):
    """Held-out prompts, sampled as in training."""

    prompts: Annotated[int, Field(ge=0)] = 0
    """Held-out prompts per evaluation; 0 is none."""
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; the first and the last version are always evaluated."""
