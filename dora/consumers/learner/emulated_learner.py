"""A learner that waits instead of computing, to try schedules and faults at any size.

Its weights are a digest of everything it was trained on, in order, and of the loss and the learning
rate. So each version has other ones, and only a redo of the same trajectories with the same values
ends in the same.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dora.config import Config
from dora.consumers.learner.batches import Floats, Sample, batch_metrics, learning_rate
from dora.errors import WeightsError
from dora.weights.models import emulated_vocabulary
from dora.weights.tensors import plain_checksum

_FILE = "emulated.json"
_TENSOR = "emulated.weight"
_SIZE = 32
_SLICE_SECONDS = 0.25


class EmulatedLearner:
    """One policy in pretended training, with the methods of `Learner`.

    A step takes `step_seconds` and `seconds_per_token` for each generated token, times the rollout
    engine's time scale; a streamed one spends that group by group. `progress` is called meanwhile.
    """

    def __init__(
        self,
        config: Config,
        *,
        progress: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._config = config
        self._progress = progress
        self._clock = clock
        self._sleep = sleep
        self._scale = config.rollout.emulated.time_scale
        self.vocabulary = emulated_vocabulary(config.policy.model)
        self.updates = 0
        self._state = hashlib.blake2b(
            f"{config.run.seed}:{self.vocabulary}".encode(), digest_size=_SIZE
        ).digest()
        self._version = 0
        self._samples: list[Sample] = []
        self._groups = 0
        self._debt = 0.0
        self._rate = 0.0
        self._seen = hashlib.blake2b()

    @property
    def parameters(self) -> int:
        """Bytes of the digest."""
        return _SIZE

    @property
    def adapter_settings(self) -> Mapping[str, Any] | None:
        """None: no adapter is trained."""
        return None

    def update(
        self,
        groups: Sequence[Sequence[Sample]],
        version: int,
        probes: Sequence[Sample] = (),
        places: Sequence[Any] = (),
    ) -> dict[str, float]:
        """Wait as long as the step takes; returns the metrics of the samples."""
        self.begin(version)
        for group in groups:
            self._count(group)
        return self.finish()

    def begin(self, version: int) -> None:
        """Begin a step."""
        self._version = version
        self._samples = []
        self._groups = 0
        self._debt = self._trainer.step_seconds
        trainer = self._config.trainer
        total = trainer.steps * trainer.updates_per_step
        self._rate = learning_rate(trainer.optimizer, self.updates, total)
        self._seen = hashlib.blake2b(self._state, digest_size=_SIZE)
        self._seen.update(f"{self._rate!r}:{trainer.loss!r}".encode())

    def add(self, group: Sequence[Sample]) -> None:
        """Spend the group's part of the step."""
        self._count(group)
        part = min(self._debt, self._trainer.step_seconds / self._config.window.groups_per_step)
        tokens = sum(sample.generated for sample in group) * self._trainer.seconds_per_token
        self._debt -= part + tokens
        self._spend(part + tokens)

    def finish(self) -> dict[str, float]:
        """Spend the rest, and change the weights."""
        self._spend(self._debt)
        self._debt = 0.0
        self._state = self._seen.digest()
        self.updates += self._config.trainer.updates_per_step
        metrics = batch_metrics(self._samples, self._version, self._config.task.success_threshold)
        return metrics | {"learning_rate": self._rate}

    def sequence_logprobs(self, token_ids: Sequence[int]) -> Floats:
        """Those of the uniform distribution, as the emulated engine has them."""
        count = max(0, len(token_ids) - 1)
        return np.full(count, -math.log(self.vocabulary), dtype=np.float32)

    def export_state(self) -> dict[str, Any]:
        """The digest as an array, after `publish_seconds`."""
        self._spend(self._trainer.publish_seconds)
        return self._tensors()

    def weights_checksum(self) -> str:
        """Checksum of the digest."""
        return plain_checksum(self._tensors())

    def configure(self, config: Config) -> None:
        """Go on with the values of `config`."""
        self._config = config

    def save_checkpoint(self, directory: Path) -> None:
        """Write the digest and the count of updates."""
        content = {"state": self._state.hex(), "updates": self.updates}
        (directory / _FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")

    def load_checkpoint(self, directory: Path, *, updates: int | None = None) -> None:
        """Restore what `save_checkpoint` wrote, as `Learner.load_checkpoint`; WeightsError if it is
        missing or damaged."""
        path = directory / _FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            state, counted = bytes.fromhex(content["state"]), int(content["updates"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"checkpoint {path} cannot be read: {error}") from error
        if len(state) != _SIZE:
            raise WeightsError(f"checkpoint {path} holds {len(state)} bytes, not {_SIZE}")
        self._state, self.updates = state, counted if updates is None else updates

    @property
    def _trainer(self) -> Any:
        return self._config.trainer.emulated

    def _count(self, group: Sequence[Sample]) -> None:
        self._groups += 1
        for sample in group:
            self._samples.append(sample)
            self._debt += sample.generated * self._trainer.seconds_per_token
            content = f"{sample.trajectory_id}:{sample.version}:{sample.generated}:{sample.reward}"
            self._seen.update(content.encode())

    def _tensors(self) -> dict[str, Any]:
        return {_TENSOR: np.frombuffer(self._state, dtype=np.uint8)}

    def _spend(self, seconds: float) -> None:
        """Wait for emulated seconds, calling `progress` meanwhile."""
        until = self._clock() + seconds * self._scale
        while (rest := until - self._clock()) > 0:
            self._sleep(min(rest, _SLICE_SECONDS))
            self._progress()
