"""Two learners that train together over gloo, without a log."""

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
    plan = plan_update(samples, loss, budget, settings.rollout.max_new_tokens, world)
    shard = build_shard(plan.ranks[rank], samples, plan.weights)
    metrics = learner.train([shard], 0, Mismatch())
    after = learner.export_state()
    if rank == 0:
        changes = {name: (after[name] - before[name]).contiguous() for name in before}
        save_file(changes, result, {"trained_tokens": str(metrics["trained_tokens"])})


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_with_unequal_shards_train_by_chunks_under_zero_3(tmp_path: Path, tied: bool) -> None:
    model = make_model(tmp_path / "model", tied=tied)
    _, plain = deltas(model, config(model), groups(1))
    trainer = {
        "deepspeed": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        "logits_mib": THREE_TOKENS,
        "max_tokens_per_micro_batch": 60,
    }
    result = tmp_path / "changes.safetensors"
    context = torch.multiprocessing.spawn(train, (2, model, trainer, result), nprocs=2, join=False)
    assert context is not None
    try:
        until(lambda: context.join(1.0), "the end of both ranks", 240)
    finally:
        for process in context.processes:
            process.kill()
    for name, expected in load_file(result).items():
        assert torch.isclose(plain[name], expected, atol=2e-5).float().mean() > 0.99, name
