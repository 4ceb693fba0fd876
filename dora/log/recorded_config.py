"""The configuration of a run as its ledger recorded it: at its begin, and in each step.

For a replay only what the user asks for may differ from it: a file that belongs to another run is
refused with the differences.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from dora.config import Config, KafkaSection
from dora.config.changes import recorded_values, rule_of, with_settings
from dora.config.loading import apply_sets, load_config
from dora.core.identity import differences
from dora.errors import ConfigError, RunError
from dora.schemas.records import RunStarted, Step


class RecordedSettings:
    """The values of the keys that may change between two starts (`dora.config.changes`), in every
    entry of a ledger."""

    def __init__(self, started: RunStarted, entries: Iterable[Step] = ()) -> None:
        try:
            data = json.loads(started.config or started.identity)
        except ValueError:
            data = None  # what compares configurations reports it
        values = recorded_values(data) if isinstance(data, dict) else {}
        self._changes: list[tuple[int, dict[str, str]]] = [(-1, values)]
        for entry in entries:
            self.add(entry)

    def add(self, entry: Step) -> None:
        """The next entry of the ledger."""
        if entry.settings:
            before = self._changes[-1][1]
            self._changes.append((entry.sequence, before | entry.settings))

    @property
    def newest(self) -> dict[str, str]:
        """The values, as JSON, that the last entry was made with."""
        return self._changes[-1][1]

    def config(self, entry: Step, config: Config) -> Config:
        """`config` with the values that `entry` was made with."""
        return with_settings(
            config, next(v for first, v in reversed(self._changes) if first <= entry.sequence)
        )


def fixed_differences(started: RunStarted, config: Config) -> dict[str, str]:
    """By key that may not change, both values, where `config` differs from that of the run."""
    given = json.loads(json.dumps(config.identity()))
    found = differences(json.loads(started.identity), given)
    return {key: values for key, values in found.items() if rule_of(key).kind == "fixed"}


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
        changed = fixed_differences(started, config)
        if changed:
            told = "; ".join(f"{key}: {values}" for key, values in changed.items())
            raise RunError(
                f"{file} is not the configuration of run {started.run}: {told}",
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
