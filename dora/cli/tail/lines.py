"""Records as lines for people and as JSON for programs.

Every record type has both forms; JSON holds every field, with packed token ids and
log-probabilities as lists.
"""

import base64
import dataclasses
import json
import re
import time
from collections.abc import Callable
from typing import Any

from dora.bus.reader import Message, Unreadable
from dora.cli.console import visible
from dora.schemas.records import (
    Admission,
    Chunk,
    Command,
    DeadLetter,
    Policy,
    Record,
    RunStarted,
    Status,
    Step,
    Trajectory,
    unpack_logprobs,
    unpack_tokens,
)

_TEXT_CHARACTERS = 80


def version_of(record: Record | Unreadable) -> int | None:
    """The policy version that a record belongs to; None where it belongs to none."""
    match record:
        case Chunk() | Trajectory() | Command() | Admission():
            return record.policy_version
        case Policy() | Status():
            return record.version
        case Step():
            return record.version_out
    return None


def as_line(message: Message) -> str:
    """A message on one line."""
    moment = time.strftime("%H:%M:%S", time.localtime(message.timestamp_ms / 1000))
    place = f"{message.partition}@{message.offset}"
    return f"{moment}  {place:>8}  {visible(_describe(message.value), newlines=False)}"


def as_object(message: Message) -> dict[str, Any]:
    """A message as JSON-able values."""
    value = message.value
    return {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "key": message.key,
        "timestamp_ms": message.timestamp_ms,
        "headers": _headers(message),
        "type": type(value).__name__,
        "record": _jsonable(dataclasses.asdict(value)),
    }


def formatted(message: Message, form: str) -> str:
    """`form` with what kcat's tokens stand for in it: %t, %p, %o, %k, %T, %h, %s, %%; and \\n,
    \\t."""
    record = _jsonable(dataclasses.asdict(message.value))
    told: dict[str, Callable[[], str]] = {
        "%t": lambda: message.topic,
        "%p": lambda: str(message.partition),
        "%o": lambda: str(message.offset),
        "%k": lambda: message.key or "",
        "%T": lambda: str(message.timestamp_ms),
        "%h": lambda: ",".join(f"{k}={v}" for k, v in _headers(message).items()),
        "%s": lambda: json.dumps(record),
        "%%": lambda: "%",
        "\\n": lambda: "\n",
        "\\t": lambda: "\t",
    }
    return re.sub(r"%[tpokThs%]|\\[nt]", lambda found: told[found[0]](), form)


def _headers(message: Message) -> dict[str, str]:
    return {name: value.decode(errors="replace") for name, value in message.headers.items()}


def _describe(value: Record | Unreadable) -> str:
    match value:
        case Chunk():
            last = "  last" if value.last else ""
            return (
                f"chunk {value.trajectory_id}#{value.attempt}  v{value.policy_version}  "
                f"seq {value.sequence}  +{len(value.token_ids) // 4} tokens at {value.position}  "
                f"{value.worker}{last}"
            )
        case Trajectory():
            reward = "none" if value.reward is None else f"{value.reward:g}"
            line = (
                f"trajectory {value.trajectory_id}#{value.attempt}  v{value.policy_version}  "
                f"{value.finish_reason}  {value.generated_tokens} tokens  reward {reward}  "
                f"{value.worker}"
            )
            if value.error:
                line += f"  error: {_one_line(value.error)}"
            return f"{line}  {_one_line(value.text)!r}" if value.text else line
        case RunStarted():
            return (
                f"run started {value.run_id}  K={value.max_staleness} B={value.groups_per_step} "
                f"G={value.group_size}  ring {value.ring} x {value.lanes} lanes  "
                f"cluster {value.cluster_id}"
            )
        case Step():
            return _step(value)
        case Policy():
            size = sum(file.size for file in value.files) / 2**20
            return (
                f"policy v{value.version}  {value.kind}  {len(value.files)} files, {size:.1f} MiB  "
                f"{value.weights_checksum[:16]}  {value.weights_uri}"
            )
        case Status():
            load = f"  {len(value.running)}/{value.capacity}" if value.capacity else ""
            version = f"  v{value.version}" if value.version >= 0 else ""
            message = f"  {_one_line(value.message)}" if value.message else ""
            return f"{value.process} {value.state}{version}{load}{message}"
        case Admission():
            return (
                f"admit {value.group_id}  v{value.policy_version}  ordinal {value.ordinal}  "
                f"x{value.group_size}  {value.purpose}"
            )
        case Command():
            return _command(value)
        case DeadLetter():
            about = f"  about {value.trajectory_id}" if value.trajectory_id else ""
            where = f"  {value.topic}[{value.partition}]@{value.offset}" if value.topic else ""
            return f"{value.code}: {_one_line(value.reason)}{about}{where}  from {value.process}"
        case Unreadable():
            return f"unreadable ({value.code}): {_one_line(value.reason)}"
    raise AssertionError(value)


def _step(step: Step) -> str:
    what = (
        f"step {step.version_in} → {step.version_out}"
        if step.kind == "step"
        else f"set aside at version {step.version_in}"
    )
    line = f"{what}  trained {len(step.trained)} groups, set aside {len(step.set_aside)}"
    for name in ("success_rate", "reward_mean", "loss", "staleness_mean", "staleness_max"):
        if name in step.metrics:
            line += f"  {name} {step.metrics[name]:.4g}"
    return line


def _command(command: Command) -> str:
    head = f"{command.kind} → {command.worker}"
    if command.kind in ("start", "yield"):
        head += f"  {command.trajectory_id}#{command.attempt}"
    if command.policy_version >= 0:
        head += f"  v{command.policy_version}"
    if command.prefix_token_ids:
        head += f"  from {len(command.prefix_token_ids) // 4} tokens on"
    return f"{head}  ({command.reason})" if command.reason else head


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _TEXT_CHARACTERS else flat[: _TEXT_CHARACTERS - 1] + "…"


def _jsonable(value: Any, name: str = "") -> Any:
    match value:
        case dict():
            return {key: _jsonable(each, key) for key, each in value.items()}
        case list() | tuple():
            return [_jsonable(each) for each in value]
        case bytes() if name.endswith("token_ids"):
            return unpack_tokens(value).tolist()
        case bytes() if name.endswith("logprobs"):
            return unpack_logprobs(value).tolist()
        case bytes() if name == "mask":
            return list(value)
        case bytes():
            return base64.b64encode(value).decode()
    return value
