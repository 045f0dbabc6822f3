"""What an item costs, in units of the time a compute unit takes to stream one key, and where a balanced plan cuts.

All integers, so a device kernel that follows the same steps makes the same plan bit for bit. The steps are one prefix
sum over the sequences and then independent work per (candidate, cut): a binary search in the prefix sum and a few
additions, then a minimum over the candidates.

    cost(item)   = keys, rounded up to GRANULE, + FIXED + r           r = min(rows, 128): loading q is like r keys
                   + 2 r if its sequence is split                      writing an fp32 partial
    cost(worker) = sum over its items
    cost(plan)   = max over the workers + r n if anything is split     the last arriver reads n partials; n bounded by
                                                                       1 + ceil(longest / spacing of the cuts)

Sequences are laid end to end on a line, each as long as it costs unsplit. A candidate (u, family) cuts the line into u
equal parts, cut j at floor(j x length / u). A cut within a sequence divides its keys in the proportion in which it
divides its length on the line; family 1 rounds it to GRANULE keys, or moves it to the sequence's boundary when a piece
beside it would be shorter than half a fixed cost (no crumbs); family 0 moves every cut to the nearest boundary, so
nothing is split. The cheapest candidate wins; among equals one that splits nothing, then one that uses fewer workers.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

GRANULE = 64
# Fits FlashMLA's fixed times on an H200 (132 SMs): 5.6 us per request at 128 rows where a key takes 25 ns, 5 us at 16
# rows where it takes 33 ns, so about 220 and 150 keys.
FIXED = 128
ROW_TILE = 128


class Cuts(NamedTuple):
    """Cut j of a plan lies before key `key[j]` of sequence `sequence[j]`; j from 0 (the start) to workers (the end)."""

    sequence: torch.Tensor  # [workers + 1]
    key: torch.Tensor  # [workers + 1], 0 at a boundary between sequences


def item_cost(rows: int) -> int:
    """Fixed cost of an item, in keys."""
    return FIXED + min(rows, ROW_TILE)


Keys = TypeVar("Keys", int, torch.Tensor)


def round_up(keys: Keys) -> Keys:
    """`keys` up to whole granules."""
    return (keys + GRANULE - 1) // GRANULE * GRANULE


def balanced_cuts(kv_lens: torch.Tensor, rows: int, workers: int) -> Cuts:
    """The cuts of the cheapest candidate. kv_lens [batch] int64, not negative."""
    fixed, tile_rows = item_cost(rows), min(rows, ROW_TILE)
    keys = torch.cat((round_up(kv_lens), kv_lens.new_zeros(1)))
    ends = (keys[:-1] + fixed).cumsum(0)
    line = torch.cat((kv_lens.new_zeros(1), ends))

    used = torch.arange(1, workers + 1, device=kv_lens.device)[:, None]
    cut = torch.arange(workers + 1, device=kv_lens.device)
    place = line[-1] * torch.minimum(cut, used) // used
    sequence = torch.searchsorted(ends, place, right=True)
    offset, length = place - line[sequence], keys[sequence]

    key = offset * length // (length + fixed)
    near = (key + GRANULE // 2) // GRANULE * GRANULE
    crumb = round_up(fixed // 2)
    crumbs = (near < crumb) | (length - near < crumb)
    unsplit = sequence + (2 * offset > length + fixed)
    split = sequence + (crumbs & (2 * near > length))
    sequences = torch.stack((unsplit, split))  # [family, used, cut]
    inside = torch.stack((torch.zeros_like(near), torch.where(crumbs, 0, near)))

    cost = _cost(line, sequences, inside, fixed, tile_rows)
    spacing = ((line[-1] + used - 1) // used)[:, 0]
    merge = tile_rows * (1 + (keys.amax() + spacing - 1) // spacing)
    cost = (cost + torch.where((inside > 0).any(-1), merge, 0)).reshape(-1)
    # The index in the low digits makes the first of equals the minimum on every device.
    best = (cost * cost.numel() + torch.arange(cost.numel(), device=cost.device)).amin() % cost.numel()
    at = best.reshape(1)
    return Cuts(sequences.flatten(0, 1).index_select(0, at)[0], inside.flatten(0, 1).index_select(0, at)[0])


def _cost(line: torch.Tensor, sequence: torch.Tensor, inside: torch.Tensor, fixed: int, tile_rows: int) -> torch.Tensor:
    """Cost of the slowest worker of each candidate [family, used]."""
    interior = (inside > 0).long()
    place = line[sequence] + interior * (fixed + inside)
    first, last = interior[..., :-1], interior[..., 1:]
    same_item = first * last * (sequence[..., :-1] == sequence[..., 1:])
    load = place.diff() + first * fixed + 2 * tile_rows * (first + last - same_item)
    return torch.where(place.diff() == 0, 0, load).amax(-1)
