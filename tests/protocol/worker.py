"""A rollout worker as `dora.producers.worker.worker` behaves, without engine, clock or Kafka.

What it sends waits in an outbox per partition, each acknowledged on its own, so that a crash may
lose the end of any of them. A worker that is given no turns is frozen; when it gets turns again it
goes on with what it knew.
"""

import zlib
from collections import deque
from dataclasses import dataclass, field

from dora.core import ring
from dora.core.scheduling.workers import lease_name
from dora.producers.engines.base import Delta
from dora.producers.tasks.base import Prompt
from dora.producers.worker.attempt import Attempt
from dora.schemas.records import Command, Policy, ProcessState, Record, Sampling, Status
from tests.protocol.log import (
    CHUNKS,
    DISPATCH,
    HANDOVERS,
    POLICIES,
    RUN,
    STATUSES,
    TRAJECTORIES,
    Place,
    Reader,
    SimulatedLog,
)

STOP = 2
LONGEST = 6
CHUNK_TOKENS = 2
CAPACITY = 3
DISPATCH_PARTITIONS = 3
SAMPLING = Sampling(1.0, 1.0, 0, LONGEST, (STOP,))


@dataclass
class ModelWorker:
    log: SimulatedLog
    name: str
    incarnation: str
    max_staleness: int
    lanes: int
    many: bool = False  # hosts every live version at once
    state: ProcessState = "ready"
    version: int = -1
    versions: list[int] = field(default_factory=list)  # hosted, if many
    switch: int | None = None
    loading: bool = False
    stop_received: bool = False
    command_offset: int = -1
    attempts: dict[str, Attempt] = field(default_factory=dict)
    unconfirmed: list[str] = field(default_factory=list)
    outbox: dict[Place, deque[Record]] = field(default_factory=dict)
    newest: int = -1  # of the policies
    chunks_first: bool = True

    def __post_init__(self) -> None:
        index = ring.worker_partition(self.name, DISPATCH_PARTITIONS)
        self.place = (DISPATCH, index)
        self.reader = Reader(self.log, {self.place: self.log.end(self.place), POLICIES: 0})
        self.beat()

    def send(self, place: Place, record: Record) -> None:
        self.outbox.setdefault(place, deque()).append(record)

    def acknowledge(self, place: Place, count: int | None = None) -> None:
        """The broker takes the next records of a partition."""
        queue = self.outbox.get(place, deque())
        for _ in range(len(queue) if count is None else min(count, len(queue))):
            self.log.append(place, queue.popleft())

    def flush(self) -> None:
        for place in list(self.outbox):
            self.acknowledge(place)

    def take_commands(self, count: int | None = None) -> None:
        """Reads on; then starts to load a version if told so. Nothing is read while loading."""
        if self.loading:
            return
        for policy, _ in self.reader.read(POLICIES):
            assert isinstance(policy, Policy)
            self.newest = max(self.newest, policy.version)
        for command, offset in self.reader.read(self.place, count):
            if not isinstance(command, Command) or command.worker != self.name:
                continue
            self.command_offset = offset
            if command.incarnation != self.incarnation:
                continue
            match command.kind:
                case "start":
                    self.start(command)
                case "yield" | "move":
                    move = command.kind == "move"
                    self.hand_back(command.trajectory_id, command.attempt, move=move)
                case "switch":
                    self.switch = command.policy_version
                case "stop":
                    self.stop_received = True
        if self.switch is not None and not self.loading:
            self.begin_load()

    def start(self, command: Command) -> None:
        former = self.attempts.get(command.trajectory_id)
        if former is not None:
            if former.finish_reason is not None or former.command.attempt >= command.attempt:
                return
            self.hand_back(command.trajectory_id, former.command.attempt)
        if not self.hosts(command.policy_version):
            return
        prompt = Prompt(command.ordinal, "", (7,), {})
        attempt = Attempt(command, prompt, SAMPLING, self.name, 0)
        self.attempts[command.trajectory_id] = attempt
        if attempt.tokens and (attempt.tokens[-1] == STOP or len(attempt.tokens) >= LONGEST):
            self.extend(command.trajectory_id, 0, "stop")

    def hand_back(self, trajectory_id: str, number: int, *, move: bool = False) -> None:
        attempt = self.attempts.get(trajectory_id)
        if attempt is None or attempt.finish_reason or attempt.command.attempt != number:
            return
        self.send_chunk(attempt, last=True)
        if move:
            self.acknowledge(self.partition(CHUNKS, attempt))
            self.send(HANDOVERS, attempt.handover(0))
        del self.attempts[trajectory_id]

    def hosts(self, version: int) -> bool:
        return version in self.versions if self.many else version == self.version

    def hand_back_all(self) -> None:
        for trajectory_id, attempt in list(self.attempts.items()):
            self.hand_back(trajectory_id, attempt.command.attempt)

    def begin_load(self) -> None:
        if self.switch is None or (
            self.switch > self.newest and self.switch >= self.newest - self.max_staleness
        ):
            return
        if not self.many:
            self.hand_back_all()
        self.loading = True
        self.state = "loading"
        self.beat()

    def end_load(self) -> None:
        """The version is in the engine and passed the canary, or it has left the window."""
        if not self.loading:
            return
        self.loading = False
        switch, self.switch = self.switch, None
        if switch is not None and switch >= self.newest - self.max_staleness:
            self.version = switch
            if self.many:
                used = {attempt.command.policy_version for attempt in self.attempts.values()}
                oldest = self.newest - self.max_staleness
                kept = {v for v in self.versions if v >= oldest or v in used}
                self.versions = sorted(kept | {switch})
        self.state = "ready"
        self.beat()

    @property
    def generating(self) -> list[str]:
        """Attempts that may get tokens."""
        if self.loading:
            return []
        return [t for t, attempt in self.attempts.items() if attempt.finish_reason is None]

    @property
    def scoring(self) -> list[str]:
        """Attempts that wait for their reward."""
        if self.loading:
            return []
        return [
            t
            for t, attempt in self.attempts.items()
            if attempt.finish_reason is not None and t not in self.unconfirmed
        ]

    def extend(self, trajectory_id: str, tokens: int, end: str | None) -> None:
        """One engine step: some tokens, perhaps the last."""
        attempt = self.attempts[trajectory_id]
        assert self.hosts(attempt.command.policy_version), "tokens of another version"
        have = len(attempt.tokens)
        tokens = min(tokens, LONGEST - have)
        command = attempt.command
        made = [
            3 + zlib.crc32(f"{trajectory_id} {command.attempt} {have + n}".encode()) % 200
            for n in range(tokens)
        ]
        if end == "stop" and made:
            made[-1] = STOP
        reason = "length" if have + tokens >= LONGEST and end is None else end
        if end == "stop" and not (made or (have and attempt.tokens[-1] == STOP)):
            reason = "length" if have >= LONGEST else None
        logprobs = tuple(-token / 256 for token in made)
        delta = Delta(trajectory_id, tuple(made), logprobs, reason)  # type: ignore[arg-type]
        attempt.extend(delta, 0)
        self.send_chunk(attempt)
        if attempt.finish_reason == "error":
            self.finish(trajectory_id, None)

    def send_chunk(self, attempt: Attempt, *, last: bool = False) -> None:
        last = last or attempt.finish_reason is not None
        if last or attempt.unwritten >= CHUNK_TOKENS:
            self.send(self.partition(CHUNKS, attempt), attempt.chunk(0, last=last))

    def finish(self, trajectory_id: str, reward: float | None) -> None:
        """A response was scored."""
        attempt = self.attempts[trajectory_id]
        if self.chunks_first:
            self.flush()
        finished = attempt.trajectory(
            engine="model",
            reward=reward,
            parts={},
            error=None if reward is not None else "it failed",
            text=None,
            now_ms=0,
        )
        self.send(self.partition(TRAJECTORIES, attempt), finished)
        self.unconfirmed.append(trajectory_id)

    def partition(self, topic: str, attempt: Attempt) -> Place:
        command = attempt.command
        slots = self.max_staleness + 2
        index = ring.partition(command.policy_version, command.group_id, slots, self.lanes)
        return topic, index

    def beat(self) -> None:
        """Confirms what was written, then says what is in hand."""
        self.flush()
        for trajectory_id in self.unconfirmed:
            self.attempts.pop(trajectory_id, None)
        self.unconfirmed.clear()
        running = tuple(lease_name(t, a.command.attempt) for t, a in self.attempts.items())
        status = Status(
            RUN, self.name, "rollout", self.incarnation, self.state, 0, version=self.version,
            versions=tuple(self.versions), capacity=CAPACITY,
            loading=-1 if self.switch is None else self.switch,
            running=running, command_offset=self.command_offset,
        )  # fmt: skip
        self.log.append(STATUSES, status)

    def stop(self) -> None:
        """Ends as it was told."""
        self.hand_back_all()
        self.state = "stopped"
        self.beat()
