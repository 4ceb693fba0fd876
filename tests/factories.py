"""Records as a small run has them. Every keyword replaces a value that is made up otherwise."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dora.core import ring
from dora.schemas.records import (
    Admission,
    Chunk,
    Command,
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


def sampling(**changes: object) -> Sampling:
    """From the whole distribution, with no stop token, but for `changes`."""
    return replace(Sampling(1.0, 1.0, 0, 16, ()), **changes)  # type: ignore[arg-type]


def run_started(run: str = "r", *, at: int = 0, **fields: object) -> RunStarted:
    identity = json.dumps({"task": {"success_threshold": 0.5}})
    made = RunStarted(run, "id", "0.1.0", identity, K, B, G, RING, LANES, "cluster", {}, at)
    return replace(made, **fields)  # type: ignore[arg-type]


def policy(
    version: int, run: str = "r", slots: Iterable[SlotOffset] = (), *, at: int = 0, **fields: object
) -> Policy:
    made = Policy(
        run, version, "full", "file:///w", (), f"sum{version}", b"", b"", tuple(slots), at
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def admission(
    ordinal: int, version: int = 0, run: str = "r", purpose: Purpose = "train", **fields: object
) -> Admission:
    group = ring.train_group_id(ordinal)
    if purpose == "eval":
        group = ring.eval_group_id(version, ordinal)
    size = G if purpose == "train" else 1
    made = Admission(run, group, ordinal, version, size, purpose, 5_000 * version)
    return replace(made, **fields)  # type: ignore[arg-type]


def command(
    trajectory_id: str,
    worker: str = "w0",
    *,
    kind: str = "start",
    run: str = "r",
    at: int = 0,
    **fields: object,
) -> Command:
    """What the coordinator orders about a trajectory."""
    group, _, sample = trajectory_id.rpartition("/")
    values: dict[str, object] = {
        "trajectory_id": trajectory_id,
        "group_id": group,
        "sample": int(sample),
    }
    return Command(run, worker, "i", kind, at, **values | fields)  # type: ignore[arg-type]


def trajectory(
    group: Admission,
    sample: int = 0,
    *,
    prompt: Sequence[int] = (7, 8),
    tokens: Sequence[int] = (1, 2, 3),
    logprob: float = -1.0,
    reward: float | None = 1.0,
    at: int = 0,
    **fields: object,
) -> Trajectory:
    """A finished one: `prompt` and the generated `tokens`, each with `logprob`."""
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
        "logprobs": pack_logprobs([0.0] * len(prompt) + [logprob] * len(tokens)),
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
    """The generated tokens `begin` to `end` (exclusive) of a trajectory, whose prompt comes
    first."""
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


def chunk_of(
    group: Admission,
    sample: int,
    sequence: int,
    position: int,
    tokens: Sequence[int],
    *,
    attempt: int = 0,
    **fields: object,
) -> Chunk:
    """The `tokens` that an attempt on worker `w<attempt>` generated from `position` on."""
    whole = trajectory(group, sample, prompt=(), tokens=tokens)
    held = {"attempt": attempt, "position": position, "worker": f"w{attempt}"}
    return chunk(whole, sequence, 0, len(tokens), **held | fields)


def places_of(records: Iterable[Record]) -> dict[str, tuple[int, int]]:
    """Partition and offset of each trajectory, where a record's offset is its index."""
    return {
        record.trajectory_id: (0, offset)
        for offset, record in enumerate(records)
        if isinstance(record, Trajectory)
    }


def group_ref(
    group: Admission,
    places: Mapping[str, tuple[int, int]] | None = None,
    reason: str | None = None,
    **fields: object,
) -> GroupRef:
    """How a step names a group whose trajectories lie at `places`; at (0, 0) without."""
    ids = {n: ring.trajectory_id(group.group_id, n) for n in range(group.group_size)}
    samples = tuple(
        SampleRef(n, 0, *((0, 0) if places is None else places[identity]))
        for n, identity in ids.items()
    )
    made = GroupRef(group.group_id, group.ordinal, group.policy_version, samples, reason)
    return replace(made, **fields)  # type: ignore[arg-type]


def step(
    sequence: int,
    version: int,
    groups: Iterable[Admission | GroupRef] = (),
    places: Mapping[str, tuple[int, int]] | None = None,
    *,
    run: str | None = None,
    at: int = 0,
    aside: Iterable[Admission | GroupRef] = (),
    **metrics: float,
) -> Step:
    """The step that trains `groups`, whose trajectories lie at `places`, and sets some `aside`."""
    groups = tuple(groups)
    if run is None:
        run = next((g.run for g in groups if isinstance(g, Admission)), "r")
    trained, set_aside = (
        tuple(g if isinstance(g, GroupRef) else group_ref(g, places) for g in part)
        for part in (groups, aside)
    )
    return Step(
        run, "step", sequence, version, version + 1, trained, set_aside, metrics,
        f"sum{version + 1}", None, "trainer", at,
    )  # fmt: skip


def status(
    process: str, state: str = "ready", *, run: str = "r", at: int = 0, **fields: object
) -> Status:
    role = process if process in ("coordinator", "trainer") else "rollout"
    return Status(run, process, role, "i", state, at, **fields)  # type: ignore[arg-type]
