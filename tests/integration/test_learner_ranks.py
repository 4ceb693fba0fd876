"""Two learners that train together over gloo, without a log."""

import json
import os
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dora.consumers.learner.batches import build_shard, plan_update
from dora.consumers.learner.deepspeed_learner import DeepSpeedLearner
from dora.consumers.learner.microbatches import Mismatch
from tests.integration.test_learner import VOCABULARY, config, deltas, groups, make_model
from tests.waiting import until

THREE_TOKENS = 3 * 4 * VOCABULARY / 2**20
"""logits_mib"""


def train(rank: int, world: int, model: Path, trainer: dict[str, Any], result: Path) -> None:
    """One rank's part of one update; rank 0 writes what it changed."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = torch.distributed.FileStore(str(result.with_suffix(".store")), world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    settings = config(model, trainer)
    learner = DeepSpeedLearner(model, settings)
    before = {name: tensor.clone() for name, tensor in learner.export_state().items()}
    samples = list(chain(*groups(1)))
    loss, budget = settings.trainer.loss, settings.trainer.max_tokens_per_micro_batch
    sharing = settings.trainer.sequence_parallel
    budget = budget if sharing == 1 else 1
    plan = plan_update(samples, loss, budget, settings.rollout.max_new_tokens, world // sharing)
    shard = build_shard(plan.ranks[rank // sharing], samples, plan.weights)
    metrics = learner.train([shard], 0, Mismatch())
    after = learner.export_state()
    if rank == 0:
        changes = {name: (after[name] - before[name]).contiguous() for name in before}
        save_file(changes, result)
        result.with_suffix(".json").write_text(json.dumps(metrics))


def assert_like_one(model: Path, loss: Any, trainer: dict[str, Any], world: int = 2) -> None:
    """An update by ranks has the metrics and changes the weights as one by a single learner."""
    expected, plain = deltas(model, config(model, {"loss": loss}), groups(1))
    result = model.parent / "changes.safetensors"
    context = torch.multiprocessing.spawn(
        train, (world, model, trainer, result), nprocs=world, join=False
    )
    assert context is not None
    try:
        until(lambda: context.join(1.0), "the end of all ranks", 240)
    finally:
        for process in context.processes:
            process.kill()
    metrics = json.loads(result.with_suffix(".json").read_text())
    for name in ("loss", "grad_norm", "clip_fraction", "entropy", "trained_tokens"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    for name, found in load_file(result).items():
        assert torch.isclose(plain[name], found, atol=2e-5).float().mean() > 0.99, name


def test_ranks_with_unequal_shards_train_by_chunks_under_zero_3(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", tied=True)
    trainer = {
        "deepspeed": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        "logits_mib": THREE_TOKENS,
        "max_tokens_per_micro_batch": 60,
    }
    assert_like_one(model, {}, trainer)


@pytest.mark.parametrize(
    ("stage", "loss", "world"),
    [
        (3, {"kind": "gspo", "importance_cap": 2.0, "clip_low": 0.5, "clip_high": 0.5}, 2),
        (1, {"kl_coefficient": 0.1}, 4),
    ],
)
def test_ranks_that_share_sequences_train_what_one_trains(
    tmp_path: Path, stage: int, loss: dict[str, Any], world: int
) -> None:
    model = make_model(tmp_path / "model")
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    trainer = {
        "loss": loss,
        "sequence_parallel": 2,
        "deepspeed": {"zero_optimization": zero},
        "logits_mib": THREE_TOKENS,
    }
    assert_like_one(model, loss, trainer, world)
