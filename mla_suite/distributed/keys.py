"""Which rank of a context-parallel group holds which key of a sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mla_suite.ops.decode.rank_keys import keys_of_rank


class KeyShard(NamedTuple):
    """One rank's share of every sequence's keys: runs of `interleave` keys are dealt to the ranks in turn.

    The key at global position p belongs to rank (p // interleave) % world. interleave 1 deals single keys, and the
    page size deals whole pages. A rank keeps its keys in order, without gaps: its j-th key is local position j.
    """

    world: int = 1
    rank: int = 0
    interleave: int = 1

    def check(self) -> None:
        """Raise ValueError, in one sentence, for a share that cannot exist."""
        if self.world < 1 or not 0 <= self.rank < self.world or self.interleave < 1:
            raise ValueError(
                f"KeyShard: rank {self.rank} of {self.world} with interleave {self.interleave}; ranks are 0 to "
                "world - 1, and interleave is 1 or more"
            )

    def local_lens(self, lens: torch.Tensor) -> torch.Tensor:
        """Number of this rank's keys among the first `lens` keys of a sequence; any shape, lens' dtype."""
        return keys_of_rank(lens, *self)

    def owns(self, positions: torch.Tensor) -> torch.Tensor:
        """bool, positions' shape: whether the keys at these global positions lie on this rank."""
        return positions // self.interleave % self.world == self.rank

    def local_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Local positions of keys that this rank owns, by their global positions; positions' shape and dtype."""
        return positions // (self.world * self.interleave) * self.interleave + positions % self.interleave
