"""How long scheduling decisions take: what a coordinator does for one event, at many workers.

    python benchmarks/bench_placement.py --workers 10000 --slots 256

A cluster of that size is filled and brought to a steady state (trajectories finish, new ones start,
statuses come, versions change, workers go), and each event is timed with the decision that follows
it: `take`, `decide` and `committed`, with the records made in between left out. Where one event
leads to several decisions (starts, moves, switches), its time is divided by one more than their
number. Processor time of one thread; nothing is sent anywhere.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections import defaultdict

from dora.core.ring import trajectory_id
from dora.core.scheduling.coordination import Coordination
from dora.core.scheduling.prefixes import Prefix
from dora.core.scheduling.scheduler import Decision, Rules
from dora.core.scheduling.schedules import Schedule
from dora.core.scheduling.workers import lease_name
from dora.core.window import Window
from dora.schemas.records import (
    Admission,
    Chunk,
    Command,
    GroupRef,
    Record,
    RunStarted,
    SampleRef,
    Sampling,
    Status,
    Step,
    Trajectory,
)

SAMPLING = Sampling(1.0, 1.0, 0, 1, ())
GROUP = 16


class Cluster:
    """A coordination and what its workers run."""

    def __init__(self, workers: int, slots: int) -> None:
        self.slots = slots
        self.batch = max(1, workers * slots // GROUP)
        rules = Rules(
            Window(3, self.batch), GROUP, 1_000_000, heartbeat_timeout=60.0, schedule=Schedule()
        )
        self.core = Coordination(rules, "me")
        self.now = 0.0
        self.spent: dict[str, list[float]] = defaultdict(list)
        self.running: dict[str, dict[str, Command]] = {f"w{i}": {} for i in range(workers)}
        self.version = dict.fromkeys(self.running, -1)
        self.groups: dict[str, tuple[Admission, set[int]]] = {}
        self.ready: list[Admission] = []
        self.steps = 0
        self.offset = 0
        self.core.handle(RunStarted("r", "", "", "", 3, 1, GROUP, 5, 1, "", {}, 0), 0, 0, now=0.0)

    def event(self, kind: str, *records: Record) -> None:
        """Takes records, decides, commits; the workers carry out commands at once."""
        self.now += 0.001
        began = time.thread_time()
        for record in records:
            self.offset += 1
            self.core.handle(record, 0, self.offset, now=self.now)
        decision = self.core.decide(self.now)
        spent = time.thread_time() - began
        made = self.records(decision)
        began = time.thread_time()
        self.core.committed(decision, made, self.now)
        count = 1 + len(decision.plan.starts) + len(decision.moves) + len(decision.plan.switches)
        self.spent[kind].append((spent + time.thread_time() - began) / count)
        handovers = []
        for record in made:
            match record:
                case Admission():
                    self.groups[record.group_id] = record, set()
                case Command(kind="start"):
                    self.running[record.worker][record.trajectory_id] = record
                case Command(kind="switch"):
                    self.version[record.worker] = record.policy_version
                    self.event("status", self.status(record.worker))
                case Command(kind="move"):
                    start = self.running[record.worker].pop(record.trajectory_id, None)
                    if start is not None:
                        handovers.append(start)
        for start in handovers:
            self.event("handover", _whole(start))
        for identity in list(self.core.scans):
            self.core.scanned(identity, Prefix())

    def records(self, decision: Decision) -> list[Record]:
        made: list[Record] = [
            Admission("r", a.group_id, a.ordinal, a.version, GROUP, "train", 0)
            for a in decision.plan.admissions
        ]
        for each in decision.moves:
            made.append(
                Command(
                    "r", each.worker.process, each.worker.incarnation, "move", 0,
                    trajectory_id=each.trajectory_id, attempt=each.attempt,
                )
            )  # fmt: skip
        for switch in decision.plan.switches:
            name = switch.worker
            made.append(Command("r", name, name, "switch", 0, policy_version=switch.version))
        for start in decision.plan.starts:
            work, name = start.work, start.worker
            made.append(
                Command(
                    "r", name, name, "start", 0, trajectory_id(work.group_id, work.sample),
                    work.group_id, work.sample, work.attempt, work.version, work.ordinal,
                )
            )  # fmt: skip
        return made

    def status(self, name: str, state: str = "ready") -> Status:
        running = tuple(lease_name(i, c.attempt) for i, c in self.running[name].items())
        return Status(
            "r", name, "rollout", name, state, 0, version=self.version[name],  # type: ignore[arg-type]
            capacity=self.slots, running=running,
            metrics={"tokens_per_second": 20.0 * len(running), "kv_used_share": 0.5},
        )  # fmt: skip

    def finish(self, name: str, identity: str) -> None:
        start = self.running[name].pop(identity)
        group, done = self.groups[start.group_id]
        done.add(start.sample)
        if len(done) == GROUP:
            del self.groups[start.group_id]
            self.ready.append(group)
        self.event(
            "trajectory",
            Trajectory(
                "r", identity, start.group_id, start.sample, start.attempt, 0,
                start.policy_version, start.ordinal, "train", b"", b"", b"", (), "stop", 1.0, {},
                None, None, name, "none", SAMPLING, 0, 0, 0,
            ),
        )  # fmt: skip

    def step(self) -> None:
        """The next version: the oldest finished groups were trained."""
        batch, self.ready = self.ready[: self.batch], self.ready[self.batch :]
        trained = tuple(
            GroupRef(g.group_id, g.ordinal, g.policy_version,
                     tuple(SampleRef(n, 0, 0, 0) for n in range(GROUP)), None)
            for g in batch
        )  # fmt: skip
        newest = self.core.state.newest
        record = Step(
            "r", "step", self.steps, newest, newest + 1, trained, (), {}, "", None, "t", 0
        )
        self.steps += 1
        self.event("step", record)


def _whole(start: Command) -> Chunk:
    return Chunk(
        "r", start.trajectory_id, start.group_id, start.sample, start.attempt, 0,
        start.policy_version, start.ordinal, "train", 0, b"", b"", True, start.worker, SAMPLING, 0,
    )  # fmt: skip


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    random.seed(1)
    cluster = Cluster(options.workers, options.slots)
    began = time.thread_time()
    for name in list(cluster.running):
        cluster.event("join", cluster.status(name))
    while True:
        before = cluster.core.state.next_ordinal
        cluster.event("tick")
        if cluster.core.state.next_ordinal == before:
            break
    filled = sum(map(len, cluster.running.values()))
    print(f"{filled} trajectories on {options.workers} workers after "
          f"{time.thread_time() - began:.1f} s")  # fmt: skip
    cluster.spent.clear()
    gc.collect()
    gc.freeze()
    names = list(cluster.running)
    for number in range(options.events):
        name = random.choice(names)
        if number % 10 == 0:
            cluster.event("status", cluster.status(name))
        elif number % (options.events // 4) == 1:
            cluster.step()
        elif number % (options.events // 5) == 2:
            gone = cluster.status(name, "failed")
            cluster.running[name].clear()
            names.remove(name)
            cluster.event("worker lost", gone)
        elif cluster.running[name]:
            cluster.finish(name, next(iter(cluster.running[name])))
        cluster.event("tick")
    report = {}
    print(f"{'event':12} {'count':>7} {'mean':>9} {'median':>9} {'99 %':>9} {'worst':>9}   ms")
    for kind, seconds in sorted(cluster.spent.items()):
        ordered = sorted(1000 * each for each in seconds)
        row = {
            "count": len(ordered),
            "mean_ms": statistics.fmean(ordered),
            "median_ms": statistics.median(ordered),
            "p99_ms": ordered[int(0.99 * (len(ordered) - 1))],
            "worst_ms": ordered[-1],
        }
        report[kind] = row
        print(f"{kind:12} {row['count']:7d} {row['mean_ms']:9.4f} {row['median_ms']:9.4f} "
              f"{row['p99_ms']:9.4f} {row['worst_ms']:9.4f}")  # fmt: skip
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"workers": options.workers, "slots": options.slots, **report}, file)


if __name__ == "__main__":
    main()
