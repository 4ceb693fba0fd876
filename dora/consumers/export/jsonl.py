"""The directory of JSON lines that a run is exported to.

Invariant: as for every directory (see `export_targets`). JSON lines have no metadata, so that a
version's offsets lie in a file beside it, which appears after it: a version without it counts as
not exported, and is replaced by the same lines.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dora.consumers.export.rows import TOKEN_COLUMNS, Source
from dora.consumers.export.targets import DirectoryTarget
from dora.log.table_schema import SCHEMA

_PLAIN = [name for name in SCHEMA.names if name not in TOKEN_COLUMNS]


class JsonlTarget(DirectoryTarget):
    """`version=N/trajectories.jsonl`, UTF-8: one object a line, named like the columns of `SCHEMA`.
    Times are ISO 8601 in UTC."""

    file_name = "trajectories.jsonl"
    sidecar = "_source.json"

    def fill(self, draft: Path, source: Source, batches: Iterator[pa.RecordBatch]) -> None:
        """A line per row."""
        with draft.open("w", encoding="utf-8") as file:
            for batch in batches:
                file.writelines(lines(batch))

    def source_of(self, file: Path) -> Source:
        """From the file beside it."""
        return Source.from_json(file.with_name(self.sidecar).read_bytes())


def lines(batch: pa.RecordBatch) -> Iterator[str]:
    """Each row of a batch of `SCHEMA` as a line of JSON."""
    plain = batch.select(_PLAIN).to_pylist()
    packed = [_joined(batch.column(name)) for name in TOKEN_COLUMNS]
    for row, *lists in zip(plain, *packed, strict=True):
        row["reward_parts"] = dict(row["reward_parts"])
        head = _object(row)
        tail = ", ".join(
            f'"{name}": [{text}]' for name, text in zip(TOKEN_COLUMNS, lists, strict=True)
        )
        yield f"{head[:-1]}, {tail}}}\n"


def _object(row: dict[str, Any]) -> str:
    """A row as JSON, which has no word for infinity and for what is no number: they become null."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, default=_time)
    except ValueError:
        return _object(json.loads(json.dumps(row, default=_time), parse_constant=lambda name: None))


def _joined(column: pa.ListArray) -> list[str]:
    """The values of each list, with commas between. Arrow writes a float32 with the fewest digits
    that give it back."""
    texts = pa.ListArray.from_arrays(column.offsets, column.values.cast(pa.string()))
    joined: list[str] = pc.binary_join(texts, ",").to_pylist()
    return joined


def _time(value: Any) -> str:
    """ISO 8601; the only values that `json` does not know are times."""
    text: str = value.isoformat()
    return text
