"""vLLM as a rollout engine for LoRA: one base model, and an adapter for each version.

Each request is pinned to the adapter of its version until it ends, and an adapter is removed only
when no request names it. vLLM's ids of adapters are never reused, because its prefix cache goes by
name and path. An adapter that cannot be loaded leaves everything else as it was.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from dora.errors import DoraError, PolicyError, WeightsError
from dora.producers.engines.vllm import VllmCore
from dora.weights.adapters import check_adapter, model_shapes

log = logging.getLogger(__name__)

_CPU_BATCHED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class _Adapter:
    """A version's adapter in vLLM."""

    number: int
    directory: Path

    def request(self) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"adapter-{self.number}", self.number, str(self.directory))


class VllmAdapterEngine(VllmCore):
    """Hosts up to `adapters` versions of `rank` on the model in `base`; the rest as of `VllmCore`.

    The first `restart` or `load` starts it. When all places are taken, the oldest version that no
    request names makes room. Raises `PolicyError` for a rank that vLLM has no room for; `load` and
    `restart` raise it where vLLM cannot run the base model.
    """

    hosts_many = True

    def __init__(self, base: Path, *, rank: int, adapters: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._base = base
        self._rank = rank
        self._places = adapters
        self._adapters: dict[int, _Adapter] = {}
        self._numbers = 0
        self._shapes = model_shapes(base)
        self._arguments |= {
            "enable_lora": True,
            "max_loras": adapters,
            "max_cpu_loras": adapters,
            "max_lora_rank": _rank_of_vllm(rank),
            # One seat more, so that a canary does not wait for a response to end.
            "max_num_seqs": self.capacity + 1,
        }
        if self._on_cpu:
            # vLLM's CPU kernels copy a layer's adapter for each token of a batch.
            self._arguments["max_num_batched_tokens"] = max(
                self.max_model_len, self.capacity + 1, _CPU_BATCHED_TOKENS
            )

    @property
    def versions(self) -> frozenset[int]:
        return frozenset(self._adapters)

    @property
    def metrics(self) -> dict[str, float]:
        """Places for adapters, so that no more versions are ordered than there is room for."""
        return {"adapters": float(self._places)}

    def load(self, directory: Path, version: int) -> None:
        """Add the adapter of a version, or replace it.

        Raises `WeightsError`, naming version and reason, where the adapter cannot be loaded, and
        `DoraError` while requests of this version run or all places are taken by such.
        """
        if (count := self._running(version)) > 0:
            raise DoraError(
                f"the adapter of version {version} cannot be replaced while {count} of its "
                "requests run"
            )
        try:
            check_adapter(directory, self._shapes, self._rank)
        except WeightsError as error:
            raise WeightsError(f"adapter of version {version}: {error.message}") from error
        if self._llm is None:
            self._launch(self._base)
        self.unload(version)
        self._make_room(version)
        self._add(directory, version)

    def restart(self, directory: Path, version: int) -> None:
        """Add the adapter once more under a fresh id; what other versions run goes on.

        Raises as `load` does. (A fresh engine would drop the requests of all versions; it takes
        over only where vLLM itself fails.)
        """
        self.load(directory, version)

    def unload(self, version: int) -> None:
        adapter = self._adapters.get(version)
        if adapter is None:
            return
        if (count := self._running(version)) > 0:
            raise DoraError(f"version {version} cannot be unloaded while {count} requests name it")
        del self._adapters[version]
        self.version = max(self._adapters, default=None)
        self._llm.remove_lora(adapter.number)

    def score(self, token_ids: Sequence[int], version: int | None = None) -> list[float]:
        version = self.version if version is None else version
        if version is None or version not in self._adapters:
            raise DoraError(
                f"cannot score with version {version}: it is not hosted "
                f"({sorted(self._adapters) or 'none is'})"
            )
        if (count := self._running(version)) > 0:
            raise DoraError(f"cannot score while {count} requests of version {version} run")
        return self._score(list(token_ids), self._adapters[version].request())

    def close(self) -> None:
        super().close()
        self._adapters.clear()

    def _running(self, version: int) -> int:
        return sum(named == version for named in self._requests.values())

    def _adapter_of(self, version: int | None) -> Any:
        version = self.version if version is None else version
        adapter = None if version is None else self._adapters.get(version)
        if adapter is None:
            hosted = ", ".join(map(str, sorted(self._adapters)))
            raise WeightsError(f"version {version} is not hosted (hosted: {hosted})")
        return adapter.request()

    def _make_room(self, version: int) -> None:
        if len(self._adapters) < self._places:
            return
        idle = [hosted for hosted in self._adapters if not self._running(hosted)]
        if not idle:
            raise DoraError(
                f"there is no place for the adapter of version {version}: requests of versions "
                f"{', '.join(map(str, sorted(self._adapters)))} run",
                hint="Raise rollout.adapters.",
            )
        log.info("version %d makes room for version %d", min(idle), version)
        self.unload(min(idle))

    def _add(self, directory: Path, version: int) -> None:
        self._numbers += 1
        adapter = _Adapter(self._numbers, directory)
        try:
            with self._execution():
                self._llm.add_lora(adapter.request())
        except Exception as error:
            self._llm.remove_lora(adapter.number)
            raise WeightsError(
                f"vLLM could not load the adapter of version {version} in {directory}: "
                f"{type(error).__name__}: {error}",
                hint="policy.lora.target_modules must be layers that this vLLM can adapt.",
            ) from error
        self._adapters[version] = adapter
        self.version = max(self._adapters)

    def _revive(self) -> None:
        adapters = dict(self._adapters)
        self._launch(self._base)
        for version, adapter in sorted(adapters.items()):
            try:
                self._add(adapter.directory, version)
            except WeightsError as error:
                log.warning("version %d is not hosted any more: %s", version, error.message)
        if self.version is None:
            raise WeightsError(
                f"after a failure of vLLM none of the adapters {sorted(adapters)} can be loaded"
            )


def _rank_of_vllm(rank: int) -> int:
    """The smallest of vLLM's ranks that holds `rank`."""
    from vllm.config import lora

    ranks = get_args(getattr(lora, "MaxLoRARanks", None)) or (8, 16, 32, 64, 128, 256, 320, 512)
    fitting = [known for known in sorted(ranks) if known >= rank]
    if not fitting:
        raise PolicyError(
            f"policy.lora.rank = {rank} is more than vLLM serves ({max(ranks)})",
            hint="Lower policy.lora.rank.",
        )
    return int(fitting[0])
