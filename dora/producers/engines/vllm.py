"""vLLM as a rollout engine with the full weights of one version.

Invariant: all of a request's tokens come from one set of weights: these change only while nothing
runs, with the prefix, multimodal and encoder caches emptied after.
"""

from collections.abc import Sequence
from pathlib import Path

from dora.errors import DoraError, WeightsError
from dora.producers.engines.base import check_directory
from dora.producers.engines.vllm_core import VllmCore
from dora.producers.engines.vllm_setup import pack_tied_heads


class VllmEngine(VllmCore):
    """One version at a time; arguments as of `VllmCore`.

    The first `restart` or `load` starts it with a Hugging Face model directory. `load` and
    `restart` raise `PolicyError` where vLLM cannot run the model.
    """

    _directory = Path()

    def load(self, directory: Path, version: int) -> None:
        """Apply weights in place; see `Engine.load`."""
        if self._requests:
            raise DoraError(
                f"weights of version {version} cannot be loaded while {len(self._requests)} "
                "requests run",
                hint="Abort them or let them finish first.",
            )
        if (lacking := check_directory(directory)) is not None:
            raise WeightsError(f"weights of version {version}: {lacking}")
        if self._llm is None:
            self._start(directory, version)
            return
        self.version = None
        try:
            self._reload(directory)
        except Exception as error:
            raise WeightsError(
                f"vLLM could not apply the weights of version {version} in {directory}: "
                f"{type(error).__name__}: {error}",
                hint="Shapes and names must be those of the model that the engine started with.",
            ) from error
        self._directory = directory
        self.version = version

    def restart(self, directory: Path, version: int) -> None:
        """Build a fresh engine; running requests are dropped. See `Engine.restart`."""
        self._requests.clear()
        self._told.clear()
        self._start(directory, version)

    def score(self, token_ids: Sequence[int], version: int | None = None) -> list[float]:
        """Log-probabilities of a given sequence; see `Engine.score`."""
        if self._requests:
            raise DoraError(f"cannot score while {len(self._requests)} requests run")
        return self._score(list(token_ids), None)

    def _start(self, directory: Path, version: int) -> None:
        if (lacking := check_directory(directory)) is not None:
            raise WeightsError(f"weights of version {version}: {lacking}")
        self._launch(directory)
        self._directory = directory
        self.version = version

    def _reload(self, directory: Path) -> None:
        llm = self._llm
        with self._execution():
            try:
                llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
            except TypeError:
                # Versions before weights_path took the path from the model's configuration.
                changed = {"model_config": {"model": str(directory)}}
                llm.collective_rpc("update_config", args=(changed,))
                llm.collective_rpc("reload_weights")
            llm.apply_model(pack_tied_heads)
        if llm.reset_prefix_cache() is False:
            raise RuntimeError("the prefix cache could not be emptied")
        for reset in ("reset_mm_cache", "reset_encoder_cache"):
            if hasattr(llm, reset):
                getattr(llm, reset)()

    def _revive(self) -> None:
        version = self.version
        assert version is not None
        self._start(self._directory, version)
