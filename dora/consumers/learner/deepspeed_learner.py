"""The learner that trains with DeepSpeed: a policy model, its optimizer, and one training step.

In deterministic mode the weights after a step depend only on the weights, optimizer state and
update count before it and on the samples, bit for bit.
"""

import json
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dora.config import Config
from dora.config.changes import recorded_values
from dora.config.trainer import LossSection
from dora.consumers.learner import torch_setup
from dora.consumers.learner.batches import (
    Floats,
    Sample,
    Shard,
    batch_metrics,
    build_shard,
    micro_batches,
    plan_update,
    shard_message,
    split_groups,
)
from dora.consumers.learner.microbatches import (
    LearningSums,
    MicroBatchRunner,
    Mismatch,
    StreamedStep,
    drift_of,
)
from dora.consumers.learner.model import (
    PolicyModel,
    WeightHistory,
    add_adapter,
    load_model,
    packs,
    published_name,
    untied,
    without_adapter,
)
from dora.consumers.learner.ranks import Leader, Member, together
from dora.consumers.learner.sequence_parallel import share_sequences
from dora.errors import PolicyError, WeightsError
from dora.log.trained_records import Place
from dora.weights.tensors import weights_checksum

# A checkpoint holds DeepSpeed's files and the count of updates that the learning rate depends on.
# Frozen weights (the base model under an adapter) never change and are not in it.
_TAG = "state"
_COUNTS = "learner.json"


OBSERVED = 16
"""Samples per version on which engine and trainer are compared in each step."""


class DeepSpeedLearner:
    """One policy in training.

    Parameters: `model_dir` holds the starting policy (PolicyError if it is unusable); `progress` is
    called between micro-batches, for heartbeats during long steps; with `ranks` this is one of
    several, and on rank 0 each collective method orders the others to call theirs.
    """

    def __init__(
        self,
        model_dir: Path,
        config: Config,
        *,
        progress: Callable[[], None] = lambda: None,
        ranks: Leader | Member | None = None,
    ) -> None:
        self._config = config
        self._model_dir = model_dir
        self._ranks = ranks
        self._leader = ranks if isinstance(ranks, Leader) else None
        self._order("make")
        self._deepspeed = torch_setup.prepare(config, ranks)
        self._settings = torch_setup.deepspeed_settings(config)
        plain = torch_setup.is_plain(self._settings)
        self._stage = self._settings["zero_optimization"].get("stage", 0)
        self._device = torch_setup.device()
        self.rank = torch.distributed.get_rank()
        self.world = torch.distributed.get_world_size()
        model = load_model(model_dir, config)
        self.vocabulary = int(model.get_input_embeddings().num_embeddings)
        self.adapter_settings = add_adapter(model, config) if config.policy.lora else None
        """Configuration of the adapter that is trained; None where all weights are."""
        policy = PolicyModel(model.to(self._device), config.trainer.logits_mib)
        alone = config.trainer.sequence_parallel == 1
        self.packed = alone and packs(model, config.trainer.packing)
        """Whether the sequences of a micro-batch are packed without padding."""
        self._reference: PolicyModel | None = None
        self._base: dict[str, torch.Tensor] | None = None
        self._load_reference(policy)
        self._sequences = share_sequences(model, config.trainer.sequence_parallel)
        self._share_sequences(policy)
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
        if self.world == 1 and plain:
            # DeepSpeed would copy all gradients to and fro to add them up over a single rank.
            self._engine.enable_backward_allreduce = False
        self._runner = MicroBatchRunner(
            self._engine,
            config,
            self._device,
            reference=self._reference,
            base=self._base,
            stage=self._stage,
            plain=plain,
            packed=self.packed,
            progress=progress,
        )
        self._history = WeightHistory(config.window.max_staleness)
        self._streamed: StreamedStep | None = None
        self.updates = 0
        """Optimizer updates that the steps so far had room for; the learning rate depends on it."""

    def _order(self, kind: str, **content: Any) -> None:
        if self._leader is not None:
            self._leader.order(kind, **content)

    @property
    def _sharing(self) -> int:
        return 1 if self._sequences is None else self._sequences.size

    def _share_sequences(self, policy: PolicyModel) -> None:
        for model in (policy, self._reference):
            if model is not None:
                model.sequences = self._sequences

    def _load_reference(self, policy: PolicyModel) -> None:
        """Load the starting policy, for the KL penalty, where one is configured."""
        absent = self._reference is None and self._base is None
        if self._loss.kl_coefficient == 0 or not absent:
            return
        if self.adapter_settings is not None and self._stage < 3:
            self._base = without_adapter(policy)
        else:
            model = load_model(self._model_dir, self._config).to(self._device)
            self._reference = PolicyModel(model, self._config.trainer.logits_mib)
            self._reference.requires_grad_(False)

    @property
    def _loss(self) -> LossSection:
        return self._config.trainer.loss

    @property
    def _constant_length(self) -> int:
        return self._loss.constant_length or self._config.rollout.max_new_tokens

    def configure(self, config: Config) -> None:
        """Go on with the values of `config`, as `Learner.configure`."""
        self._order("configure", settings=recorded_values(config))
        self._config = config
        if self._device.type == "cpu":
            torch.set_num_threads(config.trainer.threads)
        self._load_reference(self._engine.module)
        self._share_sequences(self._engine.module)
        for model in (self._engine.module, self._reference):
            if model is not None:
                model.logits_mib = config.trainer.logits_mib
        self._set_optimizer()
        self._runner.configure(config, self._reference, self._base)

    def _set_optimizer(self) -> None:
        section = self._config.trainer.optimizer
        optimizer = self._engine.optimizer
        for group in optimizer.param_groups:
            group["betas"], group["eps"] = section.betas, section.eps
            group["weight_decay"] = section.weight_decay
        # where DeepSpeed clips, its optimizer, or the engine for an optimizer without that
        if hasattr(optimizer, "clip_grad"):
            optimizer.clip_grad = section.gradient_clip
        self._engine._config.gradient_clipping = (
            0.0 if torch_setup.is_plain(self._settings) else section.gradient_clip
        )

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
        trajectories topic (needed where there are other ranks, which fetch their shards). The
        groups are split into `trainer.updates_per_step` optimizer batches. The mismatch between
        engine and trainer (`logprob_mismatch_*`) is measured on some of the step's samples, each
        under the weights of its own version; if these are kept for none, on `probes`, further
        samples of the current version; if there are none either, these metrics are left out. The
        difference over older samples under the current weights, which holds the drift of the policy
        too, is `logprob_drift_mean`. An optimizer batch in which no sample can have a gradient
        leaves weights and optimizer state alone. Raises PolicyError when the gradient is infinite
        or no number, RankError when another rank is lost.
        """
        if self._config.trainer.streamed:
            self.begin(version)
            for group in groups:
                self.add(group)
            return self.finish()
        updates = self._config.trainer.updates_per_step
        parts = [list(chain(*part)) for part in split_groups(groups, updates)]
        plans = [
            plan_update(
                part,
                self._loss,
                self._budget,
                self._constant_length,
                self.world // self._sharing,
                packed=self.packed,
            )
            for part in parts
        ]
        if self._leader is not None:
            located = [list(chain(*part)) for part in split_groups(places, updates)]
            shards = [
                [
                    shard_message(plan, rank // self._sharing, part, where)
                    for plan, part, where in zip(plans, parts, located, strict=True)
                ]
                for rank in range(self.world)
            ]
            self._leader.order("update", shards, version=version)
        samples = list(chain(*parts))
        mismatch = Mismatch()
        if self.world == 1 or (self._stage < 3 and self._sequences is None):
            self._observe(samples, probes, version, mismatch)
        own = [
            build_shard(plan.ranks[0], part, plan.weights, packed=self.packed)
            for plan, part in zip(plans, parts, strict=True)
        ]
        metrics = self.train(own, version, mismatch)
        return batch_metrics(samples, version, self._config.task.success_threshold) | metrics

    def train(self, parts: Sequence[Shard], version: int, mismatch: Mismatch) -> dict[str, float]:
        """Do this rank's parts of a step's optimizer updates; returns the metrics of all ranks."""
        runner, sums = self._runner, LearningSums()
        with together(self._ranks):
            proximal: list[list[torch.Tensor]] | None = None
            if self._loss.importance_cap is not None and len(parts) > 1:
                # The proximal policy is that of the step's start: score before the first update.
                proximal = [[runner.score(batch) for batch in part.batches] for part in parts]
            self._keep(version)
            for index, part in enumerate(parts):
                rate = runner.set_learning_rate(self.updates + index)
                if not part.batches:
                    continue
                for number, batch in enumerate(part.batches):
                    old = proximal[index][number] if proximal else None
                    last = number == len(part.batches) - 1
                    losses, logprobs = runner.learn(batch, old, last=last)
                    # of ranks that share sequences one counts their tokens
                    if batch.weights.any() and self.rank % self._sharing == 0:
                        sums.loss += sums.add(losses, logprobs)
                        if index == 0:
                            drift_of(batch, logprobs, part.samples, version, mismatch)
                sums.norms.append(runner.step(self.updates + index))
            self._reduce(sums, mismatch)
        self.updates += self._config.trainer.updates_per_step
        metrics = {"learning_rate": rate} | sums.metrics(self._loss.kl_coefficient > 0)
        return metrics | mismatch.metrics()

    def begin(self, version: int) -> None:
        """Begin a streamed step, as `Learner.begin`."""
        left = self._streamed
        if left is not None:
            self._streamed = None
            self._runner.zero_grad()
            if not left.droppable:
                raise PolicyError(
                    "a streamed step was left after it changed weights or ZeRO's gradients",
                    hint="Start the trainer again: it goes on from the last checkpoint.",
                )
        self._keep(version)
        mismatch = Mismatch()
        per_group = max(1, OBSERVED // self._config.window.groups_per_step)
        observed: Counter[int] = Counter()

        def observe(group: Sequence[Sample]) -> None:
            known = [s for s in self._comparable(group, version) if observed[s.version] < OBSERVED]
            observed.update(sample.version for sample in known[:per_group])
            self._observe(known[:per_group], (), version, mismatch)

        self._streamed = StreamedStep(
            self._runner,
            self._config,
            version=version,
            update=self.updates,
            mismatch=mismatch,
            observe=observe,
        )

    def add(self, group: Sequence[Sample]) -> None:
        """Compute on one group of the streamed step."""
        if self._streamed is None:
            raise PolicyError("a group is added to a streamed step that was not begun")
        self._streamed.add(group)

    def finish(self) -> dict[str, float]:
        """End the streamed step, as `Learner.finish`."""
        streamed = self._streamed
        if streamed is None:
            raise PolicyError("a streamed step ends that was not begun")
        metrics = streamed.finish()
        self._streamed = None
        self.updates += self._config.trainer.updates_per_step
        version = streamed.version
        threshold = self._config.task.success_threshold
        return batch_metrics(streamed.samples, version, threshold) | metrics

    def _keep(self, version: int) -> None:
        if self._stage < 3:
            self._history.keep(version, self._engine.module)

    @property
    def _budget(self) -> int:
        if self._sequences is not None:
            return 1  # one sequence a pass
        return self._config.trainer.max_tokens_per_micro_batch

    def _comparable(self, samples: Sequence[Sample], version: int) -> list[Sample]:
        """Those of a single version whose weights are kept at `version`."""
        return [
            sample
            for sample in samples
            if (sample.version == version or self._history.of(sample.version) is not None)
            and sample.generated
            and not sample.mixed
        ]

    def _observe(
        self, samples: Sequence[Sample], probes: Sequence[Sample], version: int, mismatch: Mismatch
    ) -> None:
        """Compare engine and trainer on a few samples of each version whose weights are kept."""
        chosen: dict[int, list[Sample]] = {}
        for sample in self._comparable(samples, version):
            chosen.setdefault(sample.version, []).append(sample)
        if not chosen and probes:
            chosen[version] = list(probes)
        for generated_by, all_of_it in sorted(chosen.items()):
            stride = max(1, len(all_of_it) // OBSERVED)
            some = all_of_it[::stride][:OBSERVED]
            weights = None if generated_by == version else self._history.of(generated_by)
            for batch in micro_batches(some, self._budget, packed=self.packed):
                scores = self._runner.score(batch, weights)
                mismatch.add_own(scores.float().cpu().numpy() - batch.behaviour)

    def _reduce(self, sums: LearningSums, mismatch: Mismatch) -> None:
        """Add up the ranks' sums and take their maxima."""
        if self.world == 1:
            return
        largest = torch.tensor(mismatch.own_max, device=self._device)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        mismatch.own_max = float(largest)
        for part in (sums, mismatch):
            values = [getattr(part, name) for name in part.OVER_RANKS]
            packed = torch.tensor(values, dtype=torch.float64, device=self._device)
            torch.distributed.all_reduce(packed)
            for name, value in zip(part.OVER_RANKS, packed.tolist(), strict=True):
                setattr(part, name, value)

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Log-probabilities (nats) of each sample's generated tokens under the current policy,
        temperature and truncation of the rollout included."""
        result: list[Floats] = [np.zeros(0, dtype=np.float32) for _ in samples]
        for batch in micro_batches(samples, self._budget, packed=self.packed):
            scores = self._runner.score(batch).float().cpu().numpy()
            for row, index in enumerate(batch.samples):
                result[index] = scores[batch.rows == row]
        return result

    def sequence_logprobs(self, token_ids: Sequence[int]) -> Floats:
        """Plain log-probabilities [n - 1] (temperature 1, whole vocabulary) of each token after the
        first: what the canary is compared with."""
        if self._stage == 3 or self._sequences is not None:
            self._order("score", tokens=list(token_ids))
        tokens = torch.tensor([list(token_ids)], device=self._device)
        count = len(token_ids) - 1
        places = torch.arange(count, device=self._device)
        module = self._engine if self._stage == 3 else self._engine.module
        with torch.no_grad():
            scores = module(
                token_ids=tokens,
                places=places,
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
        """Checksum of `export_state`."""
        return weights_checksum(self.export_state())

    def save_checkpoint(self, directory: Path) -> None:
        """Write weights, optimizer state and update count to `directory`, which must exist."""
        self._order("save", directory=str(directory.absolute()))
        with together(self._ranks):
            self._engine.save_checkpoint(
                str(directory),
                tag=_TAG,
                save_latest=False,
                exclude_frozen_parameters=self._has_frozen(),
            )
            if self.rank == 0:
                counts = {"updates": self.updates, "world": self.world, "zero_stage": self._stage}
                (directory / _COUNTS).write_text(json.dumps(counts) + "\n")
            if self.world > 1:
                torch.distributed.barrier()

    def load_checkpoint(self, directory: Path, *, updates: int | None = None) -> None:
        """Restore what `save_checkpoint` wrote, as `Learner.load_checkpoint`.

        Raises WeightsError if it is missing or cut, PolicyError if it was written with another ZeRO
        stage or number of ranks.
        """
        self._order("load", directory=str(directory.absolute()), updates=updates)
        with together(self._ranks):
            counted = self._load(directory)
        self.updates = counted if updates is None else updates
        self._set_optimizer()  # the checkpoint holds those it was written with

    def _load(self, directory: Path) -> int:
        try:
            counts = json.loads((directory / _COUNTS).read_text())
        except (OSError, ValueError) as error:
            raise WeightsError(f"checkpoint {directory} cannot be read: {error}") from error
        if (counts.get("world"), counts.get("zero_stage")) != (self.world, self._stage):
            raise PolicyError(
                f"checkpoint {directory} was written with {counts.get('world')} ranks and ZeRO "
                f"stage {counts.get('zero_stage')}, not with {self.world} and {self._stage}",
                hint="Start the trainer as before, or remove the checkpoints: the steps are then "
                "redone from the log.",
            )
        try:
            loaded, _ = self._engine.load_checkpoint(
                str(directory),
                tag=_TAG,
                load_module_strict=not self._has_frozen(),
                load_lr_scheduler_states=False,
            )
        except (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
            raise WeightsError(f"checkpoint {directory} is damaged: {error}") from error
        if loaded is None:
            raise WeightsError(f"checkpoint {directory} is not complete")
        return int(counts["updates"])

    def _has_frozen(self) -> bool:
        return any(not parameter.requires_grad for parameter in self._engine.module.parameters())
