"""What the demo should reach: the same training in one process, without Kafka, vLLM or DeepSpeed.

Plain torch samples, scores and trains in turns (K = 0), with the data, the loss and the optimiser
of `examples/spell_backward.toml`. `dora run` on that file should learn as fast, but for staleness.

    python benchmarks/reference_rl.py --steps 40

prints one line a step, and a JSON object at the end.
"""

import argparse
import json
import random
import statistics
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
sys.path.insert(0, str(EXAMPLES.parent))

import spell_backward as demo  # noqa: E402
import torch  # noqa: E402

from dora.config import Config  # noqa: E402
from dora.producers.tasks.base import Prompt, Task  # noqa: E402
from dora.producers.tasks.kinds import create_task  # noqa: E402
from dora.producers.tasks.tokenization import load_tokenizer  # noqa: E402

PAD = demo.VOCABULARY[demo.PAD]


def rollout(
    model: Any, prompts: list[Prompt], config: Config, generator: torch.Generator
) -> tuple[list[list[int]], list[list[float]], list[float]]:
    """Responses, their log-probabilities and their rewards, one for each prompt."""
    texts = [prompt.text for prompt in prompts]
    samples = list(demo.sample(model, texts, config.rollout.max_new_tokens, generator))
    rewards = [
        demo.verify(demo.decode(tokens), prompt.item)
        for (tokens, _), prompt in zip(samples, prompts, strict=True)
    ]
    return [tokens for tokens, _ in samples], [scores for _, scores in samples], rewards


def advantages(rewards: list[float], group_size: int) -> torch.Tensor:
    """Group-relative advantages, shape [groups * group_size] (GRPO, arXiv 2402.03300, eq. 3)."""
    grouped = torch.tensor(rewards).view(-1, group_size)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, keepdim=True) + 1e-6)).flatten()


def loss_of(
    model: Any,
    prompts: list[Prompt],
    responses: list[list[int]],
    old: list[list[float]],
    advantage: torch.Tensor,
    clip: tuple[float, float],
) -> torch.Tensor:
    """Sum over the response tokens of the clipped objective; the caller divides by their number."""
    lengths = [len(p.token_ids) + len(r) for p, r in zip(prompts, responses, strict=True)]
    tokens = torch.full((len(prompts), max(lengths)), PAD)
    mask = torch.zeros(tokens.shape)
    reference = torch.zeros(tokens.shape)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        start = len(prompt.token_ids)
        tokens[row, : lengths[row]] = torch.tensor([*prompt.token_ids, *response])
        mask[row, start : lengths[row]] = 1
        reference[row, start : lengths[row]] = torch.tensor(old[row])
    # Padding is on the right, behind everything that causal attention can see.
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    logprobs = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    ratio = (logprobs - reference[:, 1:]).exp()
    clipped = ratio.clamp(1 - clip[0], 1 + clip[1])
    weight = advantage[:, None]
    return -(torch.minimum(ratio * weight, clipped * weight) * mask[:, 1:]).sum()


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    task: Task,
    step: int,
    config: Config,
    generator: torch.Generator,
) -> dict[str, float]:
    """One on-policy step: sample, score, one update."""
    groups, size = config.window.groups_per_step, config.window.group_size
    started = time.monotonic()
    prompts = [
        task.prompt(step * groups + group, "train") for group in range(groups) for _ in range(size)
    ]
    responses, old, rewards = rollout(model, prompts, config, generator)
    sampled = time.monotonic()
    advantage = advantages(rewards, size)
    section = config.trainer.optimizer
    for parameters in optimizer.param_groups:
        warm = min(1.0, (step + 1) / max(section.warmup_steps, 1))
        parameters["lr"] = section.learning_rate * warm
    total = sum(map(len, responses))
    clip = (config.trainer.loss.clip_low, config.trainer.loss.clip_high)
    order = sorted(range(len(prompts)), key=lambda row: len(responses[row]))
    optimizer.zero_grad()
    for start in range(0, len(order), 64):
        rows = order[start : start + 64]
        part = loss_of(
            model,
            [prompts[row] for row in rows],
            [responses[row] for row in rows],
            [old[row] for row in rows],
            advantage[rows],
            clip,
        )
        (part / total).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), section.gradient_clip)
    optimizer.step()
    return {
        "step": step + 1,
        "success": statistics.fmean(rewards),
        "length": total / len(responses),
        "longest": max(map(len, responses)),
        "grad_norm": float(norm),
        "rollout_seconds": sampled - started,
        "train_seconds": time.monotonic() - sampled,
    }


def evaluate(model: Any, task: Task, config: Config, generator: torch.Generator) -> float:
    """Success on the held-out words, sampled as in training."""
    prompts = [task.prompt(ordinal, "eval") for ordinal in range(config.evaluation.prompts)]
    return statistics.fmean(rollout(model, prompts, config, generator)[2])


def main() -> None:
    """Run the reference and print what it reaches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=EXAMPLES / "spell_backward.toml")
    parser.add_argument("--model", type=Path, help="model directory; default: policy.model")
    parser.add_argument("--steps", type=int, help="default: trainer.steps")
    parser.add_argument("--seed", type=int, help="default: run.seed")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    data = tomllib.loads(arguments.config.read_text())
    if arguments.seed is not None:
        data["run"]["seed"] = arguments.seed
    if arguments.model is not None:
        data["policy"]["model"] = str(arguments.model)
    config = Config.model_validate(data | {"home": arguments.config.parent})
    torch.set_num_threads(arguments.threads)
    directory = Path(config.policy.model)
    if not directory.exists():
        demo.prepare(directory, config)

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    task = create_task(config, load_tokenizer(config.policy))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.trainer.optimizer.learning_rate,
        betas=config.trainer.optimizer.betas,
        eps=config.trainer.optimizer.eps,
        weight_decay=config.trainer.optimizer.weight_decay,
    )
    random.seed(config.run.seed)
    generator = torch.Generator().manual_seed(config.run.seed)
    started = time.monotonic()
    held_out = {0: evaluate(model, task, config, generator)}
    print(f"held-out success before: {held_out[0]:.3f}", flush=True)
    steps = arguments.steps or config.trainer.steps
    history = []
    for step in range(steps):
        metrics = train_step(model, optimizer, task, step, config, generator)
        history.append(metrics)
        print(
            "  ".join(
                f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
                for name, value in metrics.items()
            ),
            flush=True,
        )
        every = config.evaluation.every
        if step + 1 == steps or (every and (step + 1) % every == 0):
            held_out[step + 1] = evaluate(model, task, config, generator)
            print(f"held-out success after {step + 1}: {held_out[step + 1]:.3f}", flush=True)
    print(
        json.dumps(
            {
                "success": [round(metrics["success"], 4) for metrics in history],
                "held_out": {str(step): round(value, 4) for step, value in held_out.items()},
                "seconds": round(time.monotonic() - started, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
