"""What a step leaves on disk and announces: weights, checkpoint, policy record; and which of it is
kept.

Weights and checkpoint are complete on disk before the record that names them is made. Removed are
only those that no committed record names, or that are older than what is kept.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dora import faults
from dora.bus.reader import LogReader
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.config import Config
from dora.consumers.learner.learner import Learner, diverged
from dora.consumers.trainer.checkpoints import (
    Checkpoints,
    checkpoint_name,
    starting_checkpoint,
)
from dora.core.processes import WeightUser, needless, weight_user
from dora.core.ring import slot_partitions
from dora.errors import DeadlineError, PolicyError
from dora.log.ledger import History
from dora.log.presence import recent_statuses
from dora.schemas.records import Policy, RunStarted, SlotOffset, Status, pack_logprobs, pack_tokens
from dora.weights.adapters import write_adapter, write_adapter_config
from dora.weights.canary import canary_tokens
from dora.weights.models import copy_companions
from dora.weights.store import Published, WeightStore, name_of
from dora.weights.tensors import write_plain, write_tensors

log = logging.getLogger(__name__)

READ_SECONDS = 30.0


class WeightUsers:
    """Which versions the workers of a run host, await or load, by their statuses in the workers
    topic. At the start all that the topic holds count as just received, so that no live worker is
    taken for a lost one."""

    def __init__(self, config: Config, settings: ClusterSettings) -> None:
        self._heartbeat_timeout = config.rollout.heartbeat_timeout_seconds
        self._load_timeout = config.rollout.load_timeout_seconds
        self._users: dict[str, WeightUser] = {}
        self._reader = LogReader(settings, client_id="trainer-workers")
        self._reader.assign(recent_statuses(self._reader, RunTopics(config.run.name)))

    def read(self) -> list[WeightUser] | None:
        """Read the statuses up to the topic's end; returns every worker that may still use weights,
        None if Kafka did not answer in time."""
        try:
            for message in self._reader.read_to_end(READ_SECONDS):
                if isinstance(message.value, Status):
                    self._on_status(message.value)
        except DeadlineError as error:
            log.warning("no weights are deleted now: %s", error.message)
            return None
        now = time.monotonic()
        self._users = {name: user for name, user in self._users.items() if user.until >= now}
        return list(self._users.values())

    def close(self) -> None:
        """Close the connections to the cluster."""
        self._reader.close()

    def _on_status(self, status: Status) -> None:
        user = weight_user(
            status,
            time.monotonic(),
            heartbeat_timeout=self._heartbeat_timeout,
            load_timeout=self._load_timeout,
        )
        if user is None:
            self._users.pop(status.process, None)
        else:
            self._users[status.process] = user


class Publisher:
    """Publishes a learner's versions, with what the run's `inputs` hold (`dora.log.inputs`), and
    prunes those that are not needed any more."""

    def __init__(
        self,
        config: Config,
        learner: Learner,
        model: Path,
        inputs: dict[str, str],
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
        self._store = WeightStore.of(config)
        self._checkpoints = Checkpoints(config.run_directory / "checkpoints")
        self._checkpoint_names = list(history.checkpoints)
        self._start: str | None = None
        if history.started is not None:
            self._start = starting_checkpoint(history.started, history.policies.get(0))
        self._inputs = inputs
        self._damaged: set[str] = set()
        self._weight_names = {v: name_of(p.weights_uri) for v, p in history.policies.items()}

    def publish(self, version: int) -> Policy:
        """Store the learner's weights as `version`; returns the record that announces them, with
        the canary under these weights and the offsets from which on the topics concern it.

        Raises PolicyError, before anything is stored, if these weights give no numbers.
        """
        config = self._config
        tokens = canary_tokens(config.run.seed, self._learner.vocabulary, config.max_model_len)
        logprobs = self._learner.sequence_logprobs(tokens)
        if not np.isfinite(logprobs).all():
            what = "the new weights give log-probabilities that are no numbers"
            raise (
                diverged(version, what)
                if version
                else PolicyError(
                    f"the model {config.policy.model} gives log-probabilities that are no numbers",
                    hint="Its weights are damaged, or overflow in policy.dtype.",
                )
            )
        published = self._write(version)
        topics = self._topics
        slots = [
            (topic, index)
            for topic in (topics.chunks, topics.trajectories)
            for index in slot_partitions(version, config.window.ring, config.kafka.lanes)
        ]
        # What concerns this version comes after its announcement, so a process that starts later
        # need not read these topics from their beginning.
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
            canary_logprobs=pack_logprobs(logprobs),
            slots=tuple(SlotOffset(*slot, offsets[slot]) for slot in slots),
            created_ms=time.time_ns() // 1_000_000,
            inputs=self._inputs,
        )

    def _write(self, version: int) -> Published:
        learner = self._learner
        state, checksum = learner.export_state(), None
        write: Callable[[Path, Mapping[str, Any]], None] = write_tensors
        if self._config.trainer.engine == "emulated":
            checksum, write = learner.weights_checksum(), write_plain
        else:
            state = {name: tensor.cpu() for name, tensor in state.items()}
            if learner.adapter_settings is not None:
                write = write_adapter
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

    def record_begun(self, started: RunStarted, policy: Policy) -> None:
        """The run has begun with `policy`."""
        self._start = starting_checkpoint(started, policy)
        self.record_committed(policy, None)

    def record_committed(self, policy: Policy, checkpoint: str | None) -> None:
        """`policy` is committed, with `checkpoint` if one was written."""
        self._weight_names[policy.version] = name_of(policy.weights_uri)
        if checkpoint is not None:
            self._checkpoint_names.append(checkpoint)

    def prune(self, newest: int) -> None:
        """Remove what is not kept once version `newest` is committed, orphans of versions up to it
        included. Kept are weights by `dora.core.processes.needless`, and the newest
        `trainer.keep_checkpoints` checkpoints, and the one that the run began with.

        Files of a later version are left alone, even at the start: this trainer may have been
        replaced without knowing it (it was suspended, say), and the other one may have committed
        them. An orphan of a later version is removed once its version is committed.
        """
        removed = self._prune_weights(newest)
        on_disk = self._checkpoints.names() - self._damaged
        self._checkpoint_names = [name for name in self._checkpoint_names if name in on_disk]
        del self._checkpoint_names[: -self._config.trainer.keep_checkpoints]
        kept = {*self._checkpoint_names, *filter(None, [self._start])}
        removed += self._checkpoints.keep_only(kept, newest=newest)
        if removed:
            log.debug("removed %s", ", ".join(removed))

    def _prune_weights(self, newest: int) -> list[str]:
        users = self._users.read()
        if users is None:
            return []
        config, now = self._config, time.monotonic()
        staleness, keep = config.window.max_staleness, config.weights.keep
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


log = logging.getLogger(__name__)
