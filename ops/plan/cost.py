"""What an item costs, in units of the time a compute unit takes to stream one key, and where a balanced plan cuts.

All integers, so a device kernel that follows the same steps makes the same plan bit for bit. The steps are one prefix
sum over the sequences and then independent work per (candidate, cut): a binary search in the prefix sum and a few
additions, then a minimum over the candidates.

    cost(item)   = keys, rounded up to GRANULE, + item
                   + 2 r if its sequence is split                      writing an fp32 partial
    cost(worker) = sum over its items
    cost(plan)   = max over the workers + (r n if anything is split)   the last arriver reads n partials; n bounded by
                                                                       1 + ceil(longest / spacing of the cuts)
                 + m x partials                                        the whole device writes and reads them all

Three figures of an arch, see `Figures`: `item` and r where a workgroup merges what its neighbours left, `item` and m
where a kernel of the whole device does.

Sequences are laid end to end on a line, each as long as it costs unsplit. A candidate (u, family) cuts the line into u
equal parts, cut j at floor(j x length / u). A cut within a sequence divides its keys in the proportion in which it
divides its length on the line; family 1 rounds it to GRANULE keys, or moves it to the sequence's boundary when a piece
beside it would be shorter than half a fixed cost (no crumbs); family 0 moves every cut to the nearest boundary, so
nothing is split. The cheapest candidate wins; among equals one that splits nothing, then one that uses fewer workers.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

from mla_suite.core.arch import Arch

GRANULE = 64
# Fits FlashMLA's fixed times on an H200 (132 SMs): 5.6 us per request at 128 rows where a key takes 25 ns, 5 us at 16
# rows where it takes 33 ns, so about 220 and 150 keys. The second and further items of a block of our own kernel for
# sm_90 were measured at about 4 us, where a key takes 28 ns at 128 rows and 35 at fewer: 140 and 115 keys.
FIXED = 128
ROW_TILE = 128
# On sm_90, of a partial to the device: a row's 2048 bytes written and read at 4.3 TB/s each way are 0.95 ns, a key
# takes a block 22 ns where it is alone and 27 where all are busy. So 23 to 28 rows are a key's time.
SHARED_ROWS_PER_KEY = 24
MOST_ROWS = 2**16  # more count as so many, which keeps sums far from 64 bits


class Figures(NamedTuple):
    """What a cost follows from, all in keys."""

    item: int  # fixed cost of an item: loading its queries, and what else it takes before and after its keys
    tile_rows: int  # r: query rows of a tile, each as a key to whoever writes or reads the tile's partial
    shared: int  # m: of each partial to the whole device


def figures(arch: Arch | None, rows: int) -> Figures:
    """Of the arch that a plan is made for, with so many query rows per sequence; None is any other device.

    There a plan's cuts are merged as by one workgroup, whose time grows with the partials of a sequence. On sm_90 all
    SMs merge all partials at once, so each costs little and their number in the whole batch counts.
    """
    if arch is not None and arch.name == "sm_90":
        return Figures(FIXED, 0, -(-min(rows, MOST_ROWS) // SHARED_ROWS_PER_KEY))
    return Figures(item_cost(rows), min(rows, ROW_TILE), 0)


class Cuts(NamedTuple):
    """Cut j of a plan lies before key `key[j]` of sequence `sequence[j]`; j from 0 (the start) to workers (the end)."""

    sequence: torch.Tensor  # [workers + 1]
    key: torch.Tensor  # [workers + 1], 0 at a boundary between sequences


def item_cost(rows: int) -> int:
    """Fixed cost of an item, in keys, where loading q is like as many keys as a tile has rows."""
    return FIXED + min(rows, ROW_TILE)


Keys = TypeVar("Keys", int, torch.Tensor)


def round_up(keys: Keys) -> Keys:
    """`keys` up to whole granules."""
    return (keys + GRANULE - 1) // GRANULE * GRANULE


def balanced_cuts(kv_lens: torch.Tensor, figures: Figures, workers: int) -> Cuts:
    """The cuts of the cheapest candidate. kv_lens [batch] int64, not negative."""
    fixed, tile_rows, shared = figures
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
    cost = (cost + torch.where((inside > 0).any(-1), merge, 0) + shared * _partials(sequences, inside)).reshape(-1)
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


def _partials(sequence: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Partials of each candidate [family, used]: one for each cut within a sequence, one for each such sequence."""
    key, last_key = inside[..., 1:], inside[..., :-1]
    same = sequence[..., 1:] == sequence[..., :-1]
    cut = (key > 0) & ~(same & (key == last_key))
    first = cut & ~(same & (last_key > 0))
    return cut.sum(-1) + first.sum(-1)
