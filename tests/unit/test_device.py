"""The emulated device against a loop over its iterations."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora.simulation.device import Device, DeviceSpec, Progress


@dataclass
class Loop:
    """What `Device` must do, one iteration after another, with nothing clever in it."""

    spec: DeviceSpec
    capacity: int
    running: list[list] = field(default_factory=list)  # [name, prompt, position, total]
    waiting: list[list] = field(default_factory=list)
    boundary: float = 0.0  # when the iteration under way ends
    active: bool = False
    batch: list[list] = field(default_factory=list)
    stall: float = 0.0
    preemptions: int = 0
    finished: list[tuple[str, float]] = field(default_factory=list)

    def advance(self, now: float) -> None:
        while True:
            if self.active:
                if self.boundary > now:
                    return
                self._end()
            elif not (self.running or self.waiting) or self.boundary > now:
                return
            self._begin(now)

    def _end(self) -> None:
        self.active = False
        for entry in self.batch:
            if entry in self.running:
                entry[2] += 1
                if entry[2] == entry[3]:
                    self.running.remove(entry)
                    self.finished.append((entry[0], self.boundary))

    def _begin(self, now: float) -> None:
        spec, limit = self.spec, self.spec.kv_cache_tokens or math.inf
        while len(self.running) > 1 and self.context() + len(self.running) > limit:
            self.waiting.insert(0, self.running.pop())
            self.preemptions += 1
        read = 0
        while self.waiting and len(self.running) < self.capacity:
            entry = self.waiting[0]
            own = entry[1] + entry[2]
            if self.running and self.context() + own + len(self.running) + 1 > limit:
                break
            self.running.append(self.waiting.pop(0))
            read += own
        if not self.running:
            self.boundary += self.stall
            self.stall = 0.0
            return
        seconds = spec.iteration_seconds + len(self.running) * spec.per_sequence
        seconds += self.context() * spec.per_context_token
        seconds += read * spec.prefill_seconds_per_token
        self.boundary += seconds / spec.speed + self.stall
        self.stall = 0.0
        self.batch = list(self.running)
        self.active = True

    def context(self) -> int:
        return sum(entry[1] + entry[2] for entry in self.running)

    def add(self, name: str, prompt: int, position: int, total: int, now: float) -> None:
        if not self.active:
            self.boundary = max(self.boundary, now)
        self.waiting.append([name, prompt, position, total])
        self.advance(now)

    def abort(self, name: str) -> int:
        for queue in (self.running, self.waiting):
            for entry in queue:
                if entry[0] == name:
                    queue.remove(entry)
                    if not self.running:
                        # What is left of the iteration, and a load after it, pass all the same.
                        self.active = False
                        self.boundary += self.stall
                        self.stall = 0.0
                    return entry[2]
        raise KeyError(name)

    def load(self, now: float) -> None:
        if self.active:
            self.stall += self.spec.load_seconds
        else:
            self.boundary = max(self.boundary, now) + self.spec.load_seconds


specs = st.builds(
    DeviceSpec,
    iteration_seconds=st.sampled_from([0.024, 1.0]),
    per_sequence=st.sampled_from([0.0, 0.013]),
    per_context_token=st.sampled_from([0.0, 0.00071]),
    prefill_seconds_per_token=st.sampled_from([0.0, 0.0037]),
    load_seconds=st.just(1.7),
    kv_cache_tokens=st.sampled_from([None, 60, 150]),
    speed=st.sampled_from([1.0, 1.7]),
)
actions = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "abort", "load", "wait"]),
        st.floats(0.0001, 9.0),
        st.integers(1, 20),
        st.integers(0, 15),
        st.integers(1, 25),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=100, deadline=None, report_multiple_bugs=False)
@given(spec=specs, capacity=st.integers(1, 5), steps=actions)
def test_the_device_does_what_a_loop_over_iterations_does(spec, capacity, steps) -> None:
    device, loop = Device(spec, capacity), Loop(spec, capacity)
    ends: list[tuple[str, float]] = []
    now = 0.0

    def advance() -> None:
        for progress in device.advance(now):
            assert progress.finished
            alive.pop(progress.name)
            ends.append((progress.name, progress.time))
        loop.advance(now)

    alive: dict[str, int] = {}
    for number, (action, wait, prompt, position, more) in enumerate(steps):
        # Odd digits keep times apart from the ends of iterations, where rounding would decide.
        now += wait * math.pi / 3
        advance()
        if action == "add":
            name, total = f"s{number}", position + more
            device.add(name, prompt, position, total, now)
            loop.add(name, prompt, position, total, now)
            alive[name] = prompt
        elif action == "abort" and alive:
            name = list(alive)[prompt % len(alive)]
            del alive[name]
            assert device.abort(name, now) == loop.abort(name)
        elif action == "load":
            device.load(now)
            loop.load(now)
        for name in alive:
            place = next(e for e in loop.running + loop.waiting if e[0] == name)
            assert device.position(name) == place[2]
        assert (device.running, device.waiting) == (len(loop.running), len(loop.waiting))
        assert device.memory_used == loop.context() / (spec.kv_cache_tokens or math.inf)
    while alive:
        event = device.next_event()
        assert event < math.inf
        now = max(now, event) + 1e-9
        advance()
    assert [name for name, _ in ends] == [name for name, _ in loop.finished]
    assert [time for _, time in ends] == pytest.approx([time for _, time in loop.finished])
    assert device.preemptions == loop.preemptions
    assert device.next_event() == math.inf


def test_an_iteration_costs_the_base_the_batch_and_the_context() -> None:
    device = Device(DeviceSpec(1.0, 0.5, 0.25, prefill_seconds_per_token=2.0), 8)
    device.add("a", 3, 1, 3, 10.0)
    # Read 4 tokens, then two iterations over contexts of 4 and of 5 tokens.
    assert device.next_event() == 10.0 + 8.0 + (1.5 + 1.0) + (1.5 + 1.25)
    assert device.advance(22.0) == []
    assert device.position("a") == 2
    (progress,) = device.advance(device.next_event())
    assert progress == Progress("a", 3, True, 23.25)
    assert not device.holds("a")
    assert DeviceSpec(1.0, 0.5, 0.25, speed=2.0).iteration(2, 4) == 1.5


def test_positions_are_reported_at_multiples_and_at_the_end() -> None:
    device = Device(DeviceSpec(1.0), 2)
    device.add("a", 1, 3, 10, 0.0, report_every=4)
    assert device.advance(100.0) == [
        Progress("a", 4, False, 1.0),
        Progress("a", 8, False, 5.0),
        Progress("a", 10, True, 7.0),
    ]


def test_no_time_passes_in_a_pause() -> None:
    device = Device(DeviceSpec(1.0), 2)
    device.add("a", 1, 0, 4, 0.0)
    device.pause(1.5)
    assert device.paused
    assert device.next_event() == math.inf
    assert device.advance(50.0) == []
    assert device.position("a") == 1
    device.add("b", 1, 0, 1, 50.0)
    device.resume(101.5)
    assert device.next_event() == 102.0  # the second one joins
    assert [p.name for p in device.advance(200.0)] == ["b", "a"]


def test_a_load_holds_up_what_runs_and_what_comes() -> None:
    device = Device(DeviceSpec(1.0, load_seconds=5.0), 2)
    device.load(2.0)
    assert device.busy_until == 7.0
    device.add("a", 1, 0, 2, 3.0)
    assert device.next_event() == 7.0
    device.load(7.5)
    assert device.advance(20.0) == [Progress("a", 2, True, 14.0)]


def test_the_youngest_is_preempted_and_read_again() -> None:
    spec = DeviceSpec(1.0, prefill_seconds_per_token=0.1, kv_cache_tokens=24)
    device = Device(spec, 4)
    device.add("old", 6, 0, 8, 0.0)
    device.add("young", 6, 0, 8, 0.0)
    ends = {progress.name: progress.time for progress in device.advance(100.0)}
    assert device.preemptions == 1
    # Six iterations together fill the cache; the old one ends alone, then the young one goes on.
    assert ends == pytest.approx({"old": 1.2 + 8.0, "young": 9.2 + 1.2 + 2.0})
    assert device.memory_used == 0.0


def test_what_can_never_run_is_refused() -> None:
    device = Device(DeviceSpec(1.0, kv_cache_tokens=10), 1)
    with pytest.raises(ValueError, match="grows to 11 tokens; the key-value cache holds 10"):
        device.add("a", 6, 0, 5, 0.0)
    with pytest.raises(ValueError, match="has 5 of 5 tokens"):
        device.add("a", 1, 5, 5, 0.0)
    device.add("a", 1, 0, 5, 0.0)
    with pytest.raises(ValueError, match="on the device already"):
        device.add("a", 1, 0, 5, 0.0)
    with pytest.raises(KeyError):
        device.abort("b", 0.0)
    with pytest.raises(ValueError, match="capacity is 0"):
        Device(DeviceSpec(1.0), 0)


def test_the_cost_of_an_event_does_not_grow_with_the_tokens() -> None:
    device = Device(DeviceSpec(1e-3, 1e-5, 1e-9), 256)
    for number in range(1000):
        device.add(f"s{number}", 100, 0, 1_000_000 + number, 0.0)
    events = 0
    while (event := device.next_event()) < math.inf:
        device.advance(event)
        events += 1
    assert events <= 2000
