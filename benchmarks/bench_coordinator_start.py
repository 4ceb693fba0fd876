"""Seconds from starting a coordinator process to its first word of being ready, on a long log.

Run by hand: `python benchmarks/bench_coordinator_start.py -b HOST:PORT [--records N] [--starts N]`.
A run is made up for it: ledger, policies, admissions, start commands, trajectories and statuses as
a run of that length leaves them, the window full and half finished. Its topics are deleted
afterwards.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from dora.bus.reader import END, LogReader
from dora.bus.settings import cluster_settings
from dora.bus.topics import RunTopics, TopicAdmin, topic_plan
from dora.bus.writer import LogWriter
from dora.config import Config
from dora.config.loading import KafkaOverrides, load_config
from dora.core.ring import partition, slot_partitions, worker_partition
from dora.schemas.records import (
    Admission,
    Command,
    GroupRef,
    Policy,
    RunStarted,
    SampleRef,
    Sampling,
    SlotOffset,
    Status,
    Step,
    Trajectory,
    VersionRun,
)

CONFIG = """\
run.name = "{run}"
policy.model = "none"
task = {{ kind = "reasoning-gym", name = "spell_backward" }}
window = {{ max_staleness = 2, groups_per_step = 8, group_size = 4 }}
trainer.steps = 1000000
rollout.engine = "emulated"
"""
SAMPLING = Sampling(1.0, 1.0, 0, 16, (2,))
READY_SECONDS = 60.0


class Writer:
    """Writes a run's records and knows how many lie in each partition."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.topics = RunTopics(config.run.name)
        self.writer = LogWriter(cluster_settings(config.kafka), client_id="bench")
        self.ends: dict[tuple[str, int], int] = {}
        self.count = 0

    def send(self, topic: str, record: object, index: int, key: str) -> int:
        """Write a record; returns its offset: there is no other writer."""
        self.writer.send(topic, record, key=key, partition=index)  # type: ignore[arg-type]
        self.count += 1
        offset = self.ends.get((topic, index), 0)
        self.ends[topic, index] = offset + 1
        return offset

    def policy(self, version: int) -> Policy:
        """A version with where it begins, taken before its step is written."""
        kafka, ring, topics = self.config.kafka, self.config.window.ring, self.topics
        places = [
            (topic, index)
            for topic in (topics.chunks, topics.trajectories)
            for index in slot_partitions(version, ring, kafka.lanes)
        ]
        places += [(topics.dispatch, index) for index in range(kafka.dispatch_partitions)]
        places.append((topics.steps, 0))
        slots = tuple(SlotOffset(*place, self.ends.get(place, 0)) for place in places)
        return Policy(
            self.config.run.name, version, "full", "file:///w", (), "c", b"", b"", slots, 0
        )

    def group(self, ordinal: int, version: int, finished: bool) -> GroupRef:
        """Admit a group and start its trajectories; finish them if asked."""
        run, kafka, size = self.config.run.name, self.config.kafka, self.config.window.group_size
        group, topics = f"g{ordinal}", self.topics
        self.send(
            topics.dispatch, Admission(run, group, ordinal, version, size, "train", 0), 0, group
        )
        index = partition(version, group, self.config.window.ring, kafka.lanes)
        samples = []
        for sample in range(size):
            worker, identity = f"w{sample}", f"{group}/{sample}"
            command = Command(
                run, worker, "i", "start", 0, trajectory_id=identity, group_id=group,
                sample=sample, policy_version=version, ordinal=ordinal,
            )  # fmt: skip
            to = worker_partition(worker, kafka.dispatch_partitions)
            self.send(topics.dispatch, command, to, worker)
            if finished:
                record = Trajectory(
                    run, identity, group, sample, 0, 1, version, ordinal, "train", bytes(40),
                    bytes(2) + b"\1" * 8, bytes(40), (VersionRun(version, 8),), "stop", 1.0, {},
                    None, "text", worker, "emulated", SAMPLING, 0, 0, 0,
                )  # fmt: skip
                offset = self.send(topics.trajectories, record, index, identity)
                samples.append(SampleRef(sample, 0, index, offset))
        return GroupRef(group, ordinal, version, tuple(samples))

    def run(self, records: int) -> None:
        """Fill the log with at least `records` records."""
        config, topics = self.config, self.topics
        window, run = config.window, config.run.name
        size = window.groups_per_step
        started = RunStarted(
            run, "id", "0", json.dumps(config.identity()), window.max_staleness, size,
            window.group_size, window.ring, config.kafka.lanes, "cluster", {}, 0,
        )  # fmt: skip
        self.send(topics.steps, started, 0, run)
        self.send(topics.policies, self.policy(0), 0, "0")
        version = 0
        while self.count < records:
            first = version * size
            refs = tuple(self.group(first + n, version, finished=True) for n in range(size))
            for worker in range(4):
                status = Status(run, f"w{worker}", "rollout", "i", "ready", 0, version=version)
                self.send(topics.workers, status, 0, f"w{worker}")
            step = Step(
                run, "step", version, version, version + 1, refs, (), {}, "c", None, "trainer", 0
            )
            policy = self.policy(version + 1)
            self.send(topics.steps, step, 0, run)
            version += 1
            self.send(topics.policies, policy, 0, str(version))
        for n in range(3 * size):
            self.group(version * size + n, version, finished=n % 2 == 0)
        self.writer.flush(120.0)
        self.writer.close()


def start(path: Path, address: str, config: Config) -> tuple[float, str]:
    """Start a coordinator, wait until it is ready, end it; seconds, and what it said."""
    with LogReader(cluster_settings(config.kafka), client_id="bench") as reader:
        reader.assign({(RunTopics(config.run.name).workers, 0): END})
        command = [sys.executable, "-m", "dora", "coordinator", str(path), "-b", address]
        begin = time.perf_counter()
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            while time.perf_counter() - begin < READY_SECONDS and process.poll() is None:
                for message in reader.poll(timeout=0.05):
                    value = message.value
                    if isinstance(value, Status) and (value.role, value.state) == (
                        "coordinator",
                        "ready",
                    ):
                        seconds = time.perf_counter() - begin
                        process.terminate()
                        _, said = process.communicate(timeout=60)
                        return seconds, next(
                            line for line in said.splitlines() if "rebuilt" in line
                        )
            process.kill()
            _, said = process.communicate()
            raise SystemExit(f"the coordinator did not become ready:\n{said}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-b", "--bootstrap-server", required=True)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--starts", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.toml"
        path.write_text(CONFIG.format(run=f"bench-{uuid.uuid4().hex[:8]}"))
        overrides = KafkaOverrides(options.bootstrap_server)
        config = load_config(path, sets=(), environment={}, kafka=overrides)
        with TopicAdmin(cluster_settings(config.kafka)) as admin:
            admin.create(topic_plan(config))
            try:
                writer = Writer(config)
                writer.run(options.records)
                print(f"{writer.count:,} records in the log")
                took = []
                for _ in range(options.starts):
                    seconds, said = start(path, options.bootstrap_server, config)
                    took.append(seconds)
                    print(f"{seconds:6.2f} s  {said}")
                print(f"median {statistics.median(took):.2f} s, worst {max(took):.2f} s")
            finally:
                admin.delete(config.run.name)


if __name__ == "__main__":
    main()
