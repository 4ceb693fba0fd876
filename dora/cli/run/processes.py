"""The processes of a run on this machine: which there are, and how each is started.

Every process loads the same configuration, and secrets travel in the environment, not on
the command line.
"""

import os
import sys

from dora.cli.options import ConfigSource
from dora.cli.run.preflight import process_names
from dora.cli.run.supervisor import ChildSpec
from dora.config import Config
from dora.consumers.trainer.origin import Origin


def child_specs(
    config: Config, source: ConfigSource, origin: Origin | None = None
) -> list[ChildSpec]:
    """The processes of the run, in the order in which they are started. A run that has not begun
    begins with `origin`."""
    environment = child_environment(config)
    train = ("train",) if origin is None else ("train", "--from", str(origin))
    commands: dict[str, tuple[str, ...]] = {"coordinator": ("coordinator",), "trainer": train}
    names = process_names(config)
    left, shared = config.rollout.workers, config.rollout.workers_per_process
    for name in names:
        if name not in commands:
            count = min(left, shared)
            commands[name] = ("rollout", "--worker-id", name, "--workers", str(count))
            left -= count
    return [
        ChildSpec(name, tuple(child_command(config, source, *commands[name])), environment)
        for name in names
    ]


def child_command(config: Config, source: ConfigSource, *words: str) -> list[str]:
    """The command line of `dora WORDS` with the configuration of the run."""
    return [sys.executable, "-m", "dora", *words, *source.arguments(config)]


def child_environment(config: Config) -> dict[str, str]:
    """The environment of the run's processes."""
    # some tasks draw from sets: every process must iterate over them in the same order
    fixed = {"PYTHONHASHSEED": "0"}
    own = {"PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
    return {**fixed, **os.environ, **own, **ConfigSource.environment(config)}
