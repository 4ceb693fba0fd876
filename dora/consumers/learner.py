"""The learner: a policy model, its optimizer, and one training step.

Invariant: in deterministic mode the weights after `update` depend only on the weights, optimizer
state and update count before it and on the samples, bit for bit; and the model is changed by
`update` and `load_checkpoint` alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from dora.config import Config
from dora.consumers import learner_files, process
from dora.consumers.adapter import add_adapter, published_name, without_adapter
from dora.consumers.batch_metrics import batch_metrics
from dora.consumers.batches import MicroBatch, Sample, micro_batches, split_groups
from dora.consumers.losses import TokenTerms, policy_loss
from dora.consumers.metrics import LearningSums, Mismatch
from dora.consumers.model import PolicyModel, load_model, model_inputs, untied
from dora.consumers.past_weights import PastWeights
from dora.consumers.ranks import Leader, Member, together
from dora.consumers.schedule import learning_rate
from dora.consumers.shares import Part, Place, describe_share, part_of, plan_update
from dora.errors import PolicyError
from dora.weights.tensors import weights_checksum

Floats = npt.NDArray[np.float32]
T = TypeVar("T")
OBSERVED = 16
"""Samples per version on which engine and trainer are compared in each step."""


def _nothing() -> None:
    """Default of `progress`."""


class Learner:
    """One policy in training.

    Parameters: `model_dir` holds the starting policy (PolicyError if it is unusable); `progress` is
    called between micro-batches, for heartbeats during long steps; with `ranks` this is one of
    several, and on rank 0 each collective method tells the others to call theirs.
    """

    def __init__(
        self,
        model_dir: Path,
        config: Config,
        *,
        progress: Callable[[], None] = _nothing,
        ranks: Leader | Member | None = None,
    ) -> None:
        self._config = config
        self._progress = progress
        self._loss = config.trainer.loss
        self._constant_length = self._loss.constant_length or config.rollout.max_new_tokens
        self._ranks = ranks
        self._leader = ranks if isinstance(ranks, Leader) else None
        self._order("make")
        self._deepspeed = process.prepare(config, ranks)
        self._settings = process.deepspeed_settings(config)
        self._plain = process.is_plain(self._settings)
        self._stage = self._settings["zero_optimization"].get("stage", 0)
        self._device = process.device()
        self.rank = torch.distributed.get_rank()
        self.world = torch.distributed.get_world_size()
        model = load_model(model_dir, config)
        self.vocabulary = int(model.get_input_embeddings().num_embeddings)
        self.adapter_settings = add_adapter(model, config) if config.policy.lora else None
        """Configuration of the adapter that is trained; None where all weights are."""
        policy = PolicyModel(model).to(self._device)
        self._reference: PolicyModel | None = None
        self._base: dict[str, torch.Tensor] | None = None
        if self._loss.kl_coefficient > 0:
            if self.adapter_settings is not None and self._stage < 3:
                self._base = without_adapter(policy)
            else:
                self._reference = PolicyModel(load_model(model_dir, config)).to(self._device)
                self._reference.requires_grad_(False)
        optimizer = torch.optim.AdamW(
            [parameter for parameter in policy.parameters() if parameter.requires_grad],
            lr=config.trainer.optimizer.learning_rate,
            betas=config.trainer.optimizer.betas,
            eps=config.trainer.optimizer.eps,
            weight_decay=config.trainer.optimizer.weight_decay,
            fused=True,
        )
        with together(ranks):
            self._engine, *_ = self._deepspeed.initialize(
                model=policy, optimizer=optimizer, config=self._settings, dist_init_required=False
            )
        if self.world == 1 and self._plain:
            # DeepSpeed would copy all gradients to and fro to add them up over a single rank.
            self._engine.enable_backward_allreduce = False
        self._past = PastWeights(config.window.max_staleness)
        self.updates = 0

    def _order(self, kind: str, **content: Any) -> None:
        if self._leader is not None:
            self._leader.order(kind, **content)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(int(getattr(p, "ds_numel", p.numel())) for p in self._engine.module.parameters())

    def update(
        self,
        groups: Sequence[Sequence[Sample]],
        version: int,
        probes: Sequence[Sample] = (),
        places: Sequence[Sequence[Place]] = (),
    ) -> dict[str, float]:
        """Train on one step's groups, in this order; returns the step's metrics.

        `version` is the current policy version; `places` says where each sample lies in the
        trajectories topic (needed where there are other ranks, which fetch their shares). The
        groups are split into `trainer.updates_per_step` optimizer batches. The mismatch between
        engine and trainer (`logprob_mismatch_*`) is measured on some of the step's samples, each
        under the weights of its own version; if these are at hand for none, on `probes`, further
        samples of the current version; if there are none either, these metrics are left out. The
        difference over older samples under the current weights, which holds the drift of the policy
        too, is `logprob_drift_mean`. An optimizer batch in which no sample can have a gradient
        leaves weights and optimizer state alone. Raises PolicyError when the gradient is infinite
        or no number, RankError when another rank is lost.
        """
        parts = [list(chain(*part)) for part in self._split(groups)]
        plans = [
            plan_update(part, self._loss, self._budget, self._constant_length, self.world)
            for part in parts
        ]
        if self._leader is not None:
            located = [list(chain(*part)) for part in self._split(places)]
            shares = [
                [
                    describe_share(plan, rank, part, where)
                    for plan, part, where in zip(plans, parts, located, strict=True)
                ]
                for rank in range(self.world)
            ]
            self._leader.order_each("update", {"version": version}, shares)
        samples = list(chain(*parts))
        mismatch = Mismatch()
        if self._stage < 3 or self.world == 1:
            self._observe(samples, probes, version, mismatch)
        own = [
            part_of(plan.ranks[0], part, plan.weights)
            for plan, part in zip(plans, parts, strict=True)
        ]
        metrics = self.train(own, version, mismatch)
        return batch_metrics(samples, version, self._config.task.success_threshold) | metrics

    def _split(self, groups: Sequence[Sequence[T]]) -> list[list[Sequence[T]]]:
        return split_groups(groups, self._config.trainer.updates_per_step)

    def train(self, parts: Sequence[Part], version: int, mismatch: Mismatch) -> dict[str, float]:
        """Do this rank's parts of a step's optimizer updates; returns the metrics of all ranks."""
        with together(self._ranks):
            proximal: list[list[torch.Tensor]] | None = None
            if self._loss.importance_cap is not None and len(parts) > 1:
                # The proximal policy is that of the step's start: score before the first update.
                proximal = [[self._score(batch) for batch in part.batches] for part in parts]
            sums = LearningSums()
            if self._stage < 3:
                self._past.keep(version, self._engine.module)
            for index, part in enumerate(parts):
                rate = self._set_learning_rate()
                observe = (part.samples, version, mismatch) if index == 0 else None
                if part.batches:
                    old = proximal[index] if proximal else None
                    sums.norms.append(self._optimize(part.batches, old, sums, observe))
                self.updates += 1
            self._reduce(sums, mismatch)
        metrics = {"learning_rate": rate} | sums.metrics(self._loss.kl_coefficient > 0)
        return metrics | mismatch.metrics()

    @property
    def _budget(self) -> int:
        return self._config.trainer.max_tokens_per_micro_batch

    def _set_learning_rate(self) -> float:
        trainer = self._config.trainer
        total = trainer.steps * trainer.updates_per_step
        rate = learning_rate(trainer.optimizer, self.updates, total)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _forward(self, module: Callable[..., torch.Tensor], batch: MicroBatch) -> torch.Tensor:
        sampling = self._config.rollout
        return module(
            **model_inputs(batch, self._device),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )

    def _score(
        self, batch: MicroBatch, weights: dict[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Log-probabilities [N] under the current policy, or other `weights`; no gradient."""
        module = self._engine if self._stage == 3 else self._engine.module

        def with_weights(**inputs: object) -> torch.Tensor:
            return torch.func.functional_call(module, weights, (), inputs)

        with torch.no_grad():
            scores = self._forward(module if weights is None else with_weights, batch)
        self._progress()
        return scores

    def _terms(
        self, batch: MicroBatch, logprobs: torch.Tensor, proximal: torch.Tensor | None
    ) -> TokenTerms:
        reference = None
        if self._base is not None:
            reference = self._score(batch, self._base)
        elif self._reference is not None:
            with torch.no_grad():
                reference = self._forward(self._reference, batch)
        if self._loss.importance_cap is not None and proximal is None:
            proximal = logprobs.detach()
        as_tensor = torch.from_numpy
        return TokenTerms(
            behaviour=as_tensor(batch.behaviour).to(self._device),
            advantages=as_tensor(batch.advantages).to(self._device),
            weights=as_tensor(batch.weights).to(self._device),
            sequences=as_tensor(batch.rows).to(self._device),
            proximal=proximal,
            reference=reference,
        )

    def _optimize(
        self,
        share: Sequence[MicroBatch],
        proximal: Sequence[torch.Tensor] | None,
        sums: LearningSums,
        observe: tuple[Mapping[int, Sample], int, Mismatch] | None,
    ) -> float:
        """One optimizer update over this rank's micro-batches; returns the gradient norm."""
        for index, batch in enumerate(share):
            self._engine.set_gradient_accumulation_boundary(index == len(share) - 1)
            logprobs = self._forward(self._engine, batch)
            old = None if proximal is None else proximal[index]
            parts = policy_loss(logprobs, self._terms(batch, logprobs, old), self._loss)
            # DeepSpeed averages over ranks; the weights already hold the whole batch's denominator.
            self._engine.backward(parts.loss * self.world if self.world > 1 else parts.loss)
            if batch.weights.any():
                sums.add(parts, logprobs.detach())
                if observe is not None:
                    drift_of(batch, logprobs.detach(), *observe)
            self._progress()
        norm = self._clip() if self._plain else 0.0
        self._check_finite(norm)
        self._engine.step()
        if not self._plain:
            norm = float(self._engine.get_global_grad_norm() or 0.0)
            self._check_finite(norm)
        return norm

    def _check_finite(self, norm: float) -> None:
        """Stop before weights that are no numbers are published. float16 scales its loss and skips
        such updates itself."""
        if not math.isfinite(norm) and self._config.policy.dtype != "float16":
            raise PolicyError(
                f"the gradient of optimizer update {self.updates} is {norm}; nothing of this step "
                "is published",
                hint="Training diverged, or the model overflows. Lower "
                "trainer.optimizer.learning_rate, or set trainer.loss.clip_dual and "
                "trainer.loss.importance_cap; changed values need a new run.name.",
            )

    def _clip(self) -> float:
        parameters = [p for p in self._engine.module.parameters() if p.grad is not None]
        limit = self._config.trainer.optimizer.gradient_clip
        return float(torch.nn.utils.clip_grad_norm_(parameters, limit))

    def _observe(
        self, samples: Sequence[Sample], probes: Sequence[Sample], version: int, mismatch: Mismatch
    ) -> None:
        """Compare engine and trainer on a few samples of each version whose weights are at hand."""
        chosen: dict[int, list[Sample]] = {}
        for sample in samples:
            known = sample.version == version or self._past.of(sample.version) is not None
            if known and sample.generated:
                chosen.setdefault(sample.version, []).append(sample)
        if not chosen and probes:
            chosen[version] = list(probes)
        for generated_by, all_of_it in sorted(chosen.items()):
            stride = max(1, len(all_of_it) // OBSERVED)
            some = all_of_it[::stride][:OBSERVED]
            weights = None if generated_by == version else self._past.of(generated_by)
            for batch in micro_batches(some, self._budget):
                scores = self._score(batch, weights)
                mismatch.add_own(scores.float().cpu().numpy() - batch.behaviour)

    def _reduce(self, sums: LearningSums, mismatch: Mismatch) -> None:
        """Add up the ranks' sums and take their maxima."""
        if self.world == 1:
            return
        largest = torch.tensor(mismatch.own_max, device=self._device)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        mismatch.own_max = float(largest)
        for values in (sums, mismatch):
            packed = torch.tensor(values.pack(), dtype=torch.float64, device=self._device)
            torch.distributed.all_reduce(packed)
            values.unpack(packed.tolist())

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Log-probabilities (nats) of each sample's generated tokens under the current policy,
        temperature and truncation of the rollout included."""
        result: list[Floats] = [np.zeros(0, dtype=np.float32) for _ in samples]
        for batch in micro_batches(samples, self._budget):
            scores = self._score(batch).float().cpu().numpy()
            for row, index in enumerate(batch.samples):
                result[index] = scores[batch.rows == row]
        return result

    def sequence_logprobs(self, token_ids: Sequence[int]) -> Floats:
        """Plain log-probabilities [n - 1] (temperature 1, whole vocabulary) of each token after the
        first: what the canary is compared with."""
        if self._stage == 3:
            self._order("score", tokens=list(token_ids))
        tokens = torch.tensor([list(token_ids)], device=self._device)
        count = len(token_ids) - 1
        places = torch.arange(count, device=self._device)
        module = self._engine if self._stage == 3 else self._engine.module
        with torch.no_grad():
            scores = module(
                token_ids=tokens,
                columns=places,
                rows=torch.zeros_like(places),
                column_index=places,
                targets=tokens[0, 1:],
                temperature=1.0,
                top_p=1.0,
                top_k=0,
            )
        return np.asarray(scores.float().cpu().numpy(), dtype=np.float32)

    def export_state(self) -> dict[str, torch.Tensor]:
        """The policy's tensors by their Hugging Face names, in `policy.dtype`, tied ones once; of
        an adapter its own tensors, by peft's names.

        Gathered to the CPU under ZeRO-3; otherwise these are the live tensors, not copies.
        """
        model = self._engine.module.model
        dtype = getattr(torch, self._config.policy.dtype)
        adapter = self.adapter_settings is not None
        if self._stage == 3:
            self._order("export")
            tensors = {}
            for name, parameter in model.named_parameters():
                if adapter and not parameter.requires_grad:
                    continue
                with self._deepspeed.zero.GatheredParameters([parameter]):
                    held = parameter.detach().to("cpu", dtype, copy=True)
                tensors[published_name(name) if adapter else name] = held
            return tensors
        if adapter:
            return {
                published_name(name): parameter.detach().to(dtype)
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            }
        state = untied(model.state_dict())
        return {
            name: tensor.detach().to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in state.items()
        }

    def weights_checksum(self) -> str:
        """Checksum of `export_state` (see `dora.weights.tensors`)."""
        return weights_checksum(self.export_state())

    def save_checkpoint(self, directory: Path) -> None:
        """Write weights, optimizer state and update count to `directory`, which must exist."""
        self._order("save", directory=str(directory.absolute()))
        with together(self._ranks):
            learner_files.save(self._engine, directory, self.updates, self.world, self._stage)
            if self.world > 1:
                torch.distributed.barrier()

    def load_checkpoint(self, directory: Path) -> None:
        """Restore what `save_checkpoint` wrote; see `learner_files.load` for what is raised."""
        self._order("load", directory=str(directory.absolute()))
        with together(self._ranks):
            self.updates = learner_files.load(self._engine, directory, self.world, self._stage)


def drift_of(
    batch: MicroBatch,
    logprobs: torch.Tensor,
    samples: Mapping[int, Sample],
    version: int,
    mismatch: Mismatch,
) -> None:
    """Add the differences (trainer now - engine then) of a micro-batch's older samples."""
    older = np.array([samples[i].version != version for i in batch.samples])[batch.rows]
    differences = logprobs.float().cpu().numpy() - batch.behaviour
    mismatch.add_older(differences[older])
