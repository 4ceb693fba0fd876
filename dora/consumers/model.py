"""The language model that is trained, as DeepSpeed sees it.

Invariant: a forward pass has no randomness (all dropout is off), computes logits only where a
generated token is predicted, and its log-probabilities are those of the distribution sampled from.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from dora.config import Config
from dora.consumers.batches import MicroBatch
from dora.consumers.logprobs import token_logprobs
from dora.errors import PolicyError
from dora.weights.models import check_model_directory


class PolicyModel(nn.Module):
    """A Hugging Face causal language model that answers with log-probabilities of given tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        self._selects_logits = "logits_to_keep" in parameters

    def logits(
        self,
        token_ids: torch.Tensor,
        columns: torch.Tensor,
        rows: torch.Tensor,
        column_index: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [N, V] from which each generated token is drawn; see MicroBatch for the
        arguments."""
        if self._selects_logits:
            logits = self.model(token_ids, logits_to_keep=columns, use_cache=False).logits
        else:
            logits = self.model(token_ids, use_cache=False).logits[:, columns]
        return logits[rows, column_index]

    def forward(
        self,
        token_ids: torch.Tensor,
        columns: torch.Tensor,
        rows: torch.Tensor,
        column_index: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        top_p: float,
        top_k: int,
    ) -> torch.Tensor:
        """Log-probabilities [N] of `targets`; see MicroBatch for the other arguments."""
        return token_logprobs(
            self.logits(token_ids, columns, rows, column_index),
            targets,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
        )


def model_inputs(batch: MicroBatch, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a micro-batch that PolicyModel takes, on `device`."""
    return {
        name: torch.from_numpy(getattr(batch, name)).to(device)
        for name in ("token_ids", "columns", "rows", "column_index", "targets")
    }


def load_model(directory: Path, config: Config) -> nn.Module:
    """The model in `directory`, in `policy.dtype`, with all dropout off.

    Raises PolicyError if the directory holds no model, one of an unknown kind, or weights that do
    not fit its config.json.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    check_model_directory(directory)
    transformers_logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=getattr(torch, config.policy.dtype),
            trust_remote_code=config.policy.trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError) as error:
        raise PolicyError(
            f"policy.model: the model in {directory} cannot be loaded: {_summary(error)}",
            hint="A model with code of its own needs policy.trust_remote_code = true."
            if "trust_remote_code" in str(error)
            else None,
        ) from error
    except SafetensorError as error:
        raise PolicyError(f"policy.model: weights in {directory} are damaged: {error}") from error
    _check_complete(directory, report)
    _switch_dropout_off(model)
    if config.trainer.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


def _summary(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _check_complete(directory: Path, report: Mapping[str, Any]) -> None:
    for kind, text in (("missing_keys", "lack"), ("mismatched_keys", "have another shape for")):
        names = sorted(str(name) for name in report.get(kind) or ())
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise PolicyError(
                f"policy.model: the weights in {directory} {text} {', '.join(names[:3])}{more}",
                hint="They would start from random values; the directory is incomplete or its "
                "config.json belongs to another model.",
            )


def _switch_dropout_off(model: nn.Module) -> None:
    """Dropout would make the trainer's log-probabilities differ from the engine's at random."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "resid_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def untied(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` without the second and later names of tensors that share memory (tied embeddings):
    safetensors stores each once, and loaders tie them again."""
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    result = {}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        result[name] = tensor
    return result
