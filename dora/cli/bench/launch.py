"""How `dora bench` starts runs on this machine."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dora.bench.runs import Cores, Report
from dora.broker.local import running_broker, start_broker
from dora.cli.options import ConfigSource, with_broker
from dora.cli.run.prepare import needs_preparation
from dora.cli.run.processes import child_command, child_environment, child_specs
from dora.cli.run.supervisor import ChildSpec, Supervisor
from dora.config import Config
from dora.config.loading import KafkaOverrides, load_config
from dora.errors import PolicyError


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """`bench.runs.Launcher` with the processes of `dora run`; `overrides` say how Kafka is reached,
    and without them it is the local broker in `broker_directory`."""

    overrides: KafkaOverrides
    broker_directory: Path

    def load(self, path: Path, sets: Sequence[str]) -> Config:
        """See `Launcher.load`."""
        return load_config(path, sets=sets, kafka=self.overrides)

    def find_cluster(self, config: Config, report: Report) -> Config:
        """See `Launcher.find_cluster`."""
        if config.kafka.bootstrap_servers is not None:
            return config
        broker = running_broker(self.broker_directory)
        if broker is None:
            report(f"starting a local Kafka broker in {self.broker_directory}")
            broker = start_broker(self.broker_directory)
        return with_broker(config, broker.bootstrap_servers)

    def prepare(self, config: Config, path: Path, sets: Sequence[str], report: Report) -> None:
        """See `Launcher.prepare`; PolicyError if it fails."""
        if not needs_preparation(config):
            return
        report(f"making {config.policy.model}")
        done = subprocess.run(
            child_command(config, self._source(path, sets), "prepare"),
            env=child_environment(config), check=False,
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise PolicyError(
                f"policy.prepare = {config.policy.prepare} failed: {done.stderr or done.stdout}"
            )

    def processes(
        self, config: Config, path: Path, sets: Sequence[str], cores: Cores | None = None
    ) -> Supervisor:
        """See `Launcher.processes`."""
        specs = [
            _pinned(spec, cores or {}) for spec in child_specs(config, self._source(path, sets))
        ]
        logs = config.run_directory / "logs"
        return Supervisor(specs, logs, max_restarts=0, on_event=lambda text: None)

    def _source(self, path: Path, sets: Sequence[str]) -> ConfigSource:
        return ConfigSource(path, tuple(sets), self.broker_directory)


def _pinned(spec: ChildSpec, cores: Cores) -> ChildSpec:
    role = spec.name if spec.name in ("coordinator", "trainer") else "rollout"
    return replace(spec, cores=cores[role]) if role in cores else spec
