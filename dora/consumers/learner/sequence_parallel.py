"""Ranks that share each sequence: DeepSpeed's Ulysses (arXiv 2309.14509).

Each rank of a group holds consecutive positions of a micro-batch of one sequence. Attention
exchanges them for some of the heads over all positions, so a rank's activations are those of its
positions. Every rank gets all log-probabilities and computes the whole loss, but its gradient is
that of its own: the gradients of a group add up to that of the micro-batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from dora.errors import ConfigError, PolicyError, first_line


@dataclass(frozen=True, slots=True)
class Positions:
    """This rank's part of a micro-batch."""

    token_ids: torch.Tensor
    """[1, width / ranks]; the sequence is padded on the right to a multiple of the ranks."""
    position_ids: torch.Tensor
    """The same shape: where these tokens lie in the sequence."""
    own: torch.Tensor
    """[n]: which of the N generated tokens are predicted here."""
    places: torch.Tensor
    """[n]: index in `token_ids` of the position that predicts each of them."""


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The `size` ranks that share sequences with this one, the `rank`-th of them."""

    group: Any
    rank: int
    size: int

    def part(self, token_ids: torch.Tensor, places: torch.Tensor) -> Positions:
        """This rank's part of a micro-batch of one sequence; see MicroBatch for the arguments."""
        if len(token_ids) != 1:
            raise PolicyError(f"{len(token_ids)} sequences in a pass whose positions are shared")
        width = -(-token_ids.shape[1] // self.size)
        begin = self.rank * width
        padded = functional.pad(token_ids, (0, width * self.size - token_ids.shape[1]))
        own = torch.nonzero(places // width == self.rank).squeeze(-1)
        return Positions(
            token_ids=padded[:, begin : begin + width],
            position_ids=torch.arange(begin, begin + width, device=token_ids.device)[None],
            own=own,
            places=places[own] - begin,
        )

    def whole(self, found: torch.Tensor, own: torch.Tensor, count: int) -> torch.Tensor:
        """The values of all `count` tokens, of which this rank has `found` those that are its
        `own`; only these have a gradient."""
        mine = found.new_zeros(count, *found.shape[1:]).index_copy(0, own, found)
        every = mine.detach().clone()
        torch.distributed.all_reduce(every, group=self.group)
        return mine + (every - mine.detach())


def share_sequences(model: Any, size: int) -> SequenceGroup | None:
    """Make groups of `size` neighbouring ranks that share sequences, and have `model`'s attention
    exchange them (in this process from now on); None for 1.

    Raises ConfigError if the ranks do not divide into such groups, PolicyError if the model's
    attention heads do not divide among them.
    """
    if size == 1:
        return None
    world = torch.distributed.get_world_size()
    if world % size:
        raise ConfigError(
            f"trainer.sequence_parallel = {size} does not divide the {world} trainer ranks",
            hint="Set trainer.ranks to a multiple of it.",
        )
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
        try:
            UlyssesSPAttentionHF.register_with_transformers(
                model_name_or_path=model,
                core_attn_implementation=model.config._attn_implementation,
                sequence_parallel_size=size,
                micro_batch_size=1,
                seq_length_is_variable=True,
            )
        except ValueError as error:
            raise PolicyError(f"trainer.sequence_parallel = {size}: {first_line(error)}") from error
    group = parallel_state_sp.get_sequence_parallel_group()
    return SequenceGroup(group, torch.distributed.get_rank(group), size)
