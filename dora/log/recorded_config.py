"""The configuration of a run as its ledger recorded it, for a replay.

Only what the user asks for may differ from it: a file that belongs to another run is refused with
the differences.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from dora.config import Config, KafkaSection
from dora.config.loading import apply_sets, load_config
from dora.core.identity import differences
from dora.errors import ConfigError, RunError
from dora.schemas.records import RunStarted


def recorded_config(
    started: RunStarted,
    kafka: KafkaSection,
    file: Path | None = None,
    sets: Sequence[str] = (),
) -> Config:
    """The configuration of the run that `started` began, with `kafka` to reach its log.

    With `file` it comes from there instead, and must have the recorded identity (RunError, naming
    every difference). `sets` (`section.key=value`) are applied last and are not compared: they are
    what a replay tries out. RunError if the run recorded none and no file is given; ConfigError if
    it does not fit this version of dora, or `sets` are wrong.
    """
    if file is not None:
        config = load_config(file, environment={})
        changed = differences(
            json.loads(started.identity), json.loads(json.dumps(config.identity()))
        )
        if changed:
            raise RunError(
                f"{file} is not the configuration of run {started.run}: " + "; ".join(changed),
                hint="Give the file that the run was started with.",
            )
    elif not started.config:
        raise RunError(
            f"run {started.run} was begun by dora {started.dora_version}, which did not record the "
            "whole configuration",
            hint="Name the file that the run was started with: --config FILE.",
        )
    else:
        try:
            config = Config.model_validate(json.loads(started.config))
        except ValueError as error:
            raise ConfigError(
                f"the configuration that run {started.run} recorded (dora {started.dora_version}) "
                f"does not fit this version of dora: {error}",
                hint="Name a file for this version: --config FILE.",
            ) from error
    config = apply_sets(config, sets)
    reach = {key: getattr(kafka, key) for key in ("bootstrap_servers", "properties", "registry")}
    section = config.kafka.model_copy(update=reach)
    return config.model_copy(update={"kafka": section})
