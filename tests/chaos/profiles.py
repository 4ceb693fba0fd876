"""The runs that chaos is made in: their configuration, and the times that go with it.

Invariant: a freeze outlasts every timeout by which others notice it: the worker's heartbeat, the
transaction's timeout with the local broker's own turn to look for such (1 s), the broker's session
with the controller (9 s).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.chaos.plan import Kind, Mix, Victim

_REAPER_SECONDS = 1.0
_BROKER_SESSION_SECONDS = 9.0
_SPREAD_SECONDS = 2.0

_KINDS: Mapping[Victim, Mapping[Kind, float]] = {
    "trainer": {"kill": 0.3, "freeze": 0.2, "point": 0.5},
    "coordinator": {"kill": 0.4, "freeze": 0.25, "point": 0.35},
    "worker": {"kill": 0.4, "freeze": 0.25, "point": 0.35},
    "broker": {"kill": 0.6, "freeze": 0.4},
}

_COMMON = """\
[run]
name = "chaos"
seed = {seed}
directory = "{directory}/runs"

[policy]
model = "{directory}/model"

[task]
kind = "jsonl"
path = "words.jsonl"
verifier = "scoring:verify"
held_out_fraction = 0.0
max_prompt_tokens = 8

[trainer]
steps = 1000000
checkpoint_every = 4
batch_timeout_seconds = {patience}

[trainer.optimizer]
learning_rate = 1e-3

[kafka]
lanes = 2
connect_timeout_seconds = 25
request_timeout_seconds = 25
"""

_EMULATED = """
transaction_timeout_seconds = 5

[window]
max_staleness = 2
groups_per_step = 4
group_size = 2

[rollout]
engine = "emulated"
capacity = 8
max_new_tokens = 120
chunk_tokens = 4
heartbeat_seconds = 0.2
heartbeat_timeout_seconds = 2.5
load_timeout_seconds = 15
stall_timeout_seconds = 60
hang_timeout_seconds = 90

[rollout.emulated]
iteration_seconds = 0.06
load_seconds = 0.2
length = "lognormal"
length_mean = 32
length_sigma = 1.0
"""

_VLLM = """
transaction_timeout_seconds = 10

[window]
max_staleness = 2
groups_per_step = 4
group_size = 2

[rollout]
engine = "vllm"
capacity = 12
max_new_tokens = 384
chunk_tokens = 16
kv_cache_gib = 0.25
heartbeat_seconds = 0.5
heartbeat_timeout_seconds = 10
load_timeout_seconds = 120
stall_timeout_seconds = 120
hang_timeout_seconds = 180
"""


@dataclass(frozen=True, slots=True)
class Profile:
    """How a run with one engine is set up. Times in seconds."""

    engine: str
    mix: Mix
    text: str
    vocabulary: int
    width: int
    """Hidden size of the policy."""
    positions: int
    """Longest sequence of the policy, in tokens."""
    max_staleness: int
    heartbeat_timeout: float
    transaction_timeout: float
    patience: float
    """How long the run may take to recover from a fault, or a process to pass a point."""
    at_once: int
    """Victims that are struck at the same time, at most."""
    modules: tuple[str, ...]
    """What the processes need and is imported once for all of them."""

    @property
    def workers(self) -> tuple[str, ...]:
        """Ids of the workers."""
        return self.mix.workers

    def configuration(self, directory: str, seed: int) -> str:
        """The run's TOML file."""
        return self.text.format(directory=directory, seed=seed, patience=self.patience)

    def freeze_seconds(self, victim: Victim, stretch: float) -> float:
        """How long a frozen process sleeps; `stretch` is from 0 to 1."""
        timeouts = {
            "worker": self.heartbeat_timeout,
            "coordinator": max(self.heartbeat_timeout, self.transaction_timeout + _REAPER_SECONDS),
            "trainer": max(self.heartbeat_timeout, self.transaction_timeout + _REAPER_SECONDS),
            "broker": max(_BROKER_SESSION_SECONDS, self.transaction_timeout),
        }
        return timeouts[victim] + 0.5 + _SPREAD_SECONDS * stretch


PROFILES: Mapping[str, Profile] = {
    "emulated": Profile(
        engine="emulated",
        mix=Mix(
            victims={"trainer": 0.2, "coordinator": 0.25, "worker": 0.43, "broker": 0.12},
            kinds=_KINDS,
            workers=("w0", "w1", "w2"),
            delay=2.0,
        ),
        text=_COMMON + _EMULATED,
        vocabulary=40,
        width=16,
        positions=160,
        max_staleness=2,
        heartbeat_timeout=2.5,
        transaction_timeout=5.0,
        patience=120.0,
        at_once=3,
        modules=(
            "deepspeed",
            "transformers.models.auto.tokenization_auto",
            "transformers.models.auto.modeling_auto",
            "transformers.models.qwen2.modeling_qwen2",
            "dora.consumers.trainer.trainer",
            "dora.producers.coordinator.coordinator",
            "dora.producers.worker.process",
            "dora.producers.engines.emulated",
            "dora.cli.train",
            "dora.cli.coordinator",
            "dora.cli.rollout",
        ),
    ),
    "vllm": Profile(
        engine="vllm",
        mix=Mix(
            victims={"trainer": 0.3, "coordinator": 0.3, "worker": 0.25, "broker": 0.15},
            kinds=_KINDS,
            workers=("w0", "w1"),
            delay=3.0,
        ),
        text=_COMMON + _VLLM,
        vocabulary=400,
        width=64,
        positions=512,
        max_staleness=2,
        heartbeat_timeout=10.0,
        transaction_timeout=10.0,
        patience=400.0,
        at_once=2,
        modules=("dora.cli.main",),
    ),
}
