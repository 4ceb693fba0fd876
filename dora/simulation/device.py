"""An accelerator that decodes batches, in virtual time.

The device does what a loop over its iterations would do, with the same results and
without the loop: between two events (a sequence joins, finishes, is preempted or leaves) all
iterations follow one formula, so that an event costs O(log n) however many tokens lie between.

One iteration over `n` sequences whose contexts have `c` tokens together takes
`iteration_seconds + n * per_sequence + c * per_context_token` seconds and yields one token for
each. What joins (up to `capacity` sequences, first come first served) does so between two
iterations, and its prompt and earlier tokens are read first, which holds up the whole batch. When
the key-value cache cannot hold another token for each, the youngest sequence is preempted: it goes
to the head of the queue and is read again later, as in vLLM (Kwon et al. 2023, section 4.5, the
recomputing variant).
"""

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass

LATE_LIMIT = 0.05
"""Largest share of the responses' time by which they may be reported too late."""


def emulation_warning(share: float | None) -> str | None:
    """A warning about this lateness (`emulation_late_share`); None if the emulation keeps up, or
    nothing is emulated."""
    if share is None or share <= LATE_LIMIT:
        return None
    return (
        f"emulated responses are reported {share:.0%} of their time too late (at most "
        f"{LATE_LIMIT:.0%} is sound): this machine, not the schedule, sets the pace; raise "
        "rollout.emulated.time_scale or rollout.chunk_tokens"
    )


# What an iteration of an emulated accelerator costs, and the formula for many of them.
#
# `Epoch.end(k)` is the sum of the costs of `k` iterations in which the batch does not
# change and each context grows by one token per iteration.


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Times in seconds, on a device of speed 1; `speed` divides those of computing, not of loading.

    `kv_cache_tokens` bounds the tokens of all running contexts together; None is no bound.
    """

    iteration_seconds: float
    per_sequence: float = 0.0
    per_context_token: float = 0.0
    prefill_seconds_per_token: float = 0.0
    load_seconds: float = 0.0
    kv_cache_tokens: int | None = None
    speed: float = 1.0

    def iteration(self, sequences: int, context: float = 0.0) -> float:
        """Seconds of one iteration over so many sequences with so many context tokens in all."""
        return (
            self.iteration_seconds
            + sequences * self.per_sequence
            + context * self.per_context_token
        ) / self.speed

    def prefill(self, tokens: int) -> float:
        """Seconds to read so many tokens."""
        return tokens * self.prefill_seconds_per_token / self.speed


@dataclass(slots=True)
class Epoch:
    """Iterations over an unchanging batch: iteration `first + k` ends at `end(k + 1)`.

    Before the first one `reading` tokens are read and `stall` seconds pass; both are in `head`. The
    batch must be preempted before iteration `preempts_at`.
    """

    first: int
    start: float
    reading: int
    stall: float
    head: float
    linear: float
    quadratic: float
    preempts_at: float

    def end(self, count: int) -> float:
        """When so many iterations have ended."""
        if count == 0:
            return self.start
        return self.start + (self.head + count * self.linear + count * (count - 1) * self.quadratic)

    def completed(self, now: float) -> int:
        """Iterations that have ended by `now`."""
        rest = now - self.start - self.head
        if rest < self.linear or self.linear == 0:
            return 0
        if self.quadratic == 0:
            count = int(rest / self.linear)
        else:
            slope = self.linear - self.quadratic
            root = math.sqrt(slope * slope + 4 * self.quadratic * rest)
            count = int((root - slope) / (2 * self.quadratic))
        while self.end(count + 1) <= now:
            count += 1
        while count > 0 and self.end(count) > now:
            count -= 1
        return count


__all__ = ["Device", "DeviceSpec", "Progress"]


@dataclass(frozen=True, slots=True)
class Progress:
    """A sequence has `position` response tokens since `time`; `finished` if these are all."""

    name: str
    position: int
    finished: bool
    time: float


@dataclass(slots=True, eq=False)
class _Sequence:
    name: str
    prompt: int
    position: int
    total: int
    report_every: int
    # The iteration before which it joined, and a number that its heap entry must carry.
    joined: int = -1
    stamp: int = -1

    @property
    def context(self) -> int:
        return self.prompt + self.position


class Device:
    """One device; every time given to it must be at least the one before.

    Drive it by `advance(next_event())`, or by `advance` at any time. What `add`, `abort` and `load`
    change takes effect when the iteration under way has ended.
    """

    def __init__(self, spec: DeviceSpec, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}")
        self.spec = spec
        self.capacity = capacity
        self.preemptions = 0
        self._now = -math.inf
        self._shift = 0.0
        self._paused_at: float | None = None
        self._running: OrderedDict[str, _Sequence] = OrderedDict()
        self._waiting: OrderedDict[str, _Sequence] = OrderedDict()
        # The context of the running batch before iteration i is base + n * i.
        self._context_base = 0
        self._marks: list[tuple[int, int, _Sequence]] = []
        self._stamp = 0
        self._epoch: Epoch | None = None
        self._iteration = 0
        self._free_at = -math.inf
        self._changes_at: int | None = None
        self._stall = 0.0
        self._reports: list[Progress] = []

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        self._settle()
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place in the batch, or for memory."""
        self._settle()
        return len(self._waiting)

    @property
    def paused(self) -> bool:
        """Whether no time passes."""
        return self._paused_at is not None

    @property
    def memory_used(self) -> float:
        """Share of the key-value cache in use; 0 where it has no bound."""
        limit = self.spec.kv_cache_tokens
        if limit is None:
            return 0.0
        self._settle()
        return self._context(self._done()) / limit

    @property
    def busy_until(self) -> float:
        """When the iteration or the load under way ends; in the past if there is none."""
        if self._epoch is None:
            return self._free_at + self._shift
        return self._epoch.end(self._boundary() - self._epoch.first) + self._shift

    def holds(self, name: str) -> bool:
        """Whether the sequence runs or waits."""
        return name in self._running or name in self._waiting

    def position(self, name: str) -> int:
        """Response tokens that a sequence has now; KeyError if it is not here."""
        self._settle()
        waiting = self._waiting.get(name)
        if waiting is not None:
            return waiting.position
        return self._position(self._running[name], self._done())

    def add(
        self,
        name: str,
        prompt: int,
        position: int,
        total: int,
        now: float,
        *,
        report_every: int = 0,
    ) -> None:
        """Take a sequence of `prompt` tokens with `position` of `total` response tokens there.

        `advance` tells when it is finished and, with `report_every`, whenever its position is a
        multiple of that. ValueError if it is here already, has nothing left to generate or can
        never fit into the key-value cache.
        """
        if self.holds(name):
            raise ValueError(f"{name} is on the device already")
        if not 0 <= position < total:
            raise ValueError(f"{name} has {position} of {total} tokens")
        limit = self.spec.kv_cache_tokens
        if limit is not None and prompt + total > limit:
            raise ValueError(
                f"{name} grows to {prompt + total} tokens; the key-value cache holds {limit}"
            )
        self._reach(now)
        self._waiting[name] = _Sequence(name, prompt, position, total, report_every)
        if self._epoch is not None and len(self._running) < self.capacity:
            self._change()

    def abort(self, name: str, now: float) -> int:
        """Remove a sequence; returns its position. KeyError if it is not here."""
        self._reach(now)
        waiting = self._waiting.pop(name, None)
        if waiting is not None:
            if self._epoch is not None and len(self._running) < self.capacity:
                self._change()  # it may have kept those behind it from joining
            return waiting.position
        sequence = self._running[name]
        position = self._position(sequence, self._done())
        self._change()
        epoch, boundary = self._epoch, self._boundary()
        assert epoch is not None
        if sequence.joined == epoch.first == boundary:
            epoch.reading -= sequence.context
        self._remove(sequence)
        if not self._running:
            self._free_at = epoch.end(boundary - epoch.first)
            if boundary == epoch.first:
                self._free_at += epoch.stall
            self._free_at += self._stall
            self._iteration, self._epoch = boundary, None
            self._changes_at, self._stall = None, 0.0
        return position

    def load(self, now: float) -> None:
        """Spend `load_seconds` on new weights: nothing is generated meanwhile."""
        self._reach(now)
        if self._epoch is None:
            self._free_at = max(self._free_at, self._now) + self.spec.load_seconds
        else:
            self._stall += self.spec.load_seconds
            self._change()

    def pause(self, now: float) -> None:
        """No time passes on the device until `resume`."""
        self._reach(now)
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> None:
        """End a pause, if there is one."""
        if self._paused_at is not None:
            self._shift += now - self._paused_at
            self._paused_at = None
        self._reach(now)

    def next_event(self) -> float:
        """When something happens next: a finish, a report, a preemption, a start; inf if never."""
        self._settle()
        if self._reports:
            return self._now + self._shift
        if self._paused_at is not None:
            return math.inf
        return self._next() + self._shift

    def advance(self, now: float) -> list[Progress]:
        """Let time pass until `now`; what was finished or is to be reported, in order of time."""
        self._reach(now)
        reports, self._reports = self._reports, []
        return reports

    def advance_to(self, now: float) -> None:
        """Let time pass until `now`; what happens meanwhile is told by the next `advance`."""
        self._reach(now)

    def _reach(self, now: float) -> None:
        if self._paused_at is None:
            while (event := self._next()) + self._shift <= now:
                self._now = max(self._now, event)
                self._happen()
            # Shifting there and back may lose the last bit; time never goes back.
            self._now = max(self._now, now - self._shift)
        self._settle()

    def _settle(self) -> None:
        """Let changes take effect that are due now."""
        if self._epoch is None:
            if self._waiting and self._free_at <= self._now:
                self._restructure(self._iteration, self._now)
        elif self._changes_at == self._epoch.first and self._epoch.start <= self._now:
            self._happen()

    def _next(self) -> float:
        epoch = self._epoch
        if epoch is None:
            return max(self._free_at, self._now) if self._waiting else math.inf
        return epoch.end(self._next_iteration(epoch) - epoch.first)

    def _next_iteration(self, epoch: Epoch) -> int:
        marks = self._marks
        while marks and marks[0][1] != marks[0][2].stamp:
            heapq.heappop(marks)
        iteration = marks[0][0] if marks else math.inf
        if self._changes_at is not None:
            iteration = min(iteration, self._changes_at)
        return int(min(iteration, epoch.preempts_at))

    def _happen(self) -> None:
        """The next event."""
        epoch = self._epoch
        if epoch is None:
            self._restructure(self._iteration, max(self._free_at, self._now))
            return
        iteration = self._next_iteration(epoch)
        time = epoch.end(iteration - epoch.first)
        changed = iteration in (self._changes_at, epoch.preempts_at)
        marks = self._marks
        while marks and marks[0][0] == iteration:
            _, stamp, sequence = heapq.heappop(marks)
            if stamp != sequence.stamp:
                continue
            position = self._position(sequence, iteration)
            finished = position == sequence.total
            self._reports.append(Progress(sequence.name, position, finished, time + self._shift))
            if finished:
                self._remove(sequence)
                changed = True
            else:
                self._mark(sequence, iteration, position)
        if changed:
            self._restructure(iteration, time)

    def _restructure(self, iteration: int, time: float) -> None:
        """Preempt and admit before an iteration; then it goes on with the batch that is there."""
        spec, limit = self.spec, self.spec.kv_cache_tokens
        former = self._epoch
        reading, stall = 0, self._stall
        if former is not None and former.first == iteration:
            reading, stall = former.reading, former.stall + stall
        if limit is not None:
            while len(self._running) > 1 and (
                self._context(iteration) + len(self._running) > limit
            ):
                youngest = self._running[next(reversed(self._running))]
                context = youngest.context
                youngest.position = self._position(youngest, iteration)
                self._remove(youngest, context)
                self._waiting[youngest.name] = youngest
                self._waiting.move_to_end(youngest.name, last=False)
                self.preemptions += 1
        while self._waiting and len(self._running) < self.capacity:
            name = next(iter(self._waiting))
            sequence = self._waiting[name]
            if limit is not None and self._running:
                needed = self._context(iteration) + sequence.context + len(self._running) + 1
                if needed > limit:
                    break
            del self._waiting[name]
            reading += sequence.context
            sequence.joined = iteration
            self._running[name] = sequence
            self._context_base += sequence.context - iteration
            self._mark(sequence, iteration, sequence.position)
        self._changes_at, self._stall = None, 0.0
        self._iteration = iteration
        count = len(self._running)
        if count == 0:
            self._epoch = None
            self._free_at = time + stall
            return
        context = self._context(iteration)
        self._epoch = Epoch(
            iteration,
            time,
            reading,
            stall,
            stall + spec.prefill(reading),
            spec.iteration(count, context),
            spec.per_context_token * count / (2 * spec.speed),
            math.inf if limit is None or count == 1 else iteration + (limit - context) // count,
        )

    def _change(self) -> None:
        """Restructure before the next iteration that has not started."""
        self._changes_at = self._boundary()

    def _boundary(self) -> int:
        """The first iteration that has not started before now."""
        epoch = self._epoch
        assert epoch is not None
        count = epoch.completed(self._now)
        if epoch.end(count) < self._now:
            count += 1
        return epoch.first + count

    def _done(self) -> int:
        """Iterations that have ended by now."""
        if self._epoch is None:
            return self._iteration
        return self._epoch.first + self._epoch.completed(self._now)

    def _context(self, iteration: int) -> int:
        return self._context_base + len(self._running) * iteration

    def _position(self, sequence: _Sequence, iteration: int) -> int:
        return sequence.position + iteration - sequence.joined

    def _remove(self, sequence: _Sequence, context: int | None = None) -> None:
        joined_with = sequence.context if context is None else context
        self._context_base -= joined_with - sequence.joined
        del self._running[sequence.name]
        sequence.stamp = sequence.joined = -1

    def _mark(self, sequence: _Sequence, iteration: int, position: int) -> None:
        """Note when the sequence is to be reported next."""
        target = sequence.total
        if sequence.report_every:
            target = min(target, (position // sequence.report_every + 1) * sequence.report_every)
        self._stamp += 1
        sequence.stamp = self._stamp
        heapq.heappush(self._marks, (iteration + target - position, self._stamp, sequence))
        if len(self._marks) > 64 + 4 * self.capacity:
            self._marks = [mark for mark in self._marks if mark[1] == mark[2].stamp]
            heapq.heapify(self._marks)
