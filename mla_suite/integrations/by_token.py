"""Batches whose sequences have different numbers of query tokens, as batches of single tokens.

The SM parts of a plan are of as many tiles of query rows as the longest sequence has. Where most sequences have fewer,
as when a short prompt joins a batch of decodes, the compute units of the other tiles have nothing to do for them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mla_suite.launch import current_arch
from mla_suite.ops.plan import scheduler

MOST_ENTRIES = 2**25
"""Of a table with a row for each token, 128 MiB: beyond that a batch stays as it is."""


class Batch(NamedTuple):
    """Arguments of `plan` and `decode`. Without cu_seqlens_q every sequence has max_seqlen_q query tokens."""

    seq_lens: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    max_seqlen_q: int


def arranged(batch: Batch, tokens: int, num_heads: int) -> Batch:
    """The same tokens with a sequence for each, where that saves time; else the batch as it is.

    No tensor is read on the host, so the choice counts row tiles as if all sequences had the same number of keys: the
    compute units of a tile walk the keys of every sequence of the batch, whether it has rows in that tile or not.

    tokens  query tokens. Those behind the last of cu_seqlens_q pad the batch, and see what the last one sees
    """
    if batch.cu_seqlens_q is None:
        return batch
    sequences, width = batch.block_table.shape
    tile_rows = scheduler.tile_rows(current_arch(batch.seq_lens))
    of_token, of_sequence = (-(-q_len * num_heads // tile_rows) for q_len in (1, batch.max_seqlen_q))
    if tokens * of_token >= sequences * of_sequence or tokens * width > MOST_ENTRIES:
        return batch
    ends = batch.cu_seqlens_q[1:]
    token = torch.arange(tokens, dtype=ends.dtype, device=ends.device)
    owner = torch.searchsorted(ends, token, right=True).clamp_(max=sequences - 1)
    later = (ends[owner] - 1 - token).clamp_(min=0)
    return Batch(batch.seq_lens[owner] - later, batch.block_table[owner], None, 1)
