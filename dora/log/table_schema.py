"""The table of exported trajectories: its columns, and the directories of its versions."""

from pathlib import Path

import pyarrow as pa

VERSION_PREFIX = "version="
"""How the directory of a version is named; its number follows."""


_TIME = pa.timestamp("us", tz="UTC")


_VERSION_RUN = pa.struct(
    [
        pa.field("version", pa.int64(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
    ]
)


SAMPLING = pa.struct(
    [
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("top_p", pa.float64(), nullable=False),
        pa.field("top_k", pa.int32(), nullable=False),
        pa.field("max_new_tokens", pa.int32(), nullable=False),
        pa.field("stop_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("seed", pa.int64()),
    ]
)


SCHEMA = pa.schema(
    [
        pa.field("run", pa.string(), nullable=False),
        pa.field("version", pa.int32(), nullable=False),
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("ordinal", pa.int64(), nullable=False),
        pa.field("purpose", pa.string(), nullable=False),
        pa.field("state", pa.string(), nullable=False),
        pa.field("trained_step", pa.int32()),
        pa.field("staleness", pa.int32()),
        pa.field("set_aside_reason", pa.string()),
        pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("response_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("generated_tokens", pa.int32(), nullable=False),
        pa.field("text", pa.string()),
        pa.field("reward", pa.float64()),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("error", pa.string()),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("chunks", pa.int32(), nullable=False),
        pa.field("resumed_tokens", pa.int32(), nullable=False),
        pa.field("version_runs", pa.list_(_VERSION_RUN), nullable=False),
        pa.field("sampling", SAMPLING, nullable=False),
        pa.field("worker", pa.string(), nullable=False),
        pa.field("engine", pa.string(), nullable=False),
        pa.field("started_at", _TIME, nullable=False),
        pa.field("generated_at", _TIME, nullable=False),
        pa.field("created_at", _TIME, nullable=False),
        pa.field("kafka_partition", pa.int32(), nullable=False),
        pa.field("kafka_offset", pa.int64(), nullable=False),
    ]
)
"""One row per counted trajectory, of training and of evaluation.

`state` is `trained`, `set-aside` or `evaluation`; `trained_step` is the version that the step made,
`staleness` the versions between generation and training. The prompt ends before the first token
that the policy generated; the lists of the response have the same length, and `response_mask` tells
generated tokens from those of tools and environments, whose log-probabilities (nats) are 0.
"""


def exported_version(entry: Path) -> int | None:
    """The version whose directory `entry` is; None if it is not one."""
    text = entry.name.removeprefix(VERSION_PREFIX)
    ours = entry.name.startswith(VERSION_PREFIX) and text.isascii() and text.isdecimal()
    return int(text) if ours and text == str(int(text)) and entry.is_dir() else None
