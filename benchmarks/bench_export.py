"""Speed of `dora export` against plain consumption of the same topic.

Run by hand: `python benchmarks/bench_export.py`. It writes a run's log into a Kafka of its own (or
`-b HOST:PORT`) and then, several times in turn, reads its trajectories with a bare client, with
dora's reader, which decodes and checks them, and exports them to each format. Steps are of
thousands of samples, as in training at scale, so that a version is several batches. Token ids and
log-probabilities are random, so that nothing compresses better than a model's would. CPU seconds
are this process's, all threads together, without the broker's. The fastest round counts: on a
machine that others use, too, the others are slower for reasons of their own.
"""

import argparse
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from confluent_kafka import Consumer, TopicPartition

from dora.broker.local import start_broker, stop_broker
from dora.bus import (
    BEGINNING,
    ClusterSettings,
    LogReader,
    LogWriter,
    RunTopics,
    TopicAdmin,
    TopicSpec,
    cluster_settings,
)
from dora.bus.settings import consumer_properties
from dora.config import KafkaSection
from dora.consumers.export.directories import DirectoryTarget, JsonlTarget, ParquetTarget
from dora.consumers.export.run import export_run
from dora.core import ring
from dora.schemas.records import (
    Admission,
    GroupRef,
    Policy,
    RunStarted,
    SampleRef,
    Sampling,
    SlotOffset,
    Step,
    Trajectory,
    VersionRun,
    pack_logprobs,
    pack_tokens,
)

K, LANES, GROUP = 1, 2, 8
RING = K + 2
PROMPT = 64
SAMPLING = Sampling(1.0, 1.0, 0, 4096, (2,))
DEADLINE = 600.0
VOCABULARY = 50_000


class Writer:
    """Writes a run of `versions` steps, each training the `groups` that its version admitted."""

    def __init__(self, settings: ClusterSettings, topics: RunTopics) -> None:
        self._settings = settings
        self._topics = topics
        self._ends = [0] * (RING * LANES)
        self._random = np.random.default_rng(0)
        self.trajectories = 0

    def write(self, versions: int, groups: int, tokens: int) -> None:
        topics, run = self._topics, self._topics.run
        with TopicAdmin(self._settings) as admin:
            counts = {topics.trajectories: RING * LANES, topics.dispatch: 2}
            admin.create([TopicSpec(name, counts.get(name, 1), {}) for name in topics.all])
        with LogWriter(self._settings, client_id="bench") as writer:
            started = RunStarted(
                run, "id", "0", "{}", K, groups, GROUP, RING, LANES, "c", {}, 0,
                f'{{"trainer": {{"steps": {versions}}}}}',
            )  # fmt: skip
            writer.send(topics.steps, started, partition=0)
            for version in range(versions + 1):
                slots = tuple(
                    SlotOffset(topics.trajectories, number, self._ends[number])
                    for number in ring.slot_partitions(version, RING, LANES)
                )
                policy = Policy(run, version, "full", "w", (), "s", b"", b"", slots, 0)
                writer.send(topics.policies, policy, key=str(version), partition=0)
                if version == versions:
                    break
                refs = []
                for ordinal in range(version * groups, (version + 1) * groups):
                    group = Admission(run, f"g{ordinal}", ordinal, version, GROUP, "train", 0)
                    writer.send(topics.dispatch, group, partition=ring.JOURNAL)
                    refs.append(self._generate(writer, group, tokens))
                step = Step(
                    run, "step", version, version, version + 1, tuple(refs), (), {}, "s", None,
                    "trainer", 0,
                )  # fmt: skip
                writer.send(topics.steps, step, partition=0)
                writer.poll()
            writer.flush(DEADLINE)

    def _generate(self, writer: LogWriter, group: Admission, tokens: int) -> GroupRef:
        number = ring.partition(group.policy_version, group.group_id, RING, LANES)
        refs = []
        for sample in range(GROUP):
            count = int(self._random.integers(tokens // 2, tokens + tokens // 2))
            total = PROMPT + count
            logprobs = np.zeros(total, np.float32)
            logprobs[PROMPT:] = -self._random.exponential(0.7, count)
            record = Trajectory(
                group.run, f"{group.group_id}/{sample}", group.group_id, sample, 0, 1,
                group.policy_version, group.ordinal, "train",
                pack_tokens(self._random.integers(0, VOCABULARY, total)),
                bytes(PROMPT) + b"\1" * count, pack_logprobs(logprobs),
                (VersionRun(group.policy_version, count),), "stop", 1.0, {"right": 1.0}, None,
                None, "w0", "bench", SAMPLING, 0, 0, 0,
            )  # fmt: skip
            writer.send(
                self._topics.trajectories, record, key=record.trajectory_id, partition=number
            )
            refs.append(SampleRef(sample, 0, number, self._ends[number]))
            self._ends[number] += 1
            self.trajectories += 1
        return GroupRef(group.group_id, group.ordinal, group.policy_version, tuple(refs))


def consume(settings: ClusterSettings, topic: str) -> int:
    """Read every value with the bare client; returns their bytes."""
    consumer = Consumer(consumer_properties(settings, "bench", "read_committed"))
    places = [TopicPartition(topic, number, 0) for number in range(RING * LANES)]
    left = sum(consumer.get_watermark_offsets(place)[1] for place in places)
    consumer.assign(places)
    size = 0
    while left:
        for message in consumer.consume(1000, 0.05):
            if message.error() is None:
                size += len(message.value())
                left -= 1
    consumer.close()
    return size


def decode(settings: ClusterSettings, topic: str) -> int:
    """Read and decode every record with dora's reader; returns their number."""
    with LogReader(settings, client_id="bench") as reader:
        reader.assign({(topic, number): BEGINNING for number in range(RING * LANES)})
        return sum(1 for _ in reader.read_to_end(DEADLINE))


@contextmanager
def cluster(address: str | None, scratch: Path) -> Iterator[ClusterSettings]:
    """The given cluster, or one for the time of the measurement."""
    if address is not None:
        yield cluster_settings(KafkaSection(bootstrap_servers=address))
        return
    info = start_broker(scratch / "broker")
    try:
        yield cluster_settings(KafkaSection(bootstrap_servers=info.bootstrap_servers))
    finally:
        stop_broker(scratch / "broker", force=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-b", "--bootstrap-server")
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--groups-per-step", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024, help="mean generated length")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, cluster(given.bootstrap_server, Path(name)) as to:
        topics = RunTopics(f"bench-export-{uuid.uuid4().hex[:8]}")
        writer = Writer(to, topics)
        writer.write(given.versions, given.groups_per_step, given.tokens)
        measure(to, topics, writer.trajectories, Path(name) / "out", given.rounds)


def measure(
    settings: ClusterSettings, topics: RunTopics, count: int, out: Path, rounds: int
) -> None:
    """Each way in turn, `rounds` times after one that warms up."""
    size = consume(settings, topics.trajectories)

    def export(target: type[DirectoryTarget]) -> None:
        summary = export_run(
            settings, topics.run, lambda run: target(out, run, print), deadline=DEADLINE
        )
        assert summary.rows == count, summary
        written[target] = summary.bytes

    written: dict[type[DirectoryTarget], int] = {}
    ways: dict[str, Callable[[], object]] = {
        "bare client": lambda: consume(settings, topics.trajectories),
        "dora's reader": lambda: decode(settings, topics.trajectories),
        "export to parquet": lambda: export(ParquetTarget),
        "export to jsonl": lambda: export(JsonlTarget),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    computing: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, act in ways.items():
            began, spent = time.perf_counter(), time.process_time()
            act()
            if turn:
                seconds[way].append(time.perf_counter() - began)
                computing[way].append(time.process_time() - spent)
            shutil.rmtree(out, ignore_errors=True)
    print(f"{count:,} trajectories, {size / 1e6:,.1f} MB of records, {rounds} rounds")
    for target, bytes_ in written.items():
        print(f"{target.__name__}: {bytes_ / 1e6:,.1f} MB of files")
    bare = min(seconds["bare client"])
    for way, taken in seconds.items():
        best = min(taken)
        print(
            f"{way:18} fastest {best:6.2f} s (median {statistics.median(taken):.2f}) "
            f"{count / best:9,.0f} trajectories/s {size / 1e6 / best:7,.1f} MB/s "
            f"{best / bare:5.1f} of the bare client's time, "
            f"{statistics.median(computing[way]):5.2f} s of CPU"
        )


if __name__ == "__main__":
    main()
