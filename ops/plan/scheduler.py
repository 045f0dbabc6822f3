"""The load balancer of plan: the cost of a work tile, and the splits of a balanced plan.

Costs are in units of the time that a compute unit takes to stream one key, all integers, so a kernel that follows
the same steps makes the same plan bit for bit. The steps are one prefix sum over the sequences and then independent
work per (candidate, split): a binary search in the prefix sum and a few additions, then a minimum over the candidates.

    cost(work tile) = keys, rounded up to SPLIT_ALIGNMENT, + tile
                      + 2 partial_rows if its sequence is split           writing an fp32 partial
    cost(SM part)   = sum over its work tiles
    cost(plan)      = max over the SM parts
                      + (partial_rows x n if anything is split)           the last arriver reads n partials; n is at
                                                                          most 1 + ceil(longest / distance of splits).
                                                                          Where partial is not 0 it is 1 and a
                                                                          READ_TOGETHER-th of that
                      + partial x partials                                the whole device writes and reads them all

`tile`, `partial_rows` and `partial` are the arch's `SchedulerCosts`: the first two where a workgroup combines what its
neighbours left, all or the first and the last where a kernel of the whole device does.

Plans of two kinds compete. One has the sequences in order, as follows; the other, for archs whose `SchedulerCosts`
allow it, deals them out of order (`dealing.py`) and is taken where it costs less.

A prefix sum lays the sequences end to end, each as long as its cost unsplit. A candidate (u, family) divides it into u
equal parts, split j at floor(j x total / u). A split within a sequence divides its keys in the proportion in which it
divides its cost. Family 1 rounds it to SPLIT_ALIGNMENT keys, or moves it to the sequence's boundary where the smaller
side would be below min_split, half a fixed cost. Family 0 moves every split to the nearest boundary, so nothing is
split. The cheapest candidate wins; among equals one that splits nothing, then one that uses fewer SM parts.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

from mla_suite import archs
from mla_suite.archs import ArchSpec

SPLIT_ALIGNMENT = 64  # keys
# Fits FlashMLA's fixed times on an H200 (132 SMs): 5.6 us per request at 128 rows where a key takes 25 ns, 5 us at 16
# rows where it takes 33 ns, so about 220 and 150 keys. Further work tiles of a block of the native kernel there were
# measured at about 4 us, where a key takes 28 ns at 128 rows and 35 at fewer: 140 and 115 keys.
TILE_COST = 128
READ_TOGETHER = 16  # partials of a sequence, where a kernel of the whole device reads them
TILE_ROWS = 128  # query rows that a workgroup holds, where an arch says nothing else


class SchedulerCosts(NamedTuple):
    """Figures of an arch that a plan's cost follows from, all in keys."""

    tile: int  # fixed cost of a work tile: loading its queries, and what else it takes before and after its keys
    partial_rows: int  # a tile's partial costs twice as many keys to write, and once to a workgroup that reads it
    partial: int  # cost of each partial to the whole device
    max_dealt: int = 0  # most sequences that a plan may deal out of order; then partial_rows is 0


def scheduler_costs(arch: ArchSpec | None, num_q_rows: int) -> SchedulerCosts:
    """Costs on the arch that a plan is made for, with this number of query rows per sequence; None is any other device.

    Without an arch of its own a plan's partials are combined as by one workgroup, whose time grows with the partials of
    a sequence. An arch whose whole device combines all partials at once says what each costs there.
    """
    kernels = None if arch is None else archs.kernels(arch)
    if kernels is not None:
        return kernels.scheduler_costs(num_q_rows)
    return workgroup_costs(num_q_rows)


def workgroup_costs(num_q_rows: int) -> SchedulerCosts:
    """Costs where one workgroup combines the partials of a sequence."""
    return SchedulerCosts(tile_cost(num_q_rows), min(num_q_rows, TILE_ROWS), 0)


def tile_rows(arch: ArchSpec | None) -> int:
    """Query rows that a workgroup of decode holds."""
    kernels = None if arch is None else archs.kernels(arch)
    return TILE_ROWS if kernels is None else kernels.tile_rows


class Splits(NamedTuple):
    """Split j of a plan begins before key `key[j]` of sequence `sequence[j]`; j is 0 (start) to num_sm_parts (end)."""

    sequence: torch.Tensor  # [num_sm_parts + 1]
    key: torch.Tensor  # [num_sm_parts + 1], 0 at a boundary between sequences


def tile_cost(num_q_rows: int) -> int:
    """Fixed cost of a work tile, in keys, where loading q is like as many keys as a tile has rows."""
    return TILE_COST + min(num_q_rows, TILE_ROWS)


Keys = TypeVar("Keys", int, torch.Tensor)


def round_up(keys: Keys) -> Keys:
    """`keys` rounded up to SPLIT_ALIGNMENT."""
    return (keys + SPLIT_ALIGNMENT - 1) // SPLIT_ALIGNMENT * SPLIT_ALIGNMENT


def balanced_splits(kv_lens: torch.Tensor, costs: SchedulerCosts, num_sm_parts: int) -> tuple[Splits, torch.Tensor]:
    """The splits of the cheapest candidate, and its cost. kv_lens [batch] int64, not negative."""
    fixed, partial_rows, partial, _ = costs
    keys = torch.cat((round_up(kv_lens), kv_lens.new_zeros(1)))
    ends = (keys[:-1] + fixed).cumsum(0)
    cost_sum = torch.cat((kv_lens.new_zeros(1), ends))

    used = torch.arange(1, num_sm_parts + 1, device=kv_lens.device)[:, None]
    point = torch.arange(num_sm_parts + 1, device=kv_lens.device)
    position = cost_sum[-1] * torch.minimum(point, used) // used
    sequence = torch.searchsorted(ends, position, right=True)
    offset, length = position - cost_sum[sequence], keys[sequence]

    key = offset * length // (length + fixed)
    near = (key + SPLIT_ALIGNMENT // 2) // SPLIT_ALIGNMENT * SPLIT_ALIGNMENT
    min_split = round_up(fixed // 2)
    too_small = (near < min_split) | (length - near < min_split)
    unsplit = sequence + (2 * offset > length + fixed)
    split = sequence + (too_small & (2 * near > length))
    sequences = torch.stack((unsplit, split))  # [family, used, point]
    inside = torch.stack((torch.zeros_like(near), torch.where(too_small, 0, near)))

    cost = _cost(cost_sum, sequences, inside, fixed, partial_rows)
    spacing = ((cost_sum[-1] + used - 1) // used)[:, 0]
    combine = partial_rows * (1 + (keys.amax() + spacing - 1) // spacing)
    if partial > 0:
        combine = partial_rows + combine // READ_TOGETHER
    cost = (cost + torch.where((inside > 0).any(-1), combine, 0) + partial * _partials(sequences, inside)).reshape(-1)
    # The index in the low digits makes the first of equals the minimum on every device.
    best = (cost * cost.numel() + torch.arange(cost.numel(), device=cost.device)).amin()
    at = (best % cost.numel()).reshape(1)
    splits = Splits(sequences.flatten(0, 1).index_select(0, at)[0], inside.flatten(0, 1).index_select(0, at)[0])
    return splits, best // cost.numel()


def _cost(
    cost_sum: torch.Tensor, sequence: torch.Tensor, inside: torch.Tensor, fixed: int, partial_rows: int
) -> torch.Tensor:
    """Cost of the slowest SM part of each candidate [family, used]."""
    interior = (inside > 0).long()
    position = cost_sum[sequence] + interior * (fixed + inside)
    first, last = interior[..., :-1], interior[..., 1:]
    same_work_tile = first * last * (sequence[..., :-1] == sequence[..., 1:])
    load = position.diff() + first * fixed + 2 * partial_rows * (first + last - same_work_tile)
    return torch.where(position.diff() == 0, 0, load).amax(-1)


def _partials(sequence: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Partials of each candidate [family, used]: one for each split within a sequence, one for each such sequence."""
    key, last_key = inside[..., 1:], inside[..., :-1]
    same = sequence[..., 1:] == sequence[..., :-1]
    new = (key > 0) & ~(same & (key == last_key))
    first = new & ~(same & (last_key > 0))
    return new.sum(-1) + first.sum(-1)
