"""How fast virtual time passes: simulated events per second, by the size of the cluster.

    python benchmarks/bench_simulation.py [WORKERS[:STEPS] ...]

Each worker has 16 slots; a step takes what all workers generate in two waves.
An event is the start or the end of a trajectory, with all that follows from it: the device, the
records, the real coordinator, the trainer.
"""

import resource
import sys
import time
from dataclasses import replace

from dora.simulation.presets import preset_named, schedule_variant
from dora.simulation.scenario import Workload, scenario_of
from dora.simulation.simulator import Simulation

SIZES = (8, 64, 512)
SLOTS = 16
GROUP_SIZE = 8


def measure(workers: int, steps: int = 3) -> str:
    """One line of figures."""
    preset = replace(
        preset_named("paper-16"),
        devices=2 * workers,
        slots=SLOTS,
        groups_per_step=2 * workers * SLOTS // GROUP_SIZE,
        group_size=GROUP_SIZE,
        training_seconds=100.0,
    )
    scenario = scenario_of(
        Workload(preset), schedule_variant("dora:1"), workers, steps=steps, warmup=steps // 2
    )
    simulation = Simulation(scenario)
    decide, longest, deciding = simulation.core.decide, 0.0, 0.0

    def timed(now: float) -> object:
        nonlocal longest, deciding
        began = time.perf_counter()
        decision = decide(now)
        took = time.perf_counter() - began
        longest, deciding = max(longest, took), deciding + took
        return decision

    simulation.core.decide = timed  # type: ignore[method-assign,assignment]
    began = time.process_time()
    result = simulation.run()
    took = time.process_time() - began
    events = 2 * result.trajectories
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f"{workers:6d} workers {result.trajectories:8d} trajectories {took:7.1f} s "
        f"{events / took:8.0f} events/s {took / events * 1e6:6.0f} us/event  "
        f"decide: {result.decisions} x {deciding / result.decisions * 1e3:.2f} ms, "
        f"longest {longest * 1e3:.1f} ms  {result.seconds / took:7.0f} x real time  "
        f"{memory:.0f} MiB  violations {result.violations}"
    )


if __name__ == "__main__":
    for text in sys.argv[1:] or map(str, SIZES):
        size, _, number = text.partition(":")
        print(measure(int(size), int(number or 3)), flush=True)
