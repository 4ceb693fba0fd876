"""Time of encoding and decoding a trajectory, beside what raw fastavro takes for the same bytes.

Run by hand: `python benchmarks/bench_codec.py [tokens]`. The best of seven rounds counts, because
other load on the machine only ever adds time.
"""

import sys
import timeit
from io import BytesIO

import numpy as np
from fastavro import schemaless_reader, schemaless_writer

from dora.schemas.codec import decode, encode
from dora.schemas.framing import RegistryFraming
from dora.schemas.records import (
    Sampling,
    Trajectory,
    VersionRun,
    pack_logprobs,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)
from dora.schemas.registry import CURRENT


def trajectory(tokens: int) -> Trajectory:
    """A trajectory of `tokens` tokens, the first eighth of them prompt."""
    prompt = tokens // 8
    return Trajectory(
        run="bench",
        trajectory_id="g12345/3",
        group_id="g12345",
        sample=3,
        attempt=0,
        chunks=-(-tokens // 32),
        policy_version=17,
        ordinal=12345,
        purpose="train",
        token_ids=pack_tokens(np.arange(tokens)),
        mask=bytes(prompt) + b"\x01" * (tokens - prompt),
        logprobs=pack_logprobs(np.full(tokens, -0.5)),
        version_runs=(VersionRun(17, tokens - prompt),),
        finish_reason="stop",
        reward=1.0,
        reward_parts={"answer": 1.0, "format": 0.0},
        error=None,
        text=None,
        worker="worker-0",
        engine="bench",
        sampling=Sampling(1.0, 1.0, 0, tokens, (0,), 7),
        started_ms=1,
        generated_ms=2,
        created_ms=3,
    )


def microseconds(function: object, number: int = 2_000) -> float:
    """Best time of one call in microseconds."""
    return min(timeit.repeat(function, number=number, repeat=7)) / number * 1e6  # type: ignore[arg-type]


def main() -> None:
    """Measure and print."""
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000
    record = trajectory(tokens)
    data = encode(record)
    schema = CURRENT["trajectory"].parsed
    framing = RegistryFraming({7: CURRENT["trajectory"]}.__getitem__)
    framing.write_with({"trajectory": 7})
    named = encode(record, framing)
    datum = schemaless_reader(BytesIO(data[10:]), schema, None)
    rows = {
        "raw fastavro write": microseconds(lambda: schemaless_writer(BytesIO(), schema, datum)),
        "encode": microseconds(lambda: encode(record)),
        "raw fastavro read": microseconds(
            lambda: schemaless_reader(BytesIO(data[10:]), schema, None)
        ),
        "decode": microseconds(lambda: decode(data)),
        "encode under a registry's id": microseconds(lambda: encode(record, framing)),
        "decode under a registry's id": microseconds(lambda: decode(named, framing)),
        "unpack tokens and log-probabilities": microseconds(
            lambda: (unpack_tokens(record.token_ids), unpack_logprobs(record.logprobs))
        ),
    }
    print(f"trajectory of {tokens} tokens, {len(data)} bytes")
    for name, value in rows.items():
        print(f"{name:40s} {value:8.1f} µs")


if __name__ == "__main__":
    main()
