"""The weights that generated what is trained now.

Invariant: what is kept for a version are exactly those of its weights that training changes. With
them the trainer's log-probabilities of a trajectory can be compared with the engine's under the
same version, however stale it is: what differs is the mismatch between the two programs, and not
the training in between.
"""

import torch

MEMORY_BYTES = 2**30
"""Larger policies keep no copies: their mismatch is measured on the current version only."""


class PastWeights:
    """Copies of the parameters of the last versions, at most `versions` of them."""

    def __init__(self, versions: int) -> None:
        self._versions = versions
        self._kept: dict[int, dict[str, torch.Tensor]] = {}

    def keep(self, version: int, module: torch.nn.Module) -> None:
        """Copy the module's parameters, which are those of `version`, if memory allows; frozen ones
        are the same in every version."""
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        size = sum(p.numel() * p.element_size() for p in trained.values())
        if size * self._versions > MEMORY_BYTES:
            return
        self._kept[version] = {name: p.detach().clone() for name, p in trained.items()}
        for old in sorted(self._kept)[: -self._versions or None]:
            del self._kept[old]

    def of(self, version: int) -> dict[str, torch.Tensor] | None:
        """The version's parameters by name, if they are kept."""
        return self._kept.get(version)
