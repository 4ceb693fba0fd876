"""The language model that is trained, as DeepSpeed sees it.

A forward pass has no randomness (all dropout is off), computes logits only where a generated token
is predicted, and its log-probabilities are those of the distribution sampled from.
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.checkpoint import checkpoint

from dora.config import Config
from dora.consumers.learner.batches import MicroBatch
from dora.consumers.learner.losses import TRUNCATION_COPIES, token_logprobs
from dora.consumers.learner.sequence_parallel import SequenceGroup
from dora.errors import PolicyError, first_line
from dora.weights.adapters import DOWN, PREFIX, UP
from dora.weights.models import check_model_directory

log = logging.getLogger(__name__)

MEMORY_BYTES = 2**30
"""Larger policies keep no copies: their mismatch is measured on the current version only."""


class WeightHistory:
    """Copies of the trained parameters of the last versions, at most `versions` of them.

    With them the trainer's log-probabilities of a stale trajectory are compared with the engine's
    under the same version, so that the mismatch does not contain the training in between.
    """

    def __init__(self, versions: int) -> None:
        self._versions = versions
        self._kept: dict[int, dict[str, torch.Tensor]] = {}

    def keep(self, version: int, module: torch.nn.Module) -> None:
        """Copy the module's parameters, which are those of `version`, if memory allows; frozen ones
        are the same in every version."""
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        size = sum(p.numel() * p.element_size() for p in trained.values())
        if size * self._versions > MEMORY_BYTES:
            return
        self._kept[version] = {name: p.detach().clone() for name, p in trained.items()}
        for old in sorted(self._kept)[: -self._versions or None]:
            del self._kept[old]

    def of(self, version: int) -> dict[str, torch.Tensor] | None:
        """The version's parameters by name, if they are kept."""
        return self._kept.get(version)


# The LoRA adapter in a policy model (LoRA, arXiv 2106.09685; peft's layers). Its starting values
# depend on the run's seed and the model alone, so a restart makes the same ones. The upper matrices
# start at zero: version 0 is the base model.
_ADAPTER = "default"
_UPPER = f".lora_B.{_ADAPTER}.weight"


def add_adapter(model: nn.Module, config: Config) -> dict[str, Any]:
    """Put the adapter of `policy.lora` into a Hugging Face model, in place; the rest is frozen.

    Returns the adapter's configuration as peft writes it, without paths of this machine. Raises
    PolicyError where `target_modules` names no layer of the model, or one that is not linear.
    """
    import peft

    section = config.policy.lora
    assert section is not None
    every = section.target_modules == "all-linear"
    alpha = int(section.alpha) if section.alpha.is_integer() else section.alpha
    settings = peft.LoraConfig(
        r=section.rank,
        lora_alpha=alpha,
        target_modules="all-linear" if every else list(section.target_modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name(config.policy.model),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        try:
            peft.inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
        except ValueError as error:
            raise PolicyError(
                f"policy.lora.target_modules: {first_line(error)}",
                hint=f"Linear layers of this model: {', '.join(_linear_layers(model))}.",
            ) from error
    odd = [n for n, p in model.named_parameters() if p.requires_grad and not _is_matrix(n)]
    if odd:
        raise PolicyError(
            f"policy.lora.target_modules: {odd[0]} belongs to a layer that is not linear",
            hint=f"Linear layers of this model: {', '.join(_linear_layers(model))}.",
        )
    written = {k: v for k, v in settings.to_dict().items() if v is not None}
    written["target_modules"] = _targets(model)
    written["inference_mode"] = True
    return written


def _targets(model: nn.Module) -> list[str]:
    """Names of the adapted layers, as short as they are unambiguous."""
    names = [name for name, _ in model.named_modules()]
    adapted = sorted(n.removesuffix(".lora_A") for n in names if n.endswith(".lora_A"))
    short = sorted({name.rpartition(".")[2] for name in adapted})
    matched = sum(name.rpartition(".")[2] in short for name in names)
    return short if matched == len(adapted) else adapted


def base_name(model: str) -> str:
    """Name of the base model as an adapter's configuration has it: the Hugging Face name, or the
    last part of a directory, whose path on this machine is private."""
    path = Path(model)
    return path.name if path.is_absolute() or path.exists() else model


def _is_matrix(name: str) -> bool:
    return name.endswith((f".lora_A.{_ADAPTER}.weight", _UPPER))


def _linear_layers(model: nn.Module) -> list[str]:
    names = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return sorted(names - {_ADAPTER, "base_layer"})


def published_name(parameter: str) -> str:
    """Name under which peft and vLLM store an adapter's parameter."""
    stem = parameter.removesuffix(f".{_ADAPTER}.weight")
    end = UP if stem.endswith(".lora_B") else DOWN
    return f"{PREFIX}{stem.removesuffix('.lora_B').removesuffix('.lora_A')}{end}"


def without_adapter(module: nn.Module) -> dict[str, torch.Tensor]:
    """Values of parameters of `module` with which it computes what its base model does."""
    return {
        name: torch.zeros_like(parameter)
        for name, parameter in module.named_parameters()
        if name.endswith(_UPPER)
    }


LogitsFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From logits [n, V] and targets [n] to [n, ...]; may overwrite the logits."""


class PolicyModel(nn.Module):
    """A Hugging Face causal language model that answers with log-probabilities of given tokens.

    Logits exist for a chunk of tokens at a time, of at most `logits_mib`, and are computed again in
    the backward pass. A model whose logits are not just its output head's of its last hidden
    states (they are compared on two tokens) computes them all at once.
    """

    def __init__(self, model: nn.Module, logits_mib: float) -> None:
        super().__init__()
        self.model = model
        self.logits_mib = logits_mib
        self.sequences: SequenceGroup | None = None
        """The ranks that share each sequence with this one."""
        self._chunked = _is_head_of_body(model)
        if not self._chunked:
            log.warning(
                "%s computes more than its output head after its last hidden states: "
                "trainer.logits_mib has no effect, logits exist for a whole micro-batch",
                type(model).__name__,
            )

    def forward(
        self,
        token_ids: torch.Tensor,
        places: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        top_p: float,
        top_k: int,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Log-probabilities [N] of `targets`; see MicroBatch for the other arguments."""
        score = partial(token_logprobs, temperature=temperature, top_p=top_p, top_k=top_k)
        copies = TRUNCATION_COPIES if top_k or top_p < 1.0 else 1
        return self.per_token(score, token_ids, places, targets, copies, position_ids)

    def per_token(
        self,
        function: LogitsFunction,
        token_ids: torch.Tensor,
        places: torch.Tensor,
        targets: torch.Tensor,
        copies: int,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`function` of the logits that predict `targets`, chunk by chunk; it needs `copies` times
        the memory of its logits in float32."""
        count, share = len(targets), self.sequences
        if share is not None:
            part = share.part(token_ids, places)
            token_ids, position_ids, places = part.token_ids, part.position_ids, part.places
            targets = targets[part.own]
        inputs: dict[str, Any] = {"input_ids": token_ids, "use_cache": False}
        if position_ids is not None:
            inputs["position_ids"] = position_ids
        if not self._chunked:
            logits = self.model(**inputs).logits
            found = function(logits.flatten(0, 1)[places], targets)
            return found if share is None else share.whole(found, part.own, count)
        body, head = _parts(self.model)
        hidden = body(**inputs).last_hidden_state.flatten(0, 1)[places]
        entry = 4 * copies + (0 if hidden.dtype == torch.float32 else hidden.element_size())
        size = max(1, int(self.logits_mib * 2**20 / (entry * _vocabulary(self.model))))

        def one(states: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            return function(head(states), chosen)

        if torch.is_grad_enabled():
            one = partial(checkpoint, one, use_reentrant=False, preserve_rng_state=False)
        chunks = _chunks(head, -(-len(targets) // size))
        pairs = zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True)
        found = torch.cat([one(states, chosen) for states, chosen in pairs])
        return found if share is None else share.whole(found, part.own, count)


def _chunks(head: nn.Module, own: int) -> int:
    """Chunks of this pass. Under ZeRO-3 the ranks gather the head's parameters together, for each
    chunk: all of them make as many as the rank with the most tokens, empty ones too."""
    own = max(own, 1)
    partitioned = any(hasattr(parameter, "ds_id") for parameter in head.parameters())
    if not partitioned or torch.distributed.get_world_size() == 1:
        return own
    most = torch.tensor(own, device=next(head.parameters()).device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most)


def _parts(model: Any) -> tuple[nn.Module, nn.Module]:
    """What gives a model's last hidden states, and its output head."""
    return model.base_model, model.get_output_embeddings()


def _vocabulary(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def _is_head_of_body(model: Any) -> bool:
    body, head = _parts(model)
    if body is model or head is None:
        return False
    tokens = torch.tensor([[0, 1]], device=next(model.parameters()).device)
    inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = torch.arange(2, device=tokens.device)[None]
    with torch.no_grad():
        whole = model(**inputs).logits.float()
        states = body(**inputs)
        if not hasattr(states, "last_hidden_state"):
            return False
        found = head(states.last_hidden_state).float()
    near = 1e-4 if model.dtype == torch.float32 else 2e-2
    return found.shape == whole.shape and bool(
        (found - whole).abs().max() <= near * whole.abs().max()
    )


_VARIABLE_LENGTH = ("flash", "flex", "kernels-community/flash")
"""How the names of attention begin that does no work between packed sequences."""


def packs(model: Any, packing: bool | Literal["auto"]) -> bool:
    """Whether micro-batches of `model` are packed, as `trainer.packing` says. PolicyError if they
    shall be and the model lets packed sequences see one another."""
    attention = str(model.config._attn_implementation)
    fits = model.device.type == "cuda" and attention.startswith(_VARIABLE_LENGTH)
    if packing is False or (packing == "auto" and not fits):
        return False
    if _keeps_apart(model):
        return True
    name = type(model).__name__
    if packing == "auto":
        log.info("%s does not keep packed sequences apart: micro-batches are padded", name)
        return False
    raise PolicyError(
        f"trainer.packing: {name} does not keep packed sequences apart (attention {attention})",
        hint='Set trainer.packing = "auto" or false.',
    )


def _keeps_apart(model: Any) -> bool:
    device = model.device
    tokens = torch.tensor([[0, 1, 1], [1, 0, 1]], device=device)
    positions = torch.arange(3, device=device).repeat(2)[None]
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits.flatten(0, 1).float()
        try:
            found = model(tokens.view(1, -1), position_ids=positions, use_cache=False).logits
        except TypeError:  # the model takes no positions
            return False
    near = 1e-4 if model.dtype == torch.float32 else 3e-2
    return bool((found[0].float() - expected).abs().max() <= near * expected.abs().max())


def model_inputs(batch: MicroBatch, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a micro-batch that PolicyModel takes, on `device`."""
    names = ["token_ids", "places", "targets"]
    if batch.position_ids is not None:
        names.append("position_ids")
    return {name: torch.from_numpy(getattr(batch, name)).to(device) for name in names}


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
            attn_implementation=config.policy.attention,
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
