"""What the trainer's model says of logged trajectories, under the weights that generated them.

The log-probabilities are those that the learner's `logprobs` gives with the same
weights: the model, the micro-batches and the distribution are the learner's. Weights are used only
if their checksum is the one that was announced, or a note says that it is not. Nothing is written,
neither to the log nor to the run's directory.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from dora.bus.reader import LogReader
from dora.bus.settings import ClusterSettings
from dora.config import Config
from dora.consumers.inspect.view import Floats, Scores
from dora.consumers.learner import torch_setup
from dora.consumers.learner.batches import MicroBatch, Sample, micro_batches, sample_of
from dora.consumers.learner.learner import Learner, create_learner, starting_model
from dora.consumers.learner.losses import TRUNCATION_COPIES, token_entropies, token_logprobs
from dora.consumers.learner.model import (
    PolicyModel,
    add_adapter,
    load_model,
    model_inputs,
    packs,
    published_name,
)
from dora.consumers.replay.plan import make_plan
from dora.consumers.trainer.recovery import READ_SECONDS, redo_step
from dora.errors import DoraError, RecordError, RunError, WeightsError
from dora.log.run_log import RunLog
from dora.log.trained_records import fetch_steps
from dora.schemas.records import Trajectory
from dora.weights.store import WeightStore
from dora.weights.tensors import read_tensors

State = Mapping[str, torch.Tensor]
Say = Callable[[str], None]


class PolicyScorer:
    """A run's policy as the learner has it, without optimizer; the model in `directory` is its
    architecture (and, for an adapter, its base). PolicyError if the model cannot be used."""

    def __init__(self, directory: Path, config: Config) -> None:
        torch.set_num_threads(config.trainer.threads)
        model = load_model(directory, config)
        self.vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._lora = config.policy.lora is not None
        if self._lora:
            add_adapter(model, config)
        self._config = config
        self._device = torch_setup.device()
        self._policy = PolicyModel(model.to(self._device), config.trainer.logits_mib)
        self._policy.requires_grad_(False)
        self._packed = packs(model, config.trainer.packing)

    def state(self) -> dict[str, torch.Tensor]:
        """The live tensors by the names under which versions are published."""
        model = self._policy.model
        if not self._lora:
            return dict(model.state_dict())
        return {
            published_name(name): parameter.detach()
            for name, parameter in model.named_parameters()
            if ".lora_" in name
        }

    def load(self, state: State) -> None:
        """Take the weights of a version; WeightsError if they are not this model's."""
        own = self.state()
        foreign = sorted(state.keys() - own.keys())
        if foreign:
            raise WeightsError(f"{foreign[0]} is no tensor of this model")
        with torch.no_grad():
            for name, tensor in state.items():
                if own[name].shape != tensor.shape:
                    raise WeightsError(
                        f"{name} has shape {list(tensor.shape)}, the model's "
                        f"{list(own[name].shape)}"
                    )
                own[name].copy_(tensor)
        # tied tensors are stored once
        loaded = {own[name].data_ptr() for name in state}
        missing = sorted(n for n in own.keys() - state.keys() if own[n].data_ptr() not in loaded)
        if missing:
            raise WeightsError(f"the weights lack {missing[0]}")

    def score(self, samples: Sequence[Sample]) -> list[Scores]:
        """Log-probability and entropy of each sample's generated tokens."""
        empty = np.zeros(0, dtype=np.float32)
        result = [Scores(empty, empty) for _ in samples]
        budget = self._config.trainer.max_tokens_per_micro_batch
        for batch in micro_batches(samples, budget, packed=self._packed):
            logprobs, entropy = self._pass(batch)
            for row, index in enumerate(batch.samples):
                own = batch.rows == row
                result[index] = Scores(logprobs[own], entropy[own])
        return result

    def _pass(self, batch: MicroBatch) -> tuple[Floats, Floats]:
        rollout = self._config.rollout
        sampling = {"temperature": rollout.temperature, "top_p": rollout.top_p}

        def both(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            entropy = token_entropies(logits, **sampling, top_k=rollout.top_k)
            logprobs = token_logprobs(logits, targets, **sampling, top_k=rollout.top_k)
            return torch.stack([logprobs, entropy], dim=-1)

        with torch.no_grad():
            inputs = model_inputs(batch, self._device)
            found = self._policy.per_token(both, **inputs, copies=TRUNCATION_COPIES)
        logprobs, entropy = found.float().cpu().numpy().T
        return logprobs, entropy


@dataclass(slots=True)
class _Redone:
    """A learner that was brought to `version`."""

    learner: Learner
    version: int


class Recomputation:
    """Scores trajectories of `run` under the weights of their versions.

    These come from the weight store while it keeps them; else the steps are redone from the nearest
    checkpoint or from version 0. `say` is told what is going on, `notes` what to know about the
    result. RunError if nothing computed in this run.
    """

    def __init__(
        self,
        run: RunLog,
        config: Config,
        settings: ClusterSettings,
        say: Say = lambda text: None,
    ) -> None:
        if config.trainer.engine == "emulated":
            raise RunError(
                f"run {run.run} has an emulated trainer: it has no log-probabilities of its own "
                "to compare with",
                hint="Leave --recompute out.",
            )
        self._run = run
        self._config = config
        self._settings = settings
        self._say = say
        self._scorer: PolicyScorer | None = None
        self._redone: _Redone | None = None
        self.notes: list[str] = []

    def scores(self, records: Sequence[Trajectory]) -> list[Scores]:
        """Scores of each trajectory's generated tokens, in the given order.

        Each token is scored under the version that generated it. RunError, saying what is missing,
        if a version's weights are neither stored nor can be redone.
        """
        result = [_blank(record) for record in records]
        versions = sorted({run.version for record in records for run in record.version_runs})
        for version in versions:
            of_it = [
                index
                for index, record in enumerate(records)
                if any(run.version == version for run in record.version_runs)
            ]
            scorer = self._at(version)
            samples = [_sample(records[index], scorer.vocabulary) for index in of_it]
            for index, found in zip(of_it, scorer.score(samples), strict=True):
                _fill(result[index], found, records[index], version)
        return result

    def _at(self, version: int) -> PolicyScorer:
        policy = self._run.policies.get(version)
        with tempfile.TemporaryDirectory(prefix="dora-inspect-") as cache:
            try:
                if policy is None:
                    raise WeightsError(f"version {version} is not announced any more")
                store = WeightStore.of(self._config)
                directory = store.fetch(policy, Path(cache))
            except WeightsError as error:
                return self._redo(version, error)
            scorer = self._model(None if self._config.policy.lora else directory)
            scorer.load(read_tensors(directory))
            return scorer

    def _model(self, directory: Path | None) -> PolicyScorer:
        """The model, made once: of a stored version, or else of the starting model."""
        if self._scorer is None:
            self._scorer = PolicyScorer(directory or starting_model(self._config), self._config)
        return self._scorer

    def _redo(self, version: int, reason: WeightsError) -> PolicyScorer:
        self._say(f"{reason.message}: redoing it from the log")
        try:
            learner = self._learner_at(version)
            self._compare(version, learner.weights_checksum())
            scorer = self._model(None)
            scorer.load(learner.export_state())
        except DoraError as error:
            raise RunError(
                f"the weights of version {version} are gone: {reason.message}; and they cannot be "
                f"redone: {error.message}",
                hint=error.hint,
            ) from error
        return scorer

    def _learner_at(self, version: int) -> Learner:
        run, config = self._run, self._config
        run.check_version(version)
        plan = make_plan(run, config, self._settings, version + 1, version)
        redone, base = self._redone, plan.base
        if redone is None or not base.version <= redone.version <= version:
            learner = create_learner(config, starting_model(config))
            if base.path is not None:
                learner.load_checkpoint(base.path)
            redone = self._redone = _Redone(learner, base.version)
        settings = run.settings
        with LogReader(self._settings, client_id=f"{run.run}.inspect") as reader:
            for step in plan.steps:
                if step.version_out > redone.version:
                    self._say(f"redoing step {step.version_out} of {version}")
                    topic = run.topics.trajectories
                    records = fetch_steps(reader, topic, [step], READ_SECONDS)
                    redo_step(step, records, redone.learner, settings.config(step, config))
                    redone.version = step.version_out
        return redone.learner

    def _compare(self, version: int, found: str) -> None:
        policy = self._run.policies.get(version)
        steps = [step for step in self._run.steps if step.version_out == version]
        expected = steps[0].weights_checksum if steps else policy and policy.weights_checksum
        if expected != found:
            self.notes.append(
                f"the weights of version {version} that were redone have checksum {found[:16]}, "
                f"the ledger says {str(expected)[:16]}: what is said of the trainer holds for "
                "other weights than those that generated"
            )


def _blank(record: Trajectory) -> Scores:
    count = record.generated_tokens
    return Scores(np.zeros(count, dtype=np.float32), np.zeros(count, dtype=np.float32))


def _sample(record: Trajectory, vocabulary: int) -> Sample:
    """The record as a sample, with any reward: none is needed here."""
    sample = sample_of(replace(record, reward=0.0), 0.0)
    tokens = sample.token_ids
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise RecordError(
            f"trajectory {record.trajectory_id} holds tokens outside the vocabulary of {vocabulary}"
        )
    return sample


def _fill(into: Scores, found: Scores, record: Trajectory, version: int) -> None:
    """Take the tokens of `version` over."""
    begin = 0
    for run in record.version_runs:
        end = begin + run.tokens
        if run.version == version:
            into.logprobs[begin:end] = found.logprobs[begin:end]
            into.entropy[begin:end] = found.entropy[begin:end]
        begin = end
