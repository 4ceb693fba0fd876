"""What a run waits for, trajectory by trajectory.

A wait names version, group and sample, and who is expected to act. It is computed from
what was read of the log and a given time, so that everybody who looks sees the same.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dora.core.groups import Group
from dora.core.processes import PATIENT
from dora.core.ring import trajectory_id
from dora.core.state import RunState
from dora.core.window import Blocked, enough, pick_batch
from dora.log.presence import ProcessView
from dora.schemas.records import Chunk, Command

SHOWN = 5
"""Trajectories that are explained at most."""

WaitState = Literal["generating", "scoring", "sent", "silent", "unplaced"]


@dataclass(frozen=True, slots=True)
class Progress:
    """The newest chunk of a trajectory; `last` says that its generation has ended."""

    worker: str
    attempt: int
    sequence: int
    created_ms: int
    last: bool

    @classmethod
    def of(cls, chunk: Chunk) -> "Progress":
        """The progress that a chunk shows."""
        return cls(chunk.worker, chunk.attempt, chunk.sequence, chunk.created_ms, chunk.last)

    @property
    def order(self) -> tuple[int, int]:
        """Newer progress of a trajectory has a larger one."""
        return self.attempt, self.sequence


@dataclass(frozen=True, slots=True)
class Sent:
    """The newest start command of a trajectory, at `offset` of its worker's partition."""

    worker: str
    incarnation: str
    attempt: int
    version: int
    offset: int
    created_ms: int

    @classmethod
    def of(cls, command: Command, offset: int) -> "Sent":
        """What a start command says."""
        return cls(
            command.worker,
            command.incarnation,
            command.attempt,
            command.policy_version,
            offset,
            command.created_ms,
        )


@dataclass(frozen=True, slots=True)
class Wait:
    """A trajectory that the run waits for. `seconds_without_chunk` counts from the start of the
    attempt where it has no chunk, and is None where nothing is known of it. `attempt` is the newest
    one, -1 before the first."""

    version: int
    group: str
    sample: int
    purpose: str
    worker: str | None
    attempt: int
    seconds_without_chunk: float | None
    state: WaitState
    detail: str = ""

    @property
    def stuck_seconds(self) -> float:
        """For how long nothing has come of it although a worker should generate; scoring has a
        time limit of its own."""
        return 0.0 if self.state == "scoring" else self.seconds_without_chunk or 0.0

    @property
    def text(self) -> str:
        """The wait for people."""
        head = f"version {self.version} waits for group {self.group}, sample {self.sample}, "
        if self.purpose == "eval":
            head = f"the evaluation of {head}"
        quiet = self.seconds_without_chunk
        since = "" if quiet is None else f"{quiet:.0f} s"
        attempt = f"(attempt {self.attempt})"
        match self.state:
            case "generating":
                return f"{head}on worker {self.worker}, {since} without a chunk {attempt}"
            case "scoring":
                return f"{head}being scored on worker {self.worker} for {since} {attempt}"
            case "sent":
                return f"{head}sent to worker {self.worker} {since} ago, not taken up {attempt}"
            case "silent":
                said = f"{head}on worker {self.worker}, {self.detail}"
                return f"{said}, {since} without a chunk {attempt}" if since else said
            case "unplaced":
                said = f"{head}which no worker holds: {self.detail}"
                last = "no attempt yet" if self.attempt < 0 else f"after attempt {self.attempt}"
                return f"{said}; {since} without a chunk ({last})" if since else said


def blocking(state: RunState, *, trained: bool = False) -> list[tuple[Group, int]]:
    """Groups and samples that hold the next batch up, oldest version first; empty if a batch can be
    taken now. Where no training group is unfinished or all steps are `trained`: what the evaluation
    waits for."""
    if state.newest < 0:
        return []
    every = [(group, sample) for group, missing in state.unfinished() for sample in missing]
    unfinished = [(group, sample) for group, sample in every if group.purpose == "train"]
    if trained or not unfinished:
        return [(group, sample) for group, sample in every if group.purpose == "eval"]
    try:
        picked = pick_batch(
            state.window,
            state.newest,
            [group.candidate for group in state.complete_groups()],
            state.outstanding,
            state.known_to,
        )
    except ValueError:
        return unfinished  # a log that contradicts itself is the audit's to explain
    if not isinstance(picked, Blocked):
        return []
    if picked.version is None:
        return unfinished
    return [(group, sample) for group, sample in unfinished if group.version <= picked.version]


def explain(
    waiting: Sequence[tuple[Group, int]],
    *,
    time_ms: int,
    holders: Mapping[str, tuple[str, int]],
    sent: Mapping[str, Sent],
    progress_of: Mapping[str, Progress],
    admitted_ms: Mapping[str, int],
    processes: Collection[ProcessView],
) -> tuple[Wait, ...]:
    """At most SHOWN waits: those without a worker first, then in the given order.

    `holders` are worker and attempt by trajectory, as the workers themselves say.
    """
    named = {process.process: process for process in processes}
    waits = []
    for group, sample in waiting:
        identity = trajectory_id(group.group_id, sample)
        last = sent.get(identity)
        waits.append(
            _explain(
                group,
                sample,
                time_ms=time_ms,
                holder=holders.get(identity) or _taking_up(last, named),
                held=identity in holders,
                sent=last,
                progress=progress_of.get(identity),
                admitted_ms=admitted_ms.get(group.group_id),
                processes=named,
            )
        )
    waits.sort(key=lambda wait: wait.state not in ("silent", "unplaced", "sent"))
    return tuple(waits[:SHOWN])


def slow_verifier(processes: Collection[ProcessView]) -> str | None:
    """What to say where the trainer waits and most responses at work are generated and wait for
    their score; None where that is not so."""
    if not any(p.role == "trainer" and p.alive and p.state == "waiting" for p in processes):
        return None
    workers = [p for p in processes if p.role == "rollout" and p.alive]
    scoring = {p.process: int(p.metrics.get("scoring", 0.0)) for p in workers}
    total, running = sum(scoring.values()), sum(p.running for p in workers)
    if not total or 2 * total <= running:
        return None
    where = ", ".join(f"{name}: {count}" for name, count in scoring.items() if count)
    return (
        f"the trainer waits for the verifier: {total} of {running} responses at work are being "
        f"scored or wait for it ({where}); more task.verifier_processes, or a faster verifier"
    )


def starved(state: RunState, processes: Collection[ProcessView]) -> str | None:
    """Why no group is at work although the next batch lacks some; None where that is not so."""
    pool = [group.candidate for group in state.complete_groups()]
    if state.newest < 0 or state.unfinished() or enough(state.window, pool) is not None:
        return None
    short = state.window.groups_per_step - len(pool)
    more = f"{short} more {'group' if short == 1 else 'groups'}"
    if state.window.tokens_per_step is not None:
        more = "more groups"
    hosts = [p.process for p in processes if _hosts(p, state.newest)]
    why = f"{', '.join(hosts)} could take them" if hosts else _no_host(state.newest, processes)
    return f"version {state.newest} waits for the coordinator to start {more}: {why}"


def _taking_up(last: Sent | None, named: Mapping[str, ProcessView]) -> tuple[str, int] | None:
    """The worker whose command is not carried out yet; one that was, by a worker that does not
    name the attempt any more, was handed back."""
    if last is None:
        return None
    process = named.get(last.worker)
    if process is None or process.incarnation != last.incarnation:
        return None
    return (last.worker, last.attempt) if last.offset > process.command_offset else None


def _explain(
    group: Group,
    sample: int,
    *,
    time_ms: int,
    holder: tuple[str, int] | None,
    held: bool,
    sent: Sent | None,
    progress: Progress | None,
    admitted_ms: int | None,
    processes: Mapping[str, ProcessView],
) -> Wait:
    worker, attempt = holder if holder is not None else (None, _last_attempt(sent, progress))
    since = admitted_ms
    if sent is not None and (holder is None or sent.attempt == attempt):
        since = max(since or 0, sent.created_ms)
    if progress is not None and (holder is None or progress.attempt == attempt):
        since = max(since or 0, progress.created_ms)
    quiet = None if since is None else max(0.0, (time_ms - since) / 1000)
    process = None if worker is None else processes.get(worker)
    state: WaitState = "generating" if held else "sent"
    detail = ""
    if process is None or process.ended:
        state, detail = "unplaced", _why_unplaced(group.version, process, processes.values())
        worker = None
    elif process.silent:
        state, detail = "silent", f"silent for {process.age_seconds:.0f} s"
    elif held and progress is not None and progress.last and progress.attempt == attempt:
        state = "scoring"
    return Wait(
        group.version, group.group_id, sample, group.purpose, worker, attempt, quiet, state, detail
    )


def _last_attempt(sent: Sent | None, progress: Progress | None) -> int:
    return max(
        sent.attempt if sent is not None else -1, progress.attempt if progress is not None else -1
    )


def _why_unplaced(
    version: int, process: ProcessView | None, processes: Collection[ProcessView]
) -> str:
    coordinators = [p for p in processes if p.role == "coordinator"]
    lost = f"{process.process} has {process.state}, " if process is not None else ""
    if not any(p.alive for p in coordinators):
        said = [f"the coordinator is silent for {p.age_seconds:.0f} s" for p in coordinators]
        if coordinators and coordinators[0].ended:
            said = [f"the coordinator has {coordinators[0].state}"]
        return lost + (said[0] if said else "no coordinator has reported")
    if not any(_hosts(p, version) for p in processes):
        return lost + _no_host(version, processes)
    return f"{lost}the coordinator has not placed it yet"


def _hosts(process: ProcessView, version: int) -> bool:
    ready = process.role == "rollout" and process.alive and process.state == "ready"
    return ready and process.version == version


def _no_host(version: int, processes: Collection[ProcessView]) -> str:
    busy = [
        f"{p.process}: {p.message or p.state}"
        for p in processes
        if p.role == "rollout" and p.alive and p.state in PATIENT
    ]
    return f"no worker hosts version {version}" + (f" ({', '.join(busy)})" if busy else "")
