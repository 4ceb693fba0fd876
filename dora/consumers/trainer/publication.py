"""What a step leaves on disk and announces: weights, checkpoint, policy record.

Invariant: weights and checkpoint are complete on disk before the record that names them is made,
and only those are removed that no committed record names, or that are older than what is kept.
"""

import json
import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from dora import faults
from dora.bus.reader import LogReader
from dora.bus.topics import RunTopics
from dora.config import Config
from dora.consumers.learner.base import Learning
from dora.consumers.trainer.checkpoints import Checkpoints, checkpoint_name
from dora.consumers.trainer.weight_users import WeightUsers
from dora.core.ring import slot_partitions
from dora.core.weight_keeping import needless
from dora.core.window import Window
from dora.log.inputs import fingerprints
from dora.log.ledger import History
from dora.schemas.records import Policy, SlotOffset, pack_logprobs, pack_tokens
from dora.weights.adapters import write_adapter, write_adapter_config
from dora.weights.canary import canary_tokens
from dora.weights.models import copy_companions
from dora.weights.plain_tensors import write_plain
from dora.weights.store import Published, WeightStore, name_of

log = logging.getLogger(__name__)


class Publisher:
    """Publishes a learner's versions; `announced` records what was committed."""

    def __init__(
        self,
        config: Config,
        learner: Learning,
        model: Path,
        reader: LogReader,
        history: History,
        users: WeightUsers,
        progress: Callable[[], None],
    ) -> None:
        self._config = config
        self._learner = learner
        self._model = model
        self._reader = reader
        self._users = users
        self._progress = progress
        self._topics = RunTopics(config.run.name)
        self._window = Window(config.window.max_staleness, config.window.groups_per_step)
        self._store = WeightStore.of(config)
        self._checkpoints = Checkpoints(config.run_directory / "checkpoints")
        self._checkpoint_names = list(history.checkpoints)
        self.inputs = fingerprints(config)
        """What the run's inputs hold."""
        self._damaged: set[str] = set()
        self._weight_names = {v: name_of(p.weights_uri) for v, p in history.policies.items()}

    def publish(self, version: int) -> Policy:
        """Store the learner's weights as `version`; returns the record that announces them, with
        the canary under these weights and the offsets from which on the topics concern it."""
        published = self._write(version)
        config = self._config
        tokens = canary_tokens(config.run.seed, self._learner.vocabulary, config.max_model_len)
        topics = self._topics
        slots = [
            (topic, index)
            for topic in (topics.chunks, topics.trajectories)
            for index in slot_partitions(version, config.window.ring, config.kafka.lanes)
        ]
        # Whatever concerns this version comes after it was announced: who starts later need not
        # read these topics from their beginning.
        slots += [(topics.dispatch, index) for index in range(config.kafka.dispatch_partitions)]
        slots.append((topics.steps, 0))
        offsets = self._reader.end_offsets(slots)
        return Policy(
            run=config.run.name,
            version=version,
            kind="full" if config.policy.lora is None else "lora",
            weights_uri=published.uri,
            files=published.files,
            weights_checksum=published.checksum,
            canary_token_ids=pack_tokens(np.asarray(tokens, dtype=np.int32)),
            canary_logprobs=pack_logprobs(self._learner.sequence_logprobs(tokens)),
            slots=tuple(SlotOffset(*slot, offsets[slot]) for slot in slots),
            created_ms=time.time_ns() // 1_000_000,
            inputs=self.inputs,
        )

    def _write(self, version: int) -> Published:
        learner = self._learner
        state, checksum, write = learner.export_state(), None, None
        if self._config.trainer.engine == "emulated":
            checksum, write = learner.weights_checksum(), write_plain
        else:
            state = {name: tensor.cpu() for name, tensor in state.items()}
            write = None if learner.adapter_settings is None else write_adapter
        scratch = self._config.run_directory / "scratch"
        published = self._store.publish(version, state, self._companions, scratch, write, checksum)
        faults.point("trainer.weights_stored")
        self._progress()
        return published

    def _companions(self, directory: Path) -> None:
        """What belongs to the weights: the model's files, or an adapter's configuration (the base
        model stays where it is)."""
        if self._config.trainer.engine == "emulated":
            content = {"vocab_size": self._learner.vocabulary}
            (directory / "config.json").write_text(json.dumps(content) + "\n")
        elif self._learner.adapter_settings is not None:
            write_adapter_config(directory, self._learner.adapter_settings)
        elif self._config.policy.lora is None:
            code = self._config.policy.trust_remote_code
            copy_companions(self._model, directory, code=code)

    def write_checkpoint(self, policy: Policy, *, forced: bool = False) -> str | None:
        """Write a checkpoint if one is due at this version, or `forced`; returns its name."""
        if policy.version % self._config.trainer.checkpoint_every and not forced:
            return None
        name = checkpoint_name(policy.version, policy.weights_checksum)
        self._checkpoints.write(name, self._learner.save_checkpoint)
        faults.point("trainer.checkpoint_stored")
        self._progress()
        return name

    def announced(self, policy: Policy, checkpoint: str | None) -> None:
        """`policy` is committed, with `checkpoint` if one was written."""
        self._weight_names[policy.version] = name_of(policy.weights_uri)
        if checkpoint is not None:
            self._checkpoint_names.append(checkpoint)

    def prune(self, newest: int) -> None:
        """Remove whatever is not kept with version `newest` committed, orphans of the versions up
        to it included.

        What is of a later version is left alone, even at the start: this trainer may have been
        replaced without knowing it (it was suspended, say), and what it does not know may be what
        the other one has committed. An orphan of a later version goes once its version is
        committed. Which weights are kept says `dora.core.weight_keeping`; of the checkpoints, the
        `trainer.keep_checkpoints` newest that are there.
        """
        removed = self._prune_weights(newest)
        at_hand = self._checkpoints.names() - self._damaged
        self._checkpoint_names = [name for name in self._checkpoint_names if name in at_hand]
        del self._checkpoint_names[: -self._config.trainer.keep_checkpoints]
        removed += self._checkpoints.keep_only(set(self._checkpoint_names), newest=newest)
        if removed:
            log.debug("removed %s", ", ".join(removed))

    def _prune_weights(self, newest: int) -> list[str]:
        users = self._users.heard()
        if users is None:
            return []
        config, now = self._config, time.monotonic()
        staleness, keep = self._window.max_staleness, config.weights.keep
        for version in needless(self._weight_names, newest, staleness, keep, users, now):
            del self._weight_names[version]
        return self._store.keep_only(set(self._weight_names.values()), newest=newest)

    def restore(self, policy: Policy) -> None:
        """Store the announced weights of the newest version again if they are gone."""
        stored = name_of(policy.weights_uri) in self._store.versions()
        if not stored and self._learner.weights_checksum() == policy.weights_checksum:
            log.warning("the weights of version %d are gone: stored again", policy.version)
            self._write(policy.version)

    def discard(self, checkpoints: Collection[str]) -> None:
        """These checkpoints are damaged: the next `prune` removes them and keeps others."""
        self._damaged.update(checkpoints)
