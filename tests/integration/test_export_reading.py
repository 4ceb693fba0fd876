"""Reading partitions up to ends of their own, as an export does version by version."""

import time

from dora.bus import ClusterSettings, LogReader, LogWriter, TopicAdmin, TopicSpec
from tests.factories import status

DEADLINE = 60.0


def test_what_lies_behind_an_end_is_read_next_also_where_the_partition_ends_there(
    settings: ClusterSettings, run_name: str
) -> None:
    """The news that a partition has ended must not pass the messages that are kept for later."""
    topic = f"{run_name}.workers"
    with TopicAdmin(settings) as admin:
        admin.create([TopicSpec(topic, 3, {})])
    with LogWriter(settings, client_id="test") as writer:
        for number in range(3):
            for index in range(10):
                writer.send(topic, status(f"w{index}", run=run_name), partition=number)
        writer.flush(DEADLINE)

    def offsets(reader: LogReader, ends: dict[int, int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        places = {(topic, number): end for number, end in ends.items()}
        for message in reader.read_until(places, DEADLINE):
            found.setdefault(message.partition, []).append(message.offset)
        return found

    with LogReader(settings, client_id="test") as reader:
        reader.assign({(topic, number): 0 for number in range(3)})
        until = time.monotonic() + DEADLINE
        while {raw.partition() for raw in reader._fetched if raw.error()} != {0, 1, 2}:
            reader._fetch(1000, 0.1)  # with the events that the partitions have ended
            assert time.monotonic() < until
        assert offsets(reader, {0: 4, 1: 10, 2: 0}) == {0: [*range(4)], 1: [*range(10)]}
        assert offsets(reader, {0: 4, 1: 10, 2: 6}) == {2: [*range(6)]}
        assert offsets(reader, {0: 9, 2: 9}) == {0: [*range(4, 9)], 2: [*range(6, 9)]}
        rest = [(m.partition, m.offset) for m in reader.read_to_end(DEADLINE)]
        assert sorted(rest) == [(0, 9), (2, 9)]
