"""Configurations that tests share."""

import tomllib
from pathlib import Path
from typing import Any

from dora.config import Config

MINIMAL = """
[run]
name = "demo"
[policy]
model = "model"
[task]
kind = "reasoning-gym"
name = "spell_backward"
[trainer]
steps = 3
"""
"""The shortest file that is one."""

EMULATED = """\
[run]
name = "{run}"
directory = "{directory}"
[policy]
model = "emulated"
[task]
kind = "synthetic"
[window]
max_staleness = 1
groups_per_step = 2
group_size = 2
[rollout]
engine = "emulated"
capacity = 16
max_new_tokens = 32
[rollout.emulated]
time_scale = 0.05
load_seconds = 0.1
length_mean = 8
[trainer]
engine = "emulated"
steps = {steps}
"""
"""A file of a run without a model: both engines are emulated."""


def emulated(directory: Path, *, run: str = "r", steps: int = 3, **sections: Any) -> Config:
    """The configuration in `EMULATED` with other values for some keys of its `sections`."""
    values = tomllib.loads(EMULATED.format(run=run, directory=directory, steps=steps))
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return Config.model_validate(values)
