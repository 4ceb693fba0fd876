"""What the trainer ranks other than 0 do: follow the orders of rank 0.

They write nothing to the log, and read from it only the trajectories of their own shards, by
partition and offset.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dora.bus.reader import LogReader
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.config import Config
from dora.config.changes import with_settings
from dora.consumers.learner.batches import Shard, shard_from_message, shard_places
from dora.consumers.learner.deepspeed_learner import DeepSpeedLearner
from dora.consumers.learner.microbatches import Mismatch
from dora.consumers.learner.ranks import Member
from dora.errors import RankError, WeightsError
from dora.log.trained_records import fetch_trajectories
from dora.weights.models import model_directory

log = logging.getLogger(__name__)

FETCH_SHARE = 0.8
"""Part of the ranks' time-out within which the trajectories must arrive: so this rank gives up
first, and reports what is missing."""


class RankFollower:
    """Follows the orders of rank 0 until it says stop; `run` does the work."""

    def __init__(self, config: Config, settings: ClusterSettings, ranks: Member) -> None:
        self._config = config
        self._ranks = ranks
        self._topic = RunTopics(config.run.name).trajectories
        self._reader = LogReader(settings, client_id=f"trainer-{ranks.rank}")
        self._learner: DeepSpeedLearner | None = None

    def run(self) -> bool:
        """Whether the run is complete, once rank 0 says stop.

        Raises RankError when rank 0 is lost, and what Kafka, the model or the disk refuse.
        """
        try:
            while True:
                order = self._ranks.next_order()
                if order["kind"] == "stop":
                    return bool(order["complete"])
                self._execute(order)
        finally:
            self._reader.close()

    def _execute(self, order: Mapping[str, Any]) -> None:
        kind = order["kind"]
        if kind == "make":
            model = model_directory(self._config.policy.model)
            self._learner = DeepSpeedLearner(model, self._config, ranks=self._ranks)
            return
        learner = self._learner
        if learner is None:
            raise RankError(f"rank 0 orders {kind!r} before there is a learner")
        match kind:
            case "update":
                learner.train(
                    self._shards(order["shard"], packed=learner.packed),
                    int(order["version"]),
                    Mismatch(),
                )
            case "save":
                learner.save_checkpoint(self._shared(order["directory"]))
            case "load":
                learner.load_checkpoint(self._shared(order["directory"]), updates=order["updates"])
            case "configure":
                learner.configure(with_settings(self._config, order["settings"]))
            case "export":
                learner.export_state()
            case "score":
                learner.sequence_logprobs([int(token) for token in order["tokens"]])
            case _:
                raise RankError(f"rank 0 orders {kind!r}, which this dora does not know")

    def _shards(self, shards: Sequence[Mapping[str, Any]], *, packed: bool) -> list[Shard]:
        places = sorted({place for shard in shards for place in shard_places(shard)})
        deadline = FETCH_SHARE * self._ranks.timeout
        found = fetch_trajectories(self._reader, self._topic, places, deadline) if places else {}
        return [shard_from_message(shard, found, packed=packed) for shard in shards]

    def _shared(self, text: str) -> Path:
        directory = Path(text)
        if not directory.is_dir():
            raise WeightsError(
                f"rank {self._ranks.rank} does not see {directory}, where rank 0 keeps checkpoints",
                hint="With ranks on several machines run.directory must be on a file system that "
                "all of them share.",
            )
        return directory
