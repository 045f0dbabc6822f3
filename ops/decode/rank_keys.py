"""How many keys of a sequence lie on a rank, where runs of `interleave` keys are dealt to the ranks in turn."""

from __future__ import annotations

import torch


def keys_of_rank(lens: torch.Tensor, world_size: int, rank: int, interleave: int) -> torch.Tensor:
    """Number of the rank's keys among the first `lens` keys of a sequence, none of a negative number.

    The key at global position p belongs to rank p // interleave % world_size. Any shape; lens' dtype.
    """
    period = world_size * interleave
    lens = lens.clamp(min=0)
    rest = (lens % period - rank * interleave).clamp(0, interleave)
    return lens // period * interleave + rest
