"""Memory that the logits of one forward and backward pass take, above the model, its gradients
and its last hidden states, and the difference of the gradients to the plain way.

    python benchmarks/bench_memory.py --tokens 2048 --vocabulary 151936 --json memory.json

Each way runs in a process of its own, on the CPU in float32; the peak is the process's largest
resident size (VmHWM, Linux), less what it has after a pass over one token.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from dora.consumers.learner.model import PolicyModel


def status(name: str) -> int:
    """A size (bytes) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"this system does not tell {name} of a process")


def plain(model: Qwen2ForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """All logits at once."""
    logits = model(tokens, use_cache=False).logits[0, :-1].float()
    return logits.gather(-1, tokens[0, 1:, None])[:, 0] - logits.logsumexp(-1)


def measure(way: str, count: int, vocabulary: int, hidden: int, mib: float, file: Path) -> None:
    """One pass; prints its figures and writes its gradients to `file`."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    settings = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(settings)
    policy = PolicyModel(model, mib)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def backward(tokens: torch.Tensor) -> None:
        if way == "plain":
            found = plain(model, tokens)
        else:
            places = torch.arange(tokens.shape[1] - 1)
            found = policy(tokens, places, tokens[0, 1:], temperature=1.0, top_p=1.0, top_k=0)
        (found * torch.linspace(-1.0, 1.0, len(found))).mean().backward()

    tokens = torch.randint(0, vocabulary, (1, count + 1))
    backward(tokens[:, :2])
    model.zero_grad(set_to_none=False)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    begin = time.perf_counter()
    backward(tokens)
    seconds = time.perf_counter() - begin
    peak = (status("VmHWM") - before) / 2**30
    save_file({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, file)
    sys.stdout.write(json.dumps({"peak": peak, "seconds": seconds}) + "\n")


def main() -> None:
    """Both ways, and what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--logits-mib", type=float, default=256.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", choices=["plain", "chunks"], help=argparse.SUPPRESS)
    parser.add_argument("--gradients", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        sizes = (given.tokens, given.vocabulary, given.hidden, given.logits_mib)
        measure(given.way, *sizes, given.gradients)
        return
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        files = {way: Path(directory) / way for way in ("plain", "chunks")}
        for way, file in files.items():
            child = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--gradients", file]
            done = subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True)
            results[way] = json.loads(done.stdout.splitlines()[-1])
        whole, chunks = (load_file(files[way]) for way in ("plain", "chunks"))
    largest = max(float(gradient.abs().max()) for gradient in whole.values())
    difference = max(float((chunks[name] - whole[name]).abs().max()) for name in whole)
    report = {
        "tokens": given.tokens,
        "vocabulary": given.vocabulary,
        "logits_mib": given.logits_mib,
        "peak_gib_above_model": results["chunks"]["peak"],
        "plain_peak_gib_above_model": results["plain"]["peak"],
        "gradient_difference": difference,
        "largest_gradient": largest,
        "seconds": results["chunks"]["seconds"],
        "plain_seconds": results["plain"]["seconds"],
    }
    text = json.dumps(report, indent=2)
    if given.json:
        given.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
