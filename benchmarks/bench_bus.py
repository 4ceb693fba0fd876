"""Records per second through a real broker: written, read, and in transactions.

Run by hand: `python benchmarks/bench_bus.py -b HOST:PORT [--records N] [--tokens N]`. A topic is
made for it and deleted afterwards. Client and broker share the machine's cores if they run on one.
"""

import argparse
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from dora.bus import (
    BEGINNING,
    ClusterSettings,
    LogReader,
    LogWriter,
    RunTopics,
    TopicAdmin,
    TopicSpec,
    TransactionalWriter,
)
from dora.schemas.records import Admission, Chunk, Sampling, pack_logprobs, pack_tokens


def chunk(run: str, tokens: int, sequence: int) -> Chunk:
    """A chunk of `tokens` random tokens."""
    random = np.random.default_rng(sequence % 97)
    return Chunk(
        run=run,
        trajectory_id="g12345/3",
        group_id="g12345",
        sample=3,
        attempt=0,
        sequence=sequence,
        policy_version=17,
        ordinal=12345,
        purpose="train",
        position=sequence * tokens,
        token_ids=pack_tokens(random.integers(0, 150_000, tokens)),
        logprobs=pack_logprobs(-random.random(tokens)),
        last=False,
        worker="worker-0",
        sampling=Sampling(1.0, 1.0, 0, 4096, (0,), 7),
        created_ms=1,
    )


@contextmanager
def timed(what: str, records: int) -> Iterator[None]:
    """Print the rate of what happens inside, and this process's own CPU time for each record."""
    begin, cpu = time.perf_counter(), time.process_time()
    yield
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    print(f"{what:34s} {records / seconds:10,.0f} records/s {cpu / records * 1e6:8.1f} µs CPU each")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-b", "--bootstrap-server", required=True)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    settings = ClusterSettings(options.bootstrap_server)
    run = f"bench-{uuid.uuid4().hex[:8]}"
    admin, topic = TopicAdmin(settings), RunTopics(run).chunks
    admin.create([TopicSpec(topic, 4, {})])
    try:
        chunks = [chunk(run, options.tokens, n) for n in range(1_000)]
        with LogWriter(settings, client_id="bench") as writer:
            writer.connect()
            with timed(f"write chunks of {options.tokens} tokens", options.records):
                for n in range(options.records):
                    writer.send(topic, chunks[n % 1_000], partition=n % 4)
                writer.flush(120.0)
        with LogReader(settings, client_id="bench") as reader:
            reader.assign({(topic, partition): BEGINNING for partition in range(4)})
            with timed("read and decode them", options.records):
                count = sum(1 for _ in reader.read_to_end(300.0))
            assert count == options.records, f"{count} of {options.records} came back"
        admission = Admission(run, "g0", 0, 0, 8, "train", 1)
        with TransactionalWriter(
            settings, f"{run}.tx", client_id="bench", transaction_timeout=60.0
        ) as transactions:
            with timed("transactions of one record", 100):
                for _ in range(100):
                    with transactions.transaction() as block:
                        block.send(topic, admission, partition=0)
            with timed("records in transactions of 1,000", 20_000):
                for _ in range(20):
                    with transactions.transaction() as block:
                        for _ in range(1_000):
                            block.send(topic, admission, partition=0)
    finally:
        admin.delete(run)


if __name__ == "__main__":
    main()
