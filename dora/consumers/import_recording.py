"""A run's groups as they were exported, to be served to another run's trainer.

Invariant: groups come with all their trajectories or not at all, in the order in which they can
have started: by version, evaluations first, then by prompt. Nothing of a trajectory is altered but
the run's name; its chunks are not in an export. Where a prompt is missing, what comes after it is
left out and counted, for a trainer could not tell that from loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from dora.config import Config
from dora.consumers.export_rows import SCHEMA
from dora.consumers.import_files import FileRow, columns_of, rows_of
from dora.consumers.replay_recording import Timed
from dora.core.identity import ends_early, schedule_of
from dora.core.ring import trajectory_id
from dora.errors import RunError, UsageError
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

_INDEXED = (
    "run",
    "trajectory_id",
    "group_id",
    "ordinal",
    "version",
    "purpose",
    "staleness",
    "version_runs",
    "sampling",
    "started_at",
)
_DISTRIBUTION = ("temperature", "top_p", "top_k")


@dataclass(slots=True)
class _Found:
    """A group as the files hold it."""

    ordinal: int
    version: int
    purpose: Purpose
    started_ms: int
    samples: set[str] = field(default_factory=set)


class FileRecording:
    """What `files`, an export to Parquet or JSON lines, hold of one run, for the run of `config`.

    UsageError if a file is no export or they are of several runs; RunError if the trajectories do
    not fit `config`: another group size, window or sampling, or a schedule that mixes versions.
    """

    def __init__(self, files: Sequence[Path], config: Config, identity: str) -> None:
        if schedule_of(identity) == "partial" or ends_early(identity):
            raise RunError(
                f"run {config.run.name} cannot be fed from files: its schedule is partial, or its "
                "steps follow a budget of tokens (window.tokens_per_step)"
            )
        self.name = config.run.name
        self.identity = identity
        self.source = ""
        self.without_chunks: set[str] = set()
        """All trajectories that were served: an export has no chunks."""
        self.left_out = 0
        """Groups that are not served, because they or prompts before them are not whole."""
        self._config = config
        self._files: dict[int, list[Path]] = {}
        self._groups: dict[int, dict[str, list[Timed]]] = {}
        self.steps = 0
        """Versions of the run that trained a group."""
        found = self._index(files)
        self.admissions = self._order(found)
        if not self.admissions:
            raise RunError(
                f"the files hold no group of run {self.source} that can be served: prompt 0 with "
                f"its {config.window.group_size} trajectories is not among them",
                hint="Export the run from its first version on, and name the whole directory.",
            )

    def records(self, group: Admission) -> list[Timed]:
        """The trajectories of a group; read from the files with all of its version."""
        version = group.policy_version
        if version not in self._groups:
            self._groups = {v: kept for v, kept in self._groups.items() if v >= version - 1}
            self._groups[version] = self._read(version)
        return self._groups[version].get(group.group_id, [])

    def _index(self, files: Sequence[Path]) -> dict[str, _Found]:
        found: dict[str, _Found] = {}
        for file in files:
            missing = [name for name in SCHEMA.names if name not in columns_of(file)]
            if missing and columns_of(file):
                raise UsageError(
                    f"{file} is no export of trajectories: it has no column {missing[0]}",
                    hint="--serve takes what `dora export --to parquet` or `--to jsonl` wrote.",
                )
            for row in rows_of(file, _INDEXED):
                self._take(row, found)
                mine = self._files.setdefault(row.fields["version"], [])
                if file not in mine:
                    mine.append(file)
        return found

    def _take(self, row: FileRow, found: dict[str, _Found]) -> None:
        fields, window = row.fields, self._config.window
        self.source = self.source or fields["run"]
        if fields["run"] != self.source:
            raise UsageError(
                f"{row.place}: of run {fields['run']}, but rows before it are of {self.source}",
                hint="Serve one run at a time.",
            )
        if len(fields["version_runs"]) > 1:
            raise RunError(f"{row.place}: {fields['trajectory_id']} mixes policy versions")
        if (fields["staleness"] or 0) > window.max_staleness:
            raise RunError(
                f"{row.place}: {fields['trajectory_id']} was trained {fields['staleness']} "
                f"versions late, window.max_staleness = {window.max_staleness}",
                hint="Use the window with which the run was recorded.",
            )
        rollout = self._config.rollout
        for name in _DISTRIBUTION if fields["purpose"] == "train" else ():
            recorded, configured = fields["sampling"][name], getattr(rollout, name)
            if recorded != configured:
                raise RunError(
                    f"{row.place}: sampled with {name} = {recorded}, rollout.{name} = {configured}",
                    hint="The log-probabilities are those of the recorded distribution: set "
                    f"rollout.{name} = {recorded}.",
                )
        if fields["staleness"] is not None:
            self.steps = max(self.steps, fields["version"] + fields["staleness"] + 1)
        group = found.setdefault(
            fields["group_id"],
            _Found(
                fields["ordinal"], fields["version"], fields["purpose"], _ms(fields["started_at"])
            ),
        )
        group.started_ms = min(group.started_ms, _ms(fields["started_at"]))
        group.samples.add(fields["trajectory_id"])

    def _order(self, found: dict[str, _Found]) -> list[Admission]:
        size, admissions = self._config.window.group_size, []
        ordinal, broken = 0, False
        ordered = sorted(
            found.items(), key=lambda item: (item[1].version, item[1].purpose, item[1].ordinal)
        )
        for name, group in ordered:
            samples = len(group.samples)
            if group.purpose == "train":
                whole = group.samples == {trajectory_id(name, index) for index in range(size)}
                if samples > size:
                    raise RunError(
                        f"group {name} has {samples} trajectories in the files, "
                        f"window.group_size = {size}",
                        hint="Use the group size with which the run was recorded.",
                    )
                broken = broken or not whole or group.ordinal != ordinal
                ordinal += 1
            if broken:
                self.left_out += 1
                continue
            admissions.append(
                Admission(
                    self.name, name, group.ordinal, group.version, samples, group.purpose,
                    group.started_ms,
                )
            )  # fmt: skip
        return admissions

    def _read(self, version: int) -> dict[str, list[Timed]]:
        begun = {
            each.group_id: each.created_ms
            for each in self.admissions
            if each.policy_version == version
        }
        read: dict[str, list[Timed]] = {name: [] for name in begun}
        for file in self._files.get(version, []):
            for row in rows_of(file):
                if row.fields["version"] != version or row.fields["group_id"] not in begun:
                    continue
                record = trajectory_of(row, self.name)
                self.without_chunks.add(record.trajectory_id)
                seconds = (record.created_ms - begun[record.group_id]) / 1000
                read[record.group_id].append(Timed(max(seconds, 0.0), record))
        return read


def trajectory_of(row: FileRow, run: str) -> Trajectory:
    """The record that an exported row was made of, as one of `run`; UsageError, with the place, if
    the row contradicts itself."""
    fields = row.fields
    try:
        prompt, response = fields["prompt_token_ids"], fields["response_token_ids"]
        sampling = fields["sampling"]
        stops = tuple(sampling["stop_token_ids"])
        return Trajectory(
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
            reward_parts=dict(fields["reward_parts"]),
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
    except (InvalidRecord, KeyError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{row.place}: no trajectory: {error}") from error


def _ms(value: Any) -> int:
    """Milliseconds of a time, which JSON lines hold as ISO 8601."""
    time = datetime.fromisoformat(value) if isinstance(value, str) else value
    return round(time.timestamp() * 1000)
