"""Memory and time of an audit of a large run, without a broker.

Run by hand: `python benchmarks/bench_audit.py --trajectories 1000000`. It makes a clean run record
by record, every tenth trajectory resumed once by another attempt, and feeds it to the pure audit as
`dora audit` does; decoding and network are left out.
"""

import argparse
import resource
import time
from collections.abc import Iterator

import numpy as np

from dora.core import ring
from dora.core.audit.audit import Audit
from dora.schemas.records import (
    Admission,
    Chunk,
    GroupRef,
    Policy,
    RunStarted,
    SampleRef,
    Sampling,
    Step,
    Trajectory,
    VersionRun,
    pack_logprobs,
    pack_tokens,
)

K, LANES = 2, 4
RING = K + 2
PROMPT = 64
SAMPLING = Sampling(1.0, 1.0, 0, 4096, (2,))


class Run:
    """A clean run in which each version trains the groups that it admitted."""

    def __init__(self, trajectories: int, group: int, batch: int, tokens: int, chunk: int) -> None:
        self.group = group
        self.batch = batch
        self.chunk = chunk
        self.versions = -(-trajectories // (group * batch))
        self.generated = pack_tokens(np.arange(tokens)), pack_logprobs(np.full(tokens, -0.5))
        self.tokens = tokens
        self.token_ids = pack_tokens(np.zeros(PROMPT)) + self.generated[0]
        self.logprobs = pack_logprobs(np.zeros(PROMPT)) + self.generated[1]
        self.mask = bytes(PROMPT) + b"\x01" * tokens
        self.ends: dict[int, int] = {}  # next offset by partition of trajectories

    def groups(self, version: int) -> Iterator[Admission]:
        """What version admits."""
        for ordinal in range(version * self.batch, (version + 1) * self.batch):
            yield Admission(
                "bench", ring.train_group_id(ordinal), ordinal, version, self.group, "train", 0
            )

    def step(self, version: int) -> Step:
        """The step that trains them; their trajectories get the next offsets."""
        refs = []
        for group in self.groups(version):
            partition = ring.partition(version, group.group_id, RING, LANES)
            first = self.ends.get(partition, 0)
            self.ends[partition] = first + self.group
            samples = tuple(
                SampleRef(sample, self.attempts(group, sample) - 1, partition, first + sample)
                for sample in range(self.group)
            )
            refs.append(GroupRef(group.group_id, group.ordinal, version, samples))
        return Step(
            "bench", "step", version, version, version + 1, tuple(refs), (), {},
            f"sum{version + 1}", None, "t", 0,
        )  # fmt: skip

    def attempts(self, group: Admission, sample: int) -> int:
        """Attempts at a trajectory."""
        return 2 if (group.ordinal * self.group + sample) % 10 == 0 else 1

    def trajectory(self, group: Admission, sample: int) -> Trajectory:
        """The record of the last attempt."""
        attempts = self.attempts(group, sample)
        return Trajectory(
            "bench", ring.trajectory_id(group.group_id, sample), group.group_id, sample,
            attempts - 1, len(self.cuts(attempts - 1)), group.policy_version, group.ordinal,
            "train", self.token_ids, self.mask, self.logprobs,
            (VersionRun(group.policy_version, self.tokens),), "stop", 1.0, {}, None, None, "w",
            "bench", SAMPLING, 0, 0, 0, self.prefix * (attempts - 1),
        )  # fmt: skip

    @property
    def prefix(self) -> int:
        """Tokens that an attempt that resumes finds."""
        return self.tokens // (2 * self.chunk) * self.chunk

    def cuts(self, attempt: int) -> list[tuple[int, int]]:
        """First token and end of each chunk of an attempt."""
        first = self.prefix if attempt else 0
        starts = list(range(first, self.tokens, self.chunk))
        if attempt:
            starts[0] = 0
        return list(zip(starts, [*starts[1:], self.tokens], strict=True))

    def chunks(self, group: Admission, sample: int) -> Iterator[Chunk]:
        """The chunks of all attempts; all but the last attempt end half way."""
        attempts = self.attempts(group, sample)
        for attempt in range(attempts):
            for sequence, (first, end) in enumerate(self.cuts(attempt)):
                if attempt < attempts - 1 and first >= self.prefix:
                    break
                yield Chunk(
                    "bench", ring.trajectory_id(group.group_id, sample), group.group_id, sample,
                    attempt, sequence, group.policy_version, group.ordinal, "train", first,
                    self.generated[0][4 * first : 4 * end], self.generated[1][4 * first : 4 * end],
                    False, "w", SAMPLING, 0, self.prefix if attempt and not sequence else 0,
                )  # fmt: skip


def megabytes() -> float:
    """The most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--groups-per-step", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="generated by each trajectory")
    parser.add_argument("--chunk-tokens", type=int, default=128)
    given = parser.parse_args()
    run = Run(
        given.trajectories, given.group_size, given.groups_per_step, given.tokens,
        given.chunk_tokens,
    )  # fmt: skip
    audit = Audit()
    before = megabytes()
    spent, records = 0.0, 0

    def feed(record: object, topic: str, partition: int, offset: int) -> None:
        nonlocal spent, records
        began = time.process_time()
        audit.feed(record, topic, partition, offset)  # type: ignore[arg-type]
        spent += time.process_time() - began
        records += 1

    for version in range(run.versions + 1):
        policy = Policy(
            "bench", version, "full", "w", (), f"sum{version}", b"", b"", (), 0
        )  # fmt: skip
        feed(policy, "bench.policies", 0, version)
    started = RunStarted(
        "bench", "id", "0", "{}", K, given.groups_per_step, given.group_size, RING, LANES, "c",
        {}, 0,
    )  # fmt: skip
    feed(started, "bench.steps", 0, 0)
    for version in range(run.versions):
        feed(run.step(version), "bench.steps", 0, version + 1)
    for version in range(run.versions):
        for group in run.groups(version):
            feed(group, "bench.dispatch", 0, group.ordinal)
    ends: dict[int, int] = {}
    for version in range(run.versions):
        for group in run.groups(version):
            partition = ring.partition(version, group.group_id, RING, LANES)
            for sample in range(run.group):
                offset = ends.get(partition, 0)
                ends[partition] = offset + 1
                feed(run.trajectory(group, sample), "bench.trajectories", partition, offset)
    for version in range(run.versions):
        for group in run.groups(version):
            partition = ring.partition(version, group.group_id, RING, LANES)
            for sample in range(run.group):
                for number, chunk in enumerate(run.chunks(group, sample)):
                    feed(chunk, "bench.chunks", partition, number)
    began = time.process_time()
    report = audit.report()
    spent += time.process_time() - began
    assert not report.violated, report.findings[:3]
    count = run.versions * run.group * run.batch
    print(f"{count:,} trajectories in {run.versions * run.batch:,} groups, {records:,} records")
    print(f"peak memory {megabytes():,.0f} MiB, {before:,.0f} of them before the first record")
    print(f"the audit itself took {spent:,.1f} s of CPU, {spent / count * 1e6:.1f} µs a trajectory")


if __name__ == "__main__":
    main()
