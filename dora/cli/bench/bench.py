"""`dora bench`: measuring schedules and engines on this machine."""

from dora.cli.main import Entry, LazyGroup

COMMANDS = {
    "schedules": Entry(
        "dora.cli.bench.schedules:schedules", "Compare schedules on emulated devices."
    ),
    "real": Entry("dora.cli.bench.real:real", "Compare schedules with vLLM and DeepSpeed."),
}

bench = LazyGroup(
    name="bench",
    entries=COMMANDS,
    help="Measure and compare schedules, over real Kafka.",
)
