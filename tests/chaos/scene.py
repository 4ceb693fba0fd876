"""Where a chaos run takes place: a scratch directory with a policy, data, configuration and broker.

Invariant: the broker of the scratch directory belongs to this run alone, and is gone when the scene
is closed, in whatever state it was.
"""

import json
import os
import threading
import time
from pathlib import Path

from dora.broker.local import BrokerInfo, broker_process, start_broker
from dora.broker.process import port_free
from dora.bus import ClusterSettings, TopicAdmin, cluster_settings, topic_plan
from dora.config import Config
from dora.config.loading import KafkaOverrides, load_config
from dora.errors import DoraError
from tests.chaos.nursery import end_broker
from tests.chaos.profiles import Profile
from tests.small_run import SCORING, make_model

BROKER_SECONDS = 120.0
_HEAP_MB = 320
_PORT_SECONDS = 30.0
_WORDS = ("sun", "moon", "star", "sky", "rain", "snow", "wind", "sea")


class Scene:
    """Files and broker of one run. `start` first, `close` last."""

    def __init__(self, directory: Path, profile: Profile, seed: int) -> None:
        self.directory = directory
        self.broker_directory = directory / "broker"
        self.path = directory / "run.toml"
        self.logs = directory / "logs"
        self._starting: threading.Thread | None = None
        self._failure: DoraError | None = None
        self._info: BrokerInfo | None = None
        directory.mkdir(parents=True, exist_ok=True)
        make_model(
            directory / "model",
            vocabulary=profile.vocabulary,
            words=profile.vocabulary,
            width=profile.width,
            positions=profile.positions,
        )
        lines = [{"prompt": word, "answer": word[::-1]} for word in _WORDS]
        (directory / "words.jsonl").write_text("".join(json.dumps(li) + "\n" for li in lines))
        (directory / "scoring.py").write_text(SCORING)
        self.path.write_text(profile.configuration(str(directory), seed))

    @property
    def address(self) -> str:
        """The broker's address, which stays the same over its restarts."""
        assert self._info is not None
        return self._info.bootstrap_servers

    @property
    def _port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def settings(self) -> ClusterSettings:
        """How clients reach the broker."""
        return cluster_settings(self.config().kafka)

    def config(self, *sets: str) -> Config:
        """The run's configuration as commands see it."""
        kafka = KafkaOverrides(self.address)
        return load_config(self.path, sets=sets, environment={}, kafka=kafka)

    def start(self) -> None:
        """Start the broker and create the topics."""
        self._info = start_broker(
            self.broker_directory, heap_mb=_HEAP_MB, deadline_seconds=BROKER_SECONDS
        )
        with TopicAdmin(self.settings) as admin:
            admin.create(topic_plan(self.config()))

    def strike_broker(self, number: int) -> None:
        """Signal the broker."""
        pid = broker_process(self.broker_directory)
        if pid is not None:
            os.kill(pid, number)

    @property
    def broker_lives(self) -> bool:
        """Whether the broker's process is there."""
        return broker_process(self.broker_directory) is not None

    def revive_broker(self) -> None:
        """Start the broker again, in a thread; `broker_problem` says how that went."""
        if self._starting is not None and self._starting.is_alive():
            return
        self._starting = threading.Thread(target=self._start_again, name="broker", daemon=True)
        self._starting.start()

    @property
    def broker_starting(self) -> bool:
        """Whether it is being started again."""
        return self._starting is not None and self._starting.is_alive()

    def broker_problem(self) -> str | None:
        """Why it did not come back, if it did not."""
        return None if self._failure is None else self._failure.message

    def _start_again(self) -> None:
        deadline = time.monotonic() + _PORT_SECONDS
        # The killed process holds it until the kernel has let go of all its memory.
        while not port_free(self._port) and time.monotonic() < deadline:
            time.sleep(0.02)
        try:
            info = start_broker(
                self.broker_directory, heap_mb=_HEAP_MB, deadline_seconds=BROKER_SECONDS
            )
        except DoraError as error:
            self._failure = error
            return
        if info.bootstrap_servers != self.address:
            self._failure = DoraError(
                f"the broker came back at {info.bootstrap_servers} instead of {self.address}"
            )

    def disk_mib(self) -> float:
        """What the scratch directory takes on disk."""
        blocks = 0
        for root, _, files in os.walk(self.directory):
            for name in files:
                try:
                    blocks += os.lstat(os.path.join(root, name)).st_blocks
                except FileNotFoundError:
                    continue  # removed meanwhile
        return blocks * 512 / 2**20

    def close(self) -> None:
        """Kill the broker."""
        deadline = time.monotonic() + BROKER_SECONDS
        while True:
            starting = self.broker_starting
            if self.broker_lives:
                end_broker(self.broker_directory)
            elif not starting:
                return
            if time.monotonic() > deadline:
                raise DoraError(f"the broker in {self.broker_directory} cannot be ended")
            time.sleep(0.1)
