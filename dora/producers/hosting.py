"""Which policy versions a worker's engine hosts, and how it gets the next one.

Invariant: an engine that hosts one version gets another only while nothing runs; one that hosts
several gets it beside the others, and a version that has left the window goes once nothing of it
runs. A version that has left the window before it could be loaded is not loaded: nobody needs it.
"""

import logging
from collections.abc import Callable, Iterable

from dora.config import Config
from dora.core.window import Window
from dora.errors import DeadlineError, MissingWeightsError
from dora.producers.engines.base import Engine
from dora.producers.installation import Installed, Installer
from dora.schemas.records import Policy

log = logging.getLogger(__name__)

POLICY_SECONDS = 60.0
_REMEMBERED = 128


class Hosting:
    """The versions of one engine; `clock` is monotonic, in seconds."""

    def __init__(
        self, config: Config, engine: Engine, installer: Installer, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._installer = installer
        self._clock = clock
        self._window = Window(config.window.max_staleness, config.window.groups_per_step)
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

    def heard(self, policy: Policy) -> None:
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
        """Whether the version left the window: all its groups are trained, nobody needs it."""
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
