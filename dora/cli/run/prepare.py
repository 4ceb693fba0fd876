"""`dora prepare` (internal): makes the model directory with the configured hook.

The model directory appears whole or not at all: the hook writes beside it.
"""

import shutil
from pathlib import Path

import click

from dora.cli.options import Command, config_argument, print_line
from dora.config import Config
from dora.errors import PolicyError


def needs_preparation(config: Config) -> bool:
    """Whether the hook must make the model directory first."""
    return config.policy.prepare is not None and not Path(config.policy.model).exists()


@click.command(hidden=True, cls=Command)
@config_argument(broker=False)
def prepare(config: Config) -> None:
    """Make the model directory of CONFIG with its policy.prepare function, if it is missing."""
    from dora.producers.tasks.hooks import load_hook
    from dora.weights.models import check_model_directory

    directory = Path(config.policy.model)
    if config.policy.prepare is None:
        raise PolicyError("policy.prepare is not set")
    if not needs_preparation(config):
        print_line(f"{directory} is there already")
        return
    hook = load_hook(config.policy.prepare, config.home, "policy.prepare", error=PolicyError)
    draft = directory.with_name(f"{directory.name}.unfinished")
    if draft.exists():
        shutil.rmtree(draft)
    draft.parent.mkdir(parents=True, exist_ok=True)
    hook(draft, config)
    if not draft.is_dir():
        raise PolicyError(f"policy.prepare = {config.policy.prepare} made no directory {draft}")
    check_model_directory(draft)
    draft.rename(directory)
    print_line(f"made {directory}")
