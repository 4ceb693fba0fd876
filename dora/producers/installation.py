"""Putting a policy version into an engine.

Invariant: a worker calls itself ready for a version only after the weights' files had the announced
sizes and checksums, the engine applied them, and the engine's log-probabilities of the canary under
that version were within the tolerance of the trainer's. An update that fails the canary is tried
once more, with a fresh engine or, where an engine hosts many versions, with a fresh adapter: an
engine may report success and hold wrong weights. A version that fails is not hosted.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dora.errors import CanaryError
from dora.producers.engines.base import Engine
from dora.schemas.records import Policy, unpack_logprobs, unpack_tokens
from dora.weights.canary import CanaryResult, check
from dora.weights.store import WeightStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Installed:
    """How an update went: seconds and the canary's differences in nats."""

    version: int
    seconds: float
    canary: CanaryResult
    fresh_engine: bool


class Installer:
    """Fetches, verifies and applies versions to one engine; its first version brings it up."""

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
