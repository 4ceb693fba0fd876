"""A run small enough for tests of the command line: configuration, model, and how to call it."""

import json
import logging
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dora.bus import ClusterSettings, RunTopics, TopicAdmin, topic_plan
from dora.cli.main import cli
from dora.config import Config
from dora.config.loading import KafkaOverrides, load_config

VOCABULARY = 40
WORDS = ("<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz", *"0123456789", "=", " ")

CONFIG = """\
[run]
name = "{run}"
directory = "{directory}/runs"

[policy]
model = "{model}"

[task]
kind = "jsonl"
path = "words.jsonl"
verifier = "scoring:verify"
held_out_fraction = 0.0
max_prompt_tokens = 8

[window]
max_staleness = 1
groups_per_step = 2
group_size = 2

[rollout]
engine = "emulated"
capacity = 8
max_new_tokens = 8
heartbeat_seconds = 0.2
heartbeat_timeout_seconds = 5

[rollout.emulated]
time_scale = 0.05
load_seconds = 0.1
length_mean = 4

[trainer]
steps = 2
batch_timeout_seconds = 60

[trainer.optimizer]
learning_rate = 1e-3
"""

SCORING = "def verify(response, item):\n    return 1.0\n"


def make_model(
    directory: Path,
    *,
    vocabulary: int = VOCABULARY,
    words: int = VOCABULARY,
    width: int = 16,
    positions: int = 64,
) -> Path:
    """A Qwen2 of one layer with random weights, and a tokenizer of single characters.

    `width` is its hidden size, `positions` its longest sequence. Written without torch, which takes
    seconds to import.
    """
    from safetensors.numpy import save_file
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*WORDS, *(f"<{number}>" for number in range(len(WORDS), words))][:words]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<pad>"
    )
    tokenizer.save_pretrained(str(directory))
    inner = 2 * width
    settings = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(settings))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (vocabulary, width),
    }
    layer = "model.layers.0"
    for norm in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{layer}.{norm}.weight"] = (width,)
    for projection in "qkv":
        shapes[f"{layer}.self_attn.{projection}_proj.weight"] = (width, width)
        shapes[f"{layer}.self_attn.{projection}_proj.bias"] = (width,)
    shapes[f"{layer}.self_attn.o_proj.weight"] = (width, width)
    for name, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
        shapes[f"{layer}.mlp.{name}_proj.weight"] = shape
    random = np.random.default_rng(1)
    tensors = {n: random.normal(0, 0.2, s).astype(np.float32) for n, s in shapes.items()}
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


@dataclass(frozen=True, slots=True)
class SmallRun:
    """A run's configuration file in a directory of its own, beside its data and its verifier."""

    name: str
    directory: Path
    model: Path
    address: str
    topics: RunTopics = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "topics", RunTopics(self.name))
        text = CONFIG.format(run=self.name, directory=self.directory, model=self.model)
        self.path.write_text(text)
        lines = [{"prompt": word, "answer": word[::-1]} for word in ("sun", "moon", "star", "sky")]
        self.data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (self.directory / "scoring.py").write_text(SCORING)

    @property
    def path(self) -> Path:
        """The configuration file."""
        return self.directory / "run.toml"

    @property
    def data(self) -> Path:
        """The data set."""
        return self.directory / "words.jsonl"

    def replace(self, old: str, new: str) -> None:
        """Change the configuration file."""
        text = self.path.read_text()
        assert old in text, old
        self.path.write_text(text.replace(old, new))

    def emulate_training(self) -> None:
        """A trainer without DeepSpeed, which starts in a tenth of the time: for what is not about
        the weights."""
        quick = 'engine = "emulated"\nemulated.step_seconds = 0.1\n'
        self.replace("[trainer]\n", f"[trainer]\n{quick}")

    def config(self, *sets: str) -> Config:
        """The configuration as commands see it."""
        return load_config(self.path, sets=sets, environment={}, kafka=KafkaOverrides(self.address))

    def make_topics(self, settings: ClusterSettings, *sets: str) -> None:
        """Create the topics, as the configuration with `sets` wants them."""
        with TopicAdmin(settings) as admin:
            admin.create(topic_plan(self.config(*sets)))

    def dora(self, command: str, *options: str, env: Mapping[str, str] = {}) -> Result:
        """`dora COMMAND run.toml -b ... OPTIONS`."""
        return dora(command, str(self.path), "-b", self.address, *options, env=env)

    def look(self, command: str, *options: str) -> Result:
        """`dora COMMAND RUN -b ... OPTIONS`, for commands that read the log."""
        return dora(command, self.name, "-b", self.address, *options)


def dora(*arguments: str, env: Mapping[str, str] = {}) -> Result:
    """The command line, in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    root = logging.getLogger()
    loggers = list(root.handlers)
    try:
        return CliRunner().invoke(cli, arguments, env=dict(env))
    finally:
        root.handlers[:] = loggers
        for number, handler in handlers.items():
            signal.signal(number, handler)


def refused(result: Result, code: int, *parts: str) -> None:
    """The command ended with this exit code and a message that holds all parts, not a traceback."""
    said = " ".join(result.stderr.split())
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code, result.output
    assert "error: " in said.lower(), said
    assert "Traceback" not in said, said
    for part in parts:
        assert part in said, f"{part!r} is not in: {said}"


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of small runs; do not change it."""
    return make_model(tmp_path_factory.mktemp("small-model"))


@pytest.fixture
def small(
    run_name: str, tmp_path: Path, small_model: Path, settings: ClusterSettings
) -> Iterator[SmallRun]:
    """A run without topics yet."""
    import sys

    yield SmallRun(run_name, tmp_path, small_model, settings.bootstrap_servers)
    for name in ("scoring", "broken"):
        sys.modules.pop(name, None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path.resolve())]
