"""A run's groups as they were exported, to be served to another run's trainer.

Groups come with all their trajectories or not at all, in the order in which they can have started:
by version, evaluations first, then by prompt. Only the run's name is changed; an export has no
chunks. Where a prompt is missing, what comes after it is left out and counted: a trainer would take
it for a loss.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from dora.config import Config
from dora.core.recorded_order import unbroken, unservable
from dora.errors import RunError, UsageError
from dora.log.table_schema import SCHEMA
from dora.producers.replay.recording import Recorded, Timed
from dora.producers.tasks.import_files import FileRow, columns_of, rows_of
from dora.schemas.codec import encode
from dora.schemas.records import (
    Admission,
    InvalidRecord,
    Purpose,
    Sampling,
    Trajectory,
    VersionRun,
    pack_logprobs,
    pack_tokens,
)

_DISTRIBUTION = ("temperature", "top_p", "top_k")


class _Place(BaseModel):
    """Columns that say where a trajectory belongs and whether it fits."""

    model_config = ConfigDict(strict=True)

    run: str
    trajectory_id: str
    group_id: str
    ordinal: int
    version: int
    purpose: Purpose
    trained_step: int | None
    staleness: int | None
    version_runs: list[Any]
    sampling: dict[str, Any]


class FileRecording(Recorded):
    """What `files`, an export to Parquet or JSON lines, hold of one run, for the run of `config`.

    UsageError if a file is no export, they are of several runs, or a trajectory stands in them
    twice; RunError if the trajectories do not fit `config`: another group size, window or sampling,
    or a schedule that mixes versions.
    """

    def __init__(self, files: Sequence[Path], config: Config) -> None:
        super().__init__()
        self.name = config.run.name
        self.identity = json.dumps(config.identity())
        why = unservable(self.identity)
        if why is not None:
            raise RunError(f"run {self.name} cannot be fed from files: {why}")
        self.source = ""
        self.steps = 0
        """The newest version that a trajectory helped to make."""
        self._config = config
        self._files: dict[int, dict[Path, None]] = {}
        """Where each version's rows are, in order."""
        found = self._index(files)
        self.admissions = unbroken(found)
        self.left_out = len(found) - len(self.admissions)
        """Groups that are not served, because they or prompts before them are not whole."""
        if not self.admissions:
            raise RunError(
                f"the files hold no group of run {self.source} that can be served: prompt 0 with "
                f"its {config.window.group_size} trajectories is not among them",
                hint="Export the run from its first version on, and name the whole directory.",
            )

    def _index(self, files: Sequence[Path]) -> dict[Admission, set[str]]:
        found: dict[Admission, set[str]] = {}
        for file in files:
            columns = columns_of(file)
            missing = [] if columns is None else [n for n in SCHEMA.names if n not in columns]
            if missing:
                raise UsageError(
                    f"{file} is no export of trajectories: it has no column {missing[0]}",
                    hint="--serve takes what `dora export --to parquet` or `--to jsonl` wrote.",
                )
            for row in rows_of(file, list(_Place.model_fields)):
                self._files.setdefault(self._add_row(row, found), {})[file] = None
        size = self._config.window.group_size
        for group, samples in found.items():
            if len(samples) > group.group_size:
                raise RunError(
                    f"group {group.group_id} has {len(samples)} trajectories in the files, "
                    f"window.group_size = {size}",
                    hint="Use the group size with which the run was recorded.",
                )
        return found

    def _add_row(self, row: FileRow, found: dict[Admission, set[str]]) -> int:
        """Adds a trajectory to those that were found; returns its version."""
        try:
            place = _Place.model_validate(row.fields)
        except ValidationError as error:
            first = error.errors()[0]
            column = ".".join(map(str, first["loc"]))
            raise UsageError(f"{row.place}: no trajectory: {column}: {first['msg']}") from error
        self.source = self.source or place.run
        if place.run != self.source:
            raise UsageError(
                f"{row.place}: of run {place.run}, but rows before it are of {self.source}",
                hint="Serve one run at a time.",
            )
        self._check_fits(row.place, place)
        self.steps = max(self.steps, place.trained_step or 0)
        size = self._config.window.group_size if place.purpose == "train" else 1
        group = Admission(
            self.name, place.group_id, place.ordinal, place.version, size, place.purpose, 0
        )
        samples = found.setdefault(group, set())
        if place.trajectory_id in samples:
            raise UsageError(
                f"{row.place}: {place.trajectory_id} stands in the files before that",
                hint="Name one export of the run, once.",
            )
        samples.add(place.trajectory_id)
        return place.version

    def _check_fits(self, where: str, place: _Place) -> None:
        window, rollout = self._config.window, self._config.rollout
        if len(place.version_runs) > 1:
            raise RunError(f"{where}: {place.trajectory_id} mixes policy versions")
        if (place.staleness or 0) > window.max_staleness:
            raise RunError(
                f"{where}: {place.trajectory_id} was trained {place.staleness} versions late, "
                f"window.max_staleness = {window.max_staleness}",
                hint="Use the window with which the run was recorded.",
            )
        for name in _DISTRIBUTION if place.purpose == "train" else ():
            recorded, configured = place.sampling.get(name), getattr(rollout, name)
            if recorded != configured:
                raise RunError(
                    f"{where}: sampled with {name} = {recorded}, rollout.{name} = {configured}",
                    hint="The log-probabilities are those of the recorded distribution: set "
                    f"rollout.{name} = {recorded}.",
                )

    def _read(self, version: int) -> dict[str, list[Timed]]:
        read: dict[str, list[Timed]] = {
            each.group_id: [] for each in self.admissions if each.policy_version == version
        }
        for file in self._files[version]:
            for row in rows_of(file):
                if row.fields["version"] != version or row.fields["group_id"] not in read:
                    continue
                record = trajectory_of(row, self.name)
                self.without_chunks.add(record.trajectory_id)
                read[record.group_id].append(Timed(0.0, record))
        return read


def trajectory_of(row: FileRow, run: str) -> Trajectory:
    """The record that an exported row was made of, as one of `run`; UsageError, with the place, if
    the row contradicts itself."""
    fields = row.fields
    try:
        prompt, response = fields["prompt_token_ids"], fields["response_token_ids"]
        sampling = fields["sampling"]
        stops = tuple(sampling["stop_token_ids"])
        record = Trajectory(
            run=run,
            trajectory_id=fields["trajectory_id"],
            group_id=fields["group_id"],
            sample=fields["sample"],
            attempt=fields["attempt"],
            chunks=fields["chunks"],
            policy_version=fields["version"],
            ordinal=fields["ordinal"],
            purpose=fields["purpose"],
            token_ids=pack_tokens([*prompt, *response]),
            mask=bytes(len(prompt)) + np.asarray(fields["response_mask"], bool).tobytes(),
            logprobs=pack_logprobs([0.0] * len(prompt) + fields["response_logprobs"]),
            version_runs=tuple(
                VersionRun(each["version"], each["tokens"]) for each in fields["version_runs"]
            ),
            finish_reason=cast(Literal["stop", "length", "error"], fields["finish_reason"]),
            reward=fields["reward"],
            # JSON lines have null for a part that is no number.
            reward_parts={k: v for k, v in dict(fields["reward_parts"]).items() if v is not None},
            error=fields["error"],
            text=fields["text"],
            worker=fields["worker"],
            engine=fields["engine"],
            sampling=Sampling(**{**sampling, "stop_token_ids": stops}),
            started_ms=_ms(fields["started_at"]),
            generated_ms=_ms(fields["generated_at"]),
            created_ms=_ms(fields["created_at"]),
            resumed_tokens=fields["resumed_tokens"],
        )
        encode(record)  # or its types are found out in the middle of a transaction
    except (InvalidRecord, KeyError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{row.place}: no trajectory: {error}") from error
    return record


def _ms(value: Any) -> int:
    """Milliseconds of a time, which JSON lines hold as ISO 8601."""
    time = datetime.fromisoformat(value) if isinstance(value, str) else value
    return round(time.timestamp() * 1000)
