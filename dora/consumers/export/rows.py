"""Trajectories as rows of a table, in batches of Arrow, and where they come from.

A row follows from one counted trajectory and from what the ledger says of its group: the rows of a
closed version never change. What is not known is null. At most one batch is held in memory, without
the records that it was made of.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from dora.consumers.inspect.rows import Fate, Fates
from dora.log.run_log import Placed
from dora.log.table_schema import SAMPLING, SCHEMA
from dora.schemas.records import Admission, Trajectory

BATCH_ROWS, BATCH_BYTES = 1024, 32 * 2**20
"""A batch is given out when it has so many rows, or when its records hold so much."""

_FIRST_MS, _LAST_MS = -62_135_596_800_000, 253_402_300_799_999


@dataclass(frozen=True, slots=True)
class Source:
    """What a version in a target came from; the target keeps it as JSON, beside the rows.

    `ranges` are the offsets `[first, end)` of the version in each partition of `topic`, `groups` is
    how many groups had started under it and `outstanding` how many of them were neither trained nor
    set aside (of a run that was said to be over). `run_id` tells runs of the same name apart.
    """

    run: str
    run_id: str
    cluster_id: str
    topic: str
    version: int
    ranges: Mapping[int, tuple[int, int]]
    groups: int
    dora_version: str
    outstanding: int = 0

    def to_json(self) -> str:
        """One line; `from_json` reads it back."""
        return json.dumps(asdict(self) | {"ranges": {str(p): r for p, r in self.ranges.items()}})

    @classmethod
    def from_json(cls, text: str | bytes) -> "Source":
        """ValueError if `text` is no such JSON."""
        try:
            fields: dict[str, Any] = json.loads(text)
            ranges = {int(p): (int(a), int(b)) for p, (a, b) in fields.pop("ranges").items()}
            return cls(ranges=ranges, **fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no source of an export: {error}") from error


TOKEN_COLUMNS = (
    "prompt_token_ids", "response_token_ids", "response_logprobs", "response_mask",
)  # fmt: skip
"""Columns that are long lists of numbers."""

SOURCE_KEY = "dora.source"
"""Under this name targets keep the `Source` in file metadata and table properties."""

PARQUET_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    # Dictionaries of token ids and of numbers that never repeat take four times as long to write
    # and are no smaller. Splitting bytes puts the few bits that floats share beside each other.
    "use_dictionary": [name for name in SCHEMA.names if name not in TOKEN_COLUMNS],
    "column_encoding": {"response_logprobs.list.element": "BYTE_STREAM_SPLIT"},
}

_PLAIN = (
    "run",
    "trajectory_id",
    "group_id",
    "sample",
    "ordinal",
    "purpose",
    "generated_tokens",
    "text",
    "reward",
    "finish_reason",
    "error",
    "attempt",
    "chunks",
    "resumed_tokens",
    "worker",
    "engine",
)
"""Columns that are fields of the record, of the same name."""


def batches(
    trajectories: Iterable[Placed[Trajectory]],
    admissions: Mapping[str, Admission],
    fates: Fates,
) -> Iterator[pa.RecordBatch]:
    """Trajectories of groups in `admissions` as batches of `SCHEMA`."""
    pending: list[Placed[Trajectory]] = []
    size = 0

    def batch() -> pa.RecordBatch:
        groups = (admissions[each.record.group_id] for each in pending)
        made = batch_of(pending, list(map(fates.of, groups)))
        pending.clear()
        return made

    for placed in trajectories:
        pending.append(placed)
        record = placed.record
        size += len(record.token_ids) + len(record.logprobs) + len(record.mask)
        size += len(record.text or "")
        if len(pending) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield batch()
            size = 0
    if pending:
        yield batch()


def batch_of(placed: Sequence[Placed[Trajectory]], fates: Sequence[Fate]) -> pa.RecordBatch:
    """One batch of `SCHEMA`; `fates[i]` is that of the group of `placed[i]`."""
    records = [each.record for each in placed]
    # The index of the first generated token; a trajectory without one is all prompt.
    prompts = [n if (n := r.mask.find(1)) >= 0 else len(r.mask) for r in records]
    cut = list(zip(records, prompts, strict=True))
    columns: dict[str, Any] = {name: list(map(attrgetter(name), records)) for name in _PLAIN} | {
        "version": [r.policy_version for r in records],
        "state": [fate.state for fate in fates],
        "trained_step": [fate.step for fate in fates],
        "staleness": [fate.staleness for fate in fates],
        "set_aside_reason": [fate.reason for fate in fates],
        "prompt_token_ids": _lists([r.token_ids[: 4 * n] for r, n in cut], "<i4"),
        "response_token_ids": _lists([r.token_ids[4 * n :] for r, n in cut], "<i4"),
        "response_logprobs": _lists([r.logprobs[4 * n :] for r, n in cut], "<f4"),
        "response_mask": _lists([r.mask[n:] for r, n in cut], "?"),
        "reward_parts": [list(r.reward_parts.items()) for r in records],
        "version_runs": [
            [{"version": run.version, "tokens": run.tokens} for run in r.version_runs]
            for r in records
        ],
        "sampling": _struct([r.sampling for r in records], SAMPLING),
        "started_at": [_microseconds(r.started_ms) for r in records],
        "generated_at": [_microseconds(r.generated_ms) for r in records],
        "created_at": [_microseconds(r.created_ms) for r in records],
        "kafka_partition": [each.partition for each in placed],
        "kafka_offset": [each.offset for each in placed],
    }
    arrays = [
        column if isinstance(column := columns[field.name], pa.Array)
        else pa.array(column, field.type)
        for field in SCHEMA
    ]  # fmt: skip
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _microseconds(milliseconds: int) -> int:
    """A time outside the calendar's years 1 to 9999 becomes the nearest one inside."""
    return 1000 * max(_FIRST_MS, min(_LAST_MS, milliseconds))


def _struct(records: Sequence[Any], kind: pa.StructType) -> pa.StructArray:
    """Records whose attributes are called like the fields of `kind`."""
    columns = [pa.array(map(attrgetter(f.name), records), f.type) for f in kind]
    return pa.StructArray.from_arrays(columns, fields=list(kind))


def _lists(pieces: Sequence[bytes], kind: str) -> pa.ListArray:
    """Packed values as lists, without a Python object for each value."""
    values = np.frombuffer(b"".join(pieces), dtype=kind)
    ends = np.cumsum([0, *map(len, pieces)]) // values.itemsize
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(values))
