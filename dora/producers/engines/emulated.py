"""An accelerator that is only a clock: the timing of decoding, without a language model.

What a request yields depends on the engine's seed, the request's id, its prompt and its sampling
limits alone: not on the clock, the batch, the version or the worker. So a request that is resumed
elsewhere under the same id goes on exactly as it would have: same tokens, same total length.
`Sampling.seed` plays no part, since it may differ between attempts.

The timing is that of `dora.simulation.device`, in real time: the device goes on beside its driver,
however late that comes to ask, and `late_share` says how much came too late. There are no weights:
`load` takes its time, and every log-probability is that of the uniform distribution over the
vocabulary, in `step` and in `score` alike. A trainer that publishes `-log(vocabulary)` as its
canary passes; other canaries need an infinite tolerance.
"""

import logging
import math
import re
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from random import Random
from zlib import crc32

from dora.config import Config
from dora.config.emulation import EmulatedSection
from dora.errors import DoraError, PolicyError
from dora.producers.engines.base import Delta, Engine, Request, complete, refusal
from dora.schemas.records import FinishReason
from dora.simulation.device import Device, DeviceSpec, Progress, emulation_warning
from dora.simulation.lengths import Lengths
from dora.weights.models import vocabulary_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EmulatedSpec:
    """One emulated device: the configured times and lengths, its own speed, and the lengths that
    `empirical` draws from."""

    section: EmulatedSection
    speed: float = 1.0
    length_values: tuple[int, ...] = ()

    def device(self) -> DeviceSpec:
        """The device of these times."""
        section = self.section
        return DeviceSpec(
            section.iteration_seconds,
            section.iteration_seconds_per_sequence,
            section.iteration_seconds_per_context_token,
            section.prefill_seconds_per_token,
            section.load_seconds,
            section.kv_cache_tokens,
            self.speed,
        )

    def lengths(self) -> Lengths:
        """The distribution of these lengths."""
        section = self.section
        return Lengths(
            section.length,
            section.length_mean,
            section.length_sigma,
            section.length_prompt_share,
            self.length_values,
        )


def emulated_spec(config: Config, worker: str) -> EmulatedSpec:
    """The device of the worker with this name; PolicyError if the length file is unusable."""
    section = config.rollout.emulated
    speeds = section.speeds
    number = re.search(r"(\d+)$", worker)
    speed = speeds[int(number.group(1) if number else 0) % len(speeds)] if speeds else 1.0
    values: tuple[int, ...] = ()
    if section.length == "empirical" and section.length_file is not None:
        values = read_lengths(config.home / section.length_file)
        cut = sum(value > config.rollout.max_new_tokens for value in values)
        if cut:
            log.warning(
                "%d of %d lengths in %s are cut at rollout.max_new_tokens = %d",
                cut, len(values), section.length_file, config.rollout.max_new_tokens,
            )  # fmt: skip
    return EmulatedSpec(section, speed, values)


def read_lengths(path: Path) -> tuple[int, ...]:
    """Lengths in tokens, one a line; empty lines are skipped.

    PolicyError, with file and line, for a file that is missing or empty and for a line that is no
    positive whole number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(
            f"rollout.emulated.length_file: {path} cannot be read: {error}",
            hint="One response length in tokens a line; the path starts from the configuration "
            "file's directory.",
        ) from error
    values = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
            raise PolicyError(
                f"rollout.emulated.length_file: {path} line {number} is {text[:40]!r}, not a "
                "length in tokens",
                hint="One positive whole number a line.",
            )
        values.append(int(text))
    if not values:
        raise PolicyError(f"rollout.emulated.length_file: {path} holds no length")
    return tuple(values)


PERIOD = 1 << 16
"""Tokens after which a request's noise repeats. Requests read the same noise from places of their
own, so that a thousand tokens cost no more than copying them."""

SHARE_SECONDS = 60.0


class Noise:
    """Tokens in place of a language model's, and their log-probabilities.

    A token depends on the engine's seed, the request's id and the token's position alone.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._logprobs = array("f")

    def tokens(
        self, request_id: str, start: int, end: int, vocabulary: int, stops: tuple[int, ...]
    ) -> "array[int]":
        """The tokens at positions `start` to `end`, none of which is a stop token, unless nothing
        else is in the vocabulary."""
        key = f"{self._seed}:{request_id}".encode()
        place = int.from_bytes(blake2b(key, digest_size=4).digest(), "little")
        table = _table(vocabulary, stops)
        result = array("i")
        while start < end:
            first = (place + start) % PERIOD
            count = min(end - start, PERIOD - first)
            result += table[first : first + count]
            start += count
        return result

    def logprobs(self, count: int, vocabulary: int) -> "array[float]":
        """So many log-probabilities (nats) of the uniform distribution."""
        if len(self._logprobs) < count or self._logprobs[0] != _uniform(vocabulary):
            self._logprobs = array("f", [-math.log(vocabulary)]) * max(count, 4096)
        return self._logprobs[:count]


@lru_cache(maxsize=256)
def _uniform(vocabulary: int) -> float:
    return array("f", [-math.log(vocabulary)])[0]


@lru_cache(maxsize=4)
def _table(vocabulary: int, stops: tuple[int, ...]) -> "array[int]":
    allowed = [token for token in range(min(vocabulary, PERIOD)) if token not in stops]
    return array("i", Random(vocabulary).choices(allowed or range(vocabulary), k=PERIOD))


class Lateness:
    """By how much reports came too late, over the last one to two minutes."""

    def __init__(self) -> None:
        self._late = self._span = 0.0
        self._former = (0.0, 0.0)
        self._since = -math.inf

    def add(self, late: float, span: float, now: float) -> None:
        """A response that took `span` emulated seconds was reported `late` such seconds after its
        end; `now` is the real time."""
        if now - self._since > SHARE_SECONDS:
            self._former = (self._late, self._span)
            self._late = self._span = 0.0
            self._since = now
        self._late += late
        self._span += span

    @property
    def share(self) -> float:
        """Lateness as a share of the time that the responses took; 0 before the first."""
        late, span = self._former
        span += self._span
        return (late + self._late) / span if span > 0 else 0.0


WAIT_SECONDS = 1.0
"""Longest time that `due` names: by then something else may have come up."""
WARNING_SECONDS = 60.0
_ROUNDING = 1e-9


@dataclass(slots=True)
class _Sequence:
    request: Request
    total: int
    ends_with_stop: bool
    reported: int
    added: float
    version: int


class EmulatedEngine(Engine):
    """Serves requests with the timing of `spec`; see the module.

    Tokens are reported when a response's length is a multiple of `report_every`, and at its end.
    `waits` makes `step` and `load` sleep until there is something to report, as an engine that
    computes would; otherwise they return at once, `due` tells when to come again, and what is added
    after a `load` starts when that is over. Without `vocabulary`, the number of tokens is that of
    the config.json in the loaded directory. With `hosts_many` a version is loaded beside the
    others, while these go on.
    """

    name = "emulated"

    def __init__(
        self,
        spec: EmulatedSpec,
        *,
        capacity: int,
        max_model_len: int,
        vocabulary: int | None = None,
        seed: int = 0,
        report_every: int = 1,
        waits: bool = True,
        hosts_many: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.capacity = capacity
        self.version: int | None = None
        self.vocabulary = vocabulary or 0
        self.max_model_len = max_model_len
        self.hosts_many = hosts_many
        self._given_vocabulary = vocabulary
        self._seed = seed
        self._section = spec.section
        self._lengths = spec.lengths()
        self._report_every = report_every
        self._waits = waits
        self._clock = clock
        self._sleep = sleep
        self._origin = clock()
        self._virtual = 0.0
        self._device = Device(spec.device(), capacity)
        self._noise = Noise(seed)
        self._lateness = Lateness()
        self._warned_at = -math.inf
        self._sequences: dict[str, _Sequence] = {}
        self._held: dict[str, _Sequence] = {}  # until their version is loaded
        self._progress: list[Progress] = []
        self._finished: list[Delta] = []
        self._ready_at: dict[int, float] = {}

    @property
    def versions(self) -> frozenset[int]:
        return frozenset(self._ready_at)

    @property
    def memory_used(self) -> float:
        """Share of the key-value cache in use; 0 where it has no limit."""
        self._device.advance_to(self._now())
        return self._device.memory_used

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "emulation_late_share": self.late_share,
            "preemptions_total": float(self._device.preemptions),
        }

    @property
    def late_share(self) -> float:
        """Time for which ended responses were not asked for, as a share of the time that they took:
        how much the driver, not the device, held up the work. 0 where time is not real."""
        return self._lateness.share

    def load(self, directory: Path, version: int) -> None:
        """Take the time of an update; of the directory only config.json may be read.

        Raises `DoraError` while requests run (unless `hosts_many`), `WeightsError` where the
        vocabulary is not known.
        """
        if self._sequences and not self.hosts_many:
            raise DoraError(
                f"weights of version {version} cannot be loaded while {len(self._sequences)} "
                "requests run",
                hint="Abort them or let them finish first.",
            )
        if self._given_vocabulary is None:
            self.vocabulary = vocabulary_of(directory)
        now = self._now()
        if self.hosts_many:
            self._ready_at[version] = now + self._section.load_seconds
            self.version = max(self._ready_at)
        else:
            self._device.load(now)
            self._ready_at = {version: now}
            self.version = version
        if self._waits:
            self._spend(self._section.load_seconds)

    def unload(self, version: int) -> None:
        users = sum(s.version == version for s in self._sequences.values())
        if users:
            raise DoraError(f"version {version} cannot be unloaded: {users} requests of it run")
        self._ready_at.pop(version, None)
        self.version = max(self._ready_at, default=None)

    def restart(self, directory: Path, version: int) -> None:
        """Forget all requests, then `load`."""
        self.close()
        self._ready_at.clear()
        self.load(directory, version)

    def score(self, token_ids: Sequence[int], version: int | None = None) -> list[float]:
        """`-log(vocabulary)` for each token after the first: there are no weights."""
        self._check_ready(version)
        return [-math.log(self.vocabulary)] * max(0, len(token_ids) - 1)

    def add(self, request: Request) -> None:
        name = request.request_id
        if name in self._sequences:
            raise DoraError(f"request {name} runs already")
        version = self._check_ready(request.version)
        reason = refusal(request, self.vocabulary, self.max_model_len)
        if reason is not None:
            self._finished.append(Delta(name, finish_reason="error", error=reason))
            return
        ended = complete(request)
        if ended is not None:
            self._finished.append(Delta(name, finish_reason=ended))
            return
        prompt = ""
        if self._lengths.prompt_share > 0:
            prompt = f"{crc32(array('i', request.prompt).tobytes()):08x}"
        drawn = self._lengths.draw(self._seed, name, prompt)
        room = self.max_model_len - len(request.prompt)
        total = min(drawn, request.sampling.max_new_tokens, room)
        # A prefix that outgrew the drawn length (made elsewhere) ends with the next token.
        total = max(total, len(request.prefix) + 1)
        cache = self._section.kv_cache_tokens
        if cache is not None and len(request.prompt) + total > cache:
            reason = (
                f"it grows to {len(request.prompt) + total} tokens, but the key-value cache holds "
                f"{cache}"
            )
            self._finished.append(Delta(name, finish_reason="error", error=reason))
            return
        ends = drawn <= total and bool(request.sampling.stop_token_ids)
        now = self._now()
        sequence = _Sequence(request, total, ends, len(request.prefix), now, version)
        self._sequences[name] = sequence
        if self._ready_at[version] > now:
            self._held[name] = sequence
        else:
            self._start(sequence, now)

    def abort(self, request_id: str) -> None:
        if self._sequences.pop(request_id, None) is not None:
            self._held.pop(request_id, None)
            now = self._now()
            self._progress += self._device.advance(now)
            if self._device.holds(request_id):
                self._device.abort(request_id, now)
            self._progress = [each for each in self._progress if each.name != request_id]
        self._finished = [delta for delta in self._finished if delta.request_id != request_id]

    def unreported(self, request_id: str) -> Delta | None:
        sequence = self._sequences.get(request_id)
        if sequence is None or request_id in self._held:
            return None
        self._device.advance_to(self._now())
        position = sequence.total - 1  # one that has ended is still to be reported by `step`
        if self._device.holds(request_id):
            position = self._device.position(request_id)
        return self._delta(sequence, position) if position > sequence.reported else None

    def pause(self) -> None:
        self._device.pause(self._now())

    def resume(self) -> None:
        self._device.resume(self._now())

    def due(self) -> float:
        """Seconds until `step` has something to report or to do; at most `WAIT_SECONDS`."""
        if self._finished or self._progress:
            return 0.0
        event = self._next_event()
        if self._section.time_scale == 0:
            return 0.0 if event < math.inf else WAIT_SECONDS
        return min(max(0.0, (event - self._now()) * self._section.time_scale), WAIT_SECONDS)

    def step(self) -> list[Delta]:
        """Report what has been generated; with `waits`, at least once something has."""
        deltas, self._finished = self._finished, []
        deltas += self._reports()
        while self._waits and not deltas and self._sequences and not self._device.paused:
            seconds = self.due()
            if seconds > 0:
                self._sleep(seconds + _ROUNDING)
            deltas += self._reports()
        return deltas

    @property
    def running(self) -> int:
        return len(self._sequences) + len(self._finished)

    def close(self) -> None:
        now = self._now()
        for name in self._sequences:
            if self._device.holds(name):
                self._device.abort(name, now)
        self._device.advance(now)
        for kept in (self._sequences, self._held, self._progress, self._finished):
            kept.clear()

    def _start(self, sequence: _Sequence, now: float) -> None:
        request = sequence.request
        self._device.add(
            request.request_id,
            len(request.prompt),
            sequence.reported,
            sequence.total,
            now,
            report_every=self._report_every,
        )

    def _next_event(self) -> float:
        held = (self._ready_at[sequence.version] for sequence in self._held.values())
        return min(self._device.next_event(), min(held, default=math.inf))

    def _reports(self) -> list[Delta]:
        if self._section.time_scale == 0 and (event := self._next_event()) < math.inf:
            self._virtual = max(self._virtual, event)
        now = self._now()
        ready = [s for s in self._held.values() if self._ready_at[s.version] <= now]
        for sequence in ready:
            del self._held[sequence.request.request_id]
            self._start(sequence, now)
        self._progress += self._device.advance(now)
        last = {progress.name: progress for progress in self._progress}
        self._progress.clear()
        return [self._report(progress, now) for progress in last.values()]

    def _report(self, progress: Progress, now: float) -> Delta:
        sequence = self._sequences[progress.name]
        if not progress.finished:
            return self._delta(sequence, progress.position)
        del self._sequences[progress.name]
        if self._section.time_scale > 0:
            self._note_lateness(now - progress.time, progress.time - sequence.added)
        return self._delta(
            sequence, progress.position, "stop" if sequence.ends_with_stop else "length"
        )

    def _note_lateness(self, late: float, span: float) -> None:
        now = self._clock()
        self._lateness.add(late, span, now)
        warning = emulation_warning(self._lateness.share)
        if warning is not None and now - self._warned_at >= WARNING_SECONDS:
            self._warned_at = now
            log.warning("%s", warning)

    def _delta(
        self, sequence: _Sequence, position: int, ended: FinishReason | None = None
    ) -> Delta:
        request = sequence.request
        stops = request.sampling.stop_token_ids
        tokens = self._noise.tokens(
            request.request_id, sequence.reported, position, self.vocabulary, stops
        )
        if ended == "stop":
            tokens[-1] = stops[0]
        count = position - sequence.reported
        sequence.reported = position
        return Delta(
            request.request_id, tokens, self._noise.logprobs(count, self.vocabulary), ended
        )

    def _check_ready(self, version: int | None) -> int:
        if self.version is None:
            raise DoraError("the engine was never started", hint="Load or restart it first.")
        if version is None or not self.hosts_many:
            return self.version
        if version not in self._ready_at:
            hosted = ", ".join(str(each) for each in sorted(self._ready_at))
            raise DoraError(f"version {version} is not hosted; hosted are {hosted}")
        return version

    def _now(self) -> float:
        """Emulated seconds; without a scale they pass from event to event."""
        if self._section.time_scale == 0:
            return self._virtual
        return (self._clock() - self._origin) / self._section.time_scale

    def _spend(self, seconds: float) -> None:
        if self._section.time_scale == 0:
            self._virtual += seconds
        elif seconds > 0:
            self._sleep(seconds * self._section.time_scale)
