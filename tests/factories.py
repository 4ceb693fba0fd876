"""A small consistent run, record by record, for tests of what reads a run's log."""

import json
from collections.abc import Iterable, Mapping, Sequence

from dora.core import ring
from dora.schemas.records import (
    Admission,
    Chunk,
    GroupRef,
    Policy,
    Purpose,
    Record,
    RunStarted,
    SampleRef,
    Sampling,
    SlotOffset,
    Status,
    Step,
    Trajectory,
    VersionRun,
    pack_logprobs,
    pack_tokens,
)

K, B, G, LANES = 1, 2, 2, 1
RING = K + 2
SAMPLING = Sampling(1.0, 1.0, 0, 16, (2,))


def run_started(run: str = "r", *, at: int = 0) -> RunStarted:
    identity = json.dumps({"task": {"success_threshold": 0.5}})
    return RunStarted(run, "id", "0.1.0", identity, K, B, G, RING, LANES, "cluster", {}, at)


def policy(version: int, run: str = "r", slots: tuple[SlotOffset, ...] = ()) -> Policy:
    return Policy(run, version, "full", "file:///w", (), f"sum{version}", b"", b"", slots, 0)


def admission(ordinal: int, version: int, run: str = "r", purpose: Purpose = "train") -> Admission:
    group = ring.train_group_id(ordinal)
    if purpose == "eval":
        group = ring.eval_group_id(version, ordinal)
    size = G if purpose == "train" else 1
    return Admission(run, group, ordinal, version, size, purpose, 5_000 * version)


def trajectory(
    group: Admission,
    sample: int = 0,
    *,
    prompt: Sequence[int] = (7, 8),
    tokens: Sequence[int] = (1, 2, 3),
    reward: float | None = 1.0,
    at: int = 0,
    **fields: object,
) -> Trajectory:
    """A finished one: `prompt` and the generated `tokens`; `fields` replace what is made up."""
    values: dict[str, object] = {
        "run": group.run,
        "trajectory_id": ring.trajectory_id(group.group_id, sample),
        "group_id": group.group_id,
        "sample": sample,
        "attempt": 0,
        "chunks": 1,
        "policy_version": group.policy_version,
        "ordinal": group.ordinal,
        "purpose": group.purpose,
        "token_ids": pack_tokens([*prompt, *tokens]),
        "mask": bytes(len(prompt)) + b"\1" * len(tokens),
        "logprobs": pack_logprobs([0.0] * len(prompt) + [-1.0] * len(tokens)),
        "version_runs": (VersionRun(group.policy_version, len(tokens)),),
        "finish_reason": "stop" if reward is not None else "error",
        "reward": reward,
        "reward_parts": {},
        "error": None if reward is not None else "verifier timed out",
        "text": "nus\nsun",
        "worker": "w0",
        "engine": "emulated",
        "sampling": SAMPLING,
        "started_ms": at,
        "generated_ms": at,
        "created_ms": at,
    }
    return Trajectory(**values | fields)  # type: ignore[arg-type]


def chunk(of: Trajectory, sequence: int, begin: int, end: int, **fields: object) -> Chunk:
    """The generated tokens `begin` to `end` (exclusive) of a trajectory, whose prompt comes first;
    `fields` replace what is made up."""
    prompt = of.mask.count(0)
    held = slice(4 * (prompt + begin), 4 * (prompt + end))
    values: dict[str, object] = {
        "run": of.run,
        "trajectory_id": of.trajectory_id,
        "group_id": of.group_id,
        "sample": of.sample,
        "attempt": of.attempt,
        "sequence": sequence,
        "policy_version": of.policy_version,
        "ordinal": of.ordinal,
        "purpose": of.purpose,
        "position": begin,
        "token_ids": of.token_ids[held],
        "logprobs": of.logprobs[held],
        "last": False,
        "worker": of.worker,
        "sampling": of.sampling,
        "created_ms": of.created_ms,
    }
    return Chunk(**values | fields)  # type: ignore[arg-type]


def places_of(records: Iterable[Record]) -> dict[str, tuple[int, int]]:
    """Partition and offset of each trajectory, where a record's offset is its index."""
    return {
        record.trajectory_id: (0, offset)
        for offset, record in enumerate(records)
        if isinstance(record, Trajectory)
    }


def step(
    sequence: int,
    version: int,
    groups: list[Admission],
    places: Mapping[str, tuple[int, int]],
    *,
    at: int = 0,
    **metrics: float,
) -> Step:
    """The step that trains `groups`, whose trajectories lie at `places`."""
    refs = tuple(
        GroupRef(
            group.group_id,
            group.ordinal,
            group.policy_version,
            tuple(
                SampleRef(sample, 0, *places[ring.trajectory_id(group.group_id, sample)])
                for sample in range(group.group_size)
            ),
        )
        for group in groups
    )
    return Step(
        groups[0].run,
        "step",
        sequence,
        version,
        version + 1,
        refs,
        (),
        metrics,
        f"sum{version + 1}",
        None,
        "trainer",
        at,
    )


def status(
    process: str, state: str = "ready", *, run: str = "r", at: int = 0, **fields: object
) -> Status:
    role = process if process in ("coordinator", "trainer") else "rollout"
    return Status(run, process, role, "i", state, at, **fields)  # type: ignore[arg-type]
