"""A rank's share of the latents of all sequences, with the bookkeeping of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mla_suite.core import checks
from mla_suite.distributed.parallel import KeyShard
from mla_suite.models.cache import PagedLatentCache, Step
from mla_suite.models.config import LATENT, ROPE
from mla_suite.models.pages import PagePool


class ContextParallelCache:
    """The paged latent cache of one rank: as `PagedLatentCache`, holding only the keys that the rank owns.

    Sequences and their lengths are the same on every rank. `append` returns the rank's index tensors: seq_lens and
    positions are global, block_table lists the rank's pages, and slot_mapping is -1 for tokens of other ranks, which
    `append_kv` skips. Running out of pages raises RuntimeError before a page changes, on all ranks at once where they
    have the same `num_pages`: when rank 0, which never has fewer keys than another, would run out.

    >>> cache = ContextParallelCache(1, num_pages=4, page_size=16, shard=KeyShard(world=2, rank=1))
    >>> step = cache.append([cache.allocate()], [5])
    >>> step.seq_lens.tolist(), step.slot_mapping.tolist()
    ([5], [-1, 0, -1, 1, -1])
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        *,
        shard: KeyShard,
        kv_format: str = "bf16",
        head_dim: int = LATENT + ROPE,
        device: torch.device | str | None = None,
    ) -> None:
        shard.check()
        self.shard = shard
        self._own = PagedLatentCache(
            num_layers, num_pages, page_size, kv_format=kv_format, head_dim=head_dim, device=device
        )
        self._first_shard = shard._replace(rank=0)
        self._first = PagePool(num_pages, page_size)  # rank 0's pages: each change is tried on them first
        self._lengths: dict[int, int] = {}

    @property
    def layers(self) -> tuple[torch.Tensor, ...]:
        return self._own.layers

    @property
    def page_size(self) -> int:
        return self._own.page_size

    @property
    def device(self) -> torch.device:
        return self._own.device

    @property
    def free_pages(self) -> int:
        """Pages that are free on every rank."""
        return self._first.free_pages

    def length(self, sequence: int) -> int:
        """Tokens of the sequence on all ranks."""
        self._own.length(sequence)
        return self._lengths[sequence]

    def allocate(self, tokens: int = 0) -> int:
        """A new empty sequence with pages reserved for this rank's share of `tokens` tokens."""
        tokens = checks.as_int("allocate", "tokens", tokens)
        if tokens < 0:
            raise ValueError(f"allocate: {tokens} tokens; reserve 0 or more")
        self._first.allocate(self._local(tokens, self._first_shard))
        sequence = self._own.allocate(self._local(tokens, self.shard))
        self._lengths[sequence] = 0
        return sequence

    def free(self, sequence: int) -> None:
        self._first.free(sequence)
        self._own.free(sequence)
        del self._lengths[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens from global position `length` on, as after a rejected speculation."""
        length = checks.as_int("truncate", "length", length)
        if not 0 <= length <= self.length(sequence):
            raise ValueError(
                f"truncate: length {length} of a sequence of {self.length(sequence)}; give 0 to {self.length(sequence)}"
            )
        self._first.truncate(sequence, self._local(length, self._first_shard))
        self._own.truncate(sequence, self._local(length, self.shard))
        self._lengths[sequence] = length

    def append(self, sequences: Sequence[int], counts: Sequence[int], *, width: int | None = None) -> Step:
        """Make room for `counts[b]` new tokens of `sequences[b]`, of which this rank stores its own.

        `width` fixes the block table's width in this rank's pages; None takes the longest sequence.
        """
        counts = [checks.as_int("append", f"counts[{at}]", count) for at, count in enumerate(counts)]
        if len(sequences) != len(counts):
            given = f"{len(sequences)} sequences and {len(counts)} counts"
            raise ValueError(f"append: {given}; give one count per sequence")
        starts = [self.length(sequence) for sequence in sequences]
        if any(count < 0 for count in counts):
            raise ValueError(f"append: counts {list(counts)}; a count is 0 or more (use truncate to drop tokens)")
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        first, local = (
            [self._local(end, shard) - self._local(start, shard) for start, end in zip(starts, ends, strict=True)]
            for shard in (self._first_shard, self.shard)
        )
        self._own._check_width(sequences, local, width)
        self._first._extend(sequences, first)
        step = self._own.append(sequences, local, width=width)
        self._lengths.update(zip(sequences, ends, strict=True))
        spans = [range(start, end) for start, end in zip(starts, ends, strict=True)]
        positions = torch.tensor([position for span in spans for position in span], dtype=torch.int64, device="cpu")
        slots = torch.full((positions.shape[0],), -1, device=self.device)
        own = self.shard.owns(positions).nonzero()[:, 0].to(self.device)
        slots[own] = step.slot_mapping  # which has the rank's own tokens in this order
        lengths = torch.tensor(ends, dtype=torch.int32, device="cpu")
        return Step(step.block_table, lengths.to(self.device), slots, positions.to(self.device))

    @staticmethod
    def _local(tokens: int, shard: KeyShard) -> int:
        return int(shard.local_lens(torch.tensor(tokens, device="cpu")))
