"""Prompts that are token ids without a text."""

import tracemalloc

import pytest

from dora.config import Config, window_of
from dora.errors import TaskError
from dora.producers.tasks.kinds import create_task
from dora.producers.tasks.tokenization import stop_token_ids, tokenizer_of
from dora.producers.worker.process import fleet_names


def configured(**task: object) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "r"},
            "policy": {"model": "emulated"},
            "task": {"kind": "synthetic", "synthetic_prompts": 5, **task},
            "trainer": {"steps": 1, "engine": "emulated"},
            "rollout": {"engine": "emulated"},
            "evaluation": {"prompts": 3},
        }
    )


def test_prompts_come_again_in_turn_and_are_the_same_in_every_process() -> None:
    config = configured(synthetic_prompt_tokens=40, held_out_fraction=0.0)
    task, other = (create_task(config, tokenizer_of(config)) for _ in range(2))
    prompts = [task.prompt(ordinal, "train") for ordinal in range(10)]
    assert [p.token_ids for p in prompts[:5]] == [p.token_ids for p in prompts[5:]]
    assert len({p.token_ids for p in prompts}) == 5
    assert all(len(p.token_ids) == 40 and p.text == "" for p in prompts)
    assert max(max(p.token_ids) for p in prompts) < 31_999
    assert other.prompt(7, "train") == prompts[7]
    assert task.prompt(0, "eval").token_ids not in {p.token_ids for p in prompts}


def test_prompts_are_kept_while_their_groups_may_be_outstanding_and_no_longer() -> None:
    """A prompt takes some 10 kB: 1,024 of them were kept, which looked like a leak for as long."""
    config = configured(held_out_fraction=0.0)
    capacity = window_of(config).capacity
    task = create_task(config, tokenizer_of(config))
    kept = [task.prompt(ordinal, "train") for ordinal in range(capacity)]
    assert all(task.prompt(n, "train") is prompt for n, prompt in enumerate(kept))
    del kept
    tracemalloc.start()
    try:
        sizes = []
        for ordinal in range(8 * capacity):
            task.prompt(capacity + ordinal, "train")
            if ordinal % capacity == capacity - 1:
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[0] > 100_000
    assert sizes[-1] < 1.02 * sizes[0]


def test_a_prompt_longer_than_allowed_is_refused_with_both_numbers() -> None:
    config = configured(synthetic_prompt_tokens=40, max_prompt_tokens=30)
    with pytest.raises(TaskError, match=r"synthetic_prompt_tokens \(40\).*\(30\)"):
        create_task(config, tokenizer_of(config))


def test_there_is_no_tokenizer_and_the_last_token_ends_a_response() -> None:
    config = configured()
    tokenizer = tokenizer_of(config)
    assert stop_token_ids(config, tokenizer) == (31_999,)
    assert tokenizer.decode([4, 5]) == ""
    for call in (lambda: tokenizer.encode("x"), lambda: tokenizer.chat([])):
        with pytest.raises(TaskError, match="synthetic"):
            call()


def test_workers_of_a_process_are_counted_on_from_the_first() -> None:
    assert fleet_names("w4", 3) == ["w4", "w5", "w6"]
    assert fleet_names("rollout-9", 2) == ["rollout-9", "rollout-10"]
    assert fleet_names("host", 2) == ["host-0", "host-1"]
    assert fleet_names("host-12", 1) == ["host-12"]
