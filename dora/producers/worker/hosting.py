"""Which policy versions a worker's engine hosts, and how it gets the next one.

An engine that hosts one version gets another only while nothing runs. One that hosts several gets
it beside the others; a version that left the window is unloaded once nothing of it runs. A version
that left the window before it could be loaded is not loaded.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dora.config import Config, window_of
from dora.errors import CanaryError, DeadlineError, MissingWeightsError
from dora.producers.engines.base import Engine
from dora.schemas.records import Policy, unpack_logprobs, unpack_tokens
from dora.weights.canary import CanaryResult, check
from dora.weights.store import WeightStore

log = logging.getLogger(__name__)

POLICY_SECONDS = 60.0
_REMEMBERED = 128


@dataclass(frozen=True, slots=True)
class Installed:
    """How an update went: seconds and the canary's differences in nats."""

    version: int
    seconds: float
    canary: CanaryResult
    fresh_engine: bool


class Installer:
    """Fetches, verifies and applies versions to one engine; its first version brings it up.

    A version counts as hosted only after its files had the announced sizes and checksums and the
    engine's log-probabilities of the canary were within `tolerance` of the trainer's: an engine may
    report success and hold wrong weights. An update that fails the canary is tried once more, with
    a fresh engine or, where an engine hosts many versions, with a fresh adapter.
    """

    def __init__(
        self,
        engine: Engine,
        store: WeightStore,
        cache: Path,
        *,
        tolerance: float,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._store = store
        self._cache = cache
        self._tolerance = tolerance
        self._clock = clock
        self._hosted: dict[int, Installed] = {}
        """How the versions went in that an engine of many versions hosts."""

    def install(self, policy: Policy) -> Installed:
        """Makes the engine host `policy`. One of several that are hosted already is left as it is:
        its requests may be running.

        Raises WeightsError if the files are not what was announced, and CanaryError, with the
        numbers, if even a fresh engine (or adapter) disagrees with the trainer.
        """
        if self._engine.hosts_many:
            versions = self._engine.versions
            self._hosted = {v: how for v, how in self._hosted.items() if v in versions}
            if policy.version in self._hosted:
                return self._hosted[policy.version]
        installed = self._install(policy)
        if self._engine.hosts_many:
            self._hosted[policy.version] = installed
        return installed

    def _install(self, policy: Policy) -> Installed:
        started = self._clock()
        directory = self._store.fetch(policy, self._cache)
        what = "adapter" if self._engine.hosts_many else "engine"
        fresh = self._engine.version is None
        if fresh:
            self._engine.restart(directory, policy.version)
        else:
            self._engine.load(directory, policy.version)
        result = self._canary(policy)
        if not result.passed and not fresh:
            log.warning(
                "version %d: canary differs by %.4f nats after the update (tolerance %.4f), "
                "starting a fresh %s",
                policy.version,
                result.max_difference,
                self._tolerance,
                what,
            )
            fresh = True
            self._engine.restart(directory, policy.version)
            result = self._canary(policy)
        if not result.passed:
            if self._engine.hosts_many:
                self._engine.unload(policy.version)
            raise CanaryError(
                f"version {policy.version}: the engine's canary log-probabilities differ from the "
                f"trainer's by {result.max_difference:.4f} nats at most and "
                f"{result.mean_difference:.4f} on average, with a fresh {what} too "
                f"(rollout.canary_tolerance = {self._tolerance})",
                hint="if the engine computes in lower precision than the trainer, raise "
                "rollout.canary_tolerance; otherwise the engine does not run this model correctly",
            )
        return Installed(policy.version, self._clock() - started, result, fresh)

    def _canary(self, policy: Policy) -> CanaryResult:
        tokens = unpack_tokens(policy.canary_token_ids).tolist()
        expected = unpack_logprobs(policy.canary_logprobs).tolist()
        return check(self._engine.score(tokens, policy.version), expected, self._tolerance)


class Hosting:
    """The versions of one engine; `clock` is monotonic, in seconds."""

    def __init__(
        self, config: Config, engine: Engine, installer: Installer, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._installer = installer
        self._clock = clock
        self._window = window_of(config)
        self._policies: dict[int, Policy] = {}
        self._orders: dict[int, float] = {}  # versions to load: until when their records may come

    @property
    def loading(self) -> int:
        """The version that is awaited or being loaded next; -1 is none."""
        return next(iter(self._orders), -1)

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions hosted, oldest first, where several can be; else empty."""
        return tuple(sorted(self._engine.versions)) if self._engine.hosts_many else ()

    def on_policy(self, policy: Policy) -> None:
        """A version was announced."""
        self._policies[policy.version] = policy
        for version in [v for v in self._policies if v < policy.version - _REMEMBERED]:
            del self._policies[version]

    def order(self, version: int) -> None:
        """A version is to be loaded; where one is hosted at a time, an earlier order lapses."""
        if not self._engine.hosts_many:
            self._orders.clear()
        self._orders[version] = self._clock() + POLICY_SECONDS

    def next(self) -> int | None:
        """The version to load now; None if nothing is ordered or its record has not come yet.

        DeadlineError if the record is overdue.
        """
        for version, deadline in self._orders.items():
            if version in self._policies or self.departed(version):
                return version
            if self._clock() > deadline:
                raise DeadlineError(
                    f"version {version} was to be loaded, but its record did not come in "
                    f"{POLICY_SECONDS:.0f} s on the run's policies topic"
                )
        return None

    def install(self, version: int, catch_up: Callable[[], None]) -> Installed | None:
        """Load a version that `next` named; None if it has left the window, or leaves it now and
        its files are gone. `catch_up` reads what is announced meanwhile.

        Raises what `Installer.install` does.
        """
        policy, deadline = self._policies.get(version), self._orders.get(version)
        try:
            return None if policy is None else self._installer.install(policy)
        except MissingWeightsError as error:
            catch_up()
            if not self.departed(version):
                raise
            log.warning("%s", error.message)
            return None
        finally:
            if self._orders.get(version) == deadline:  # not ordered once more meanwhile
                self._orders.pop(version, None)

    def departed(self, version: int) -> bool:
        """Whether the version left the window: all its groups are trained."""
        return version < self._window.oldest_live(max(self._policies, default=0))

    def release(self, in_use: Iterable[int]) -> list[int]:
        """Unload versions that left the window and are not `in_use`; returns which."""
        if not self._engine.hosts_many:
            return []
        used = set(in_use)
        gone = [v for v in self.versions if self.departed(v) and v not in used]
        for version in gone:
            self._engine.unload(version)
        return gone
