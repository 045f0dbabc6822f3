"""The definition of plan. Tensor code without host reads, so it runs, and is captured, on any device."""

from __future__ import annotations

from typing import Any

import torch

from mla_suite.launch import current_arch
from mla_suite.ops.plan import dealing
from mla_suite.ops.plan import metadata as words
from mla_suite.ops.plan.metadata import OPEN
from mla_suite.ops.plan.scheduler import (
    SPLIT_ALIGNMENT,
    SchedulerCosts,
    Splits,
    balanced_splits,
    round_up,
    scheduler_costs,
)
from mla_suite.ops.plan.window import first_key, origin


def run(config: None, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
    batch = args.seq_lens.shape[0]
    sizes = dict(max_seqlen_kv=args.max_seqlen_kv, num_splits=args.num_splits, split_size=args.split_size)
    layout = words.layout_for(batch, args.num_sm_parts, **sizes)
    kv_lens = args.seq_lens.long()
    q_lens = args.max_seqlen_q if args.cu_seqlens_q is None else args.cu_seqlens_q.diff()
    kv_lens = kv_lens - origin(first_key(kv_lens, q_lens, args.window_left))
    if args.cu_seqlens_q is not None:
        kv_lens = torch.where(args.cu_seqlens_q.diff() > 0, kv_lens, 0)  # no query token, nothing to read
    costs = scheduler_costs(current_arch(args.seq_lens), args.num_heads * args.max_seqlen_q)
    capacity = int(layout.work_tile_capacity)
    if args.num_splits > 0:
        splits = torch.full_like(kv_lens, args.num_splits)
        parts = _uniform(kv_lens, equal_chunk(kv_lens, args.num_splits), splits, capacity, costs, args.num_sm_parts)
    elif args.split_size > 0:
        size = split_keys(kv_lens, args.split_size)
        splits = ((kv_lens + size - 1) // size).clamp(min=1, max=capacity // max(batch, 1))
        parts = _uniform(kv_lens, size, splits, capacity, costs, args.num_sm_parts)
    else:
        parts = _balanced(kv_lens, costs, args.num_sm_parts)
    words.assemble(layout, layout.header(**sizes), *parts, into=outputs[0])


def equal_chunk(kv_lens: torch.Tensor, num_splits: int) -> torch.Tensor:
    """Keys per split when each sequence has num_splits equal ones: a multiple of SPLIT_ALIGNMENT, at least one."""
    kv_blocks = (kv_lens + SPLIT_ALIGNMENT - 1) // SPLIT_ALIGNMENT
    return ((kv_blocks + num_splits - 1) // num_splits).clamp(min=1) * SPLIT_ALIGNMENT


def split_keys(kv_lens: torch.Tensor, split_size: int) -> torch.Tensor:
    """Keys per split in batch-invariant mode, int64: split_size, or those of four equal splits if that is less and one
    does not hold all keys. `metadata.splits_of` says why."""
    kv_lens = kv_lens.long()
    in_four = (kv_lens > split_size) & (kv_lens <= 4 * split_size)
    return torch.where(in_four, equal_chunk(kv_lens, 4).clamp(max=split_size), split_size)


def _uniform(
    kv_lens: torch.Tensor,
    chunk: torch.Tensor,
    splits: torch.Tensor,
    capacity: int,
    costs: SchedulerCosts,
    num_sm_parts: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`splits` [batch] work tiles of each sequence, split s from key s x chunk; num_sm_parts share them by cost."""
    batch, device = kv_lens.shape[0], kv_lens.device
    none = torch.zeros(1, dtype=torch.int64, device=device)
    begin = torch.cat((none, splits.cumsum(0)))  # index of each sequence's first work tile
    split_indptr = torch.cat((none, torch.where(splits > 1, splits, 0).cumsum(0)))

    tile = torch.arange(capacity, device=device)
    used = tile < begin[-1]
    sequence = torch.searchsorted(begin[1:], tile, right=True).clamp(max=max(batch - 1, 0))
    split = tile - begin[sequence]
    first = (split * chunk[sequence]).clamp(max=OPEN)
    end = torch.where(split == splits[sequence] - 1, OPEN, (first + chunk[sequence]).clamp(max=OPEN))
    row = torch.where(splits[sequence] > 1, split_indptr[sequence] + split, -1)
    unused = torch.tensor([-1, 0, 0, -1], device=device)
    work_tiles = torch.where(used[:, None], torch.stack((sequence, first, end, row), dim=-1), unused)

    present = torch.minimum(end, kv_lens[sequence]) - first
    # An empty work tile still costs its look at the plan; 1 gives every work tile a position in the prefix sum.
    cost = torch.where(used, torch.where(present > 0, round_up(present.clamp(min=0)) + costs.tile, 1), 0)
    ends = cost.cumsum(0)
    total = torch.cat((none, ends))[-1]
    # The first parts take everything where there are more parts than tiles: a launch has no more blocks than tiles.
    parts = max(min(num_sm_parts, capacity), 1)
    part = torch.arange(num_sm_parts + 1, device=device).clamp(max=parts)
    work_indptr = torch.searchsorted(ends - cost, (part * total + parts - 1) // parts)
    return split_indptr, work_indptr, work_tiles


def _balanced(
    kv_lens: torch.Tensor, costs: SchedulerCosts, num_sm_parts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch = kv_lens.shape[0]
    if batch == 0:
        nothing = torch.zeros(num_sm_parts + 1, dtype=torch.int64, device=kv_lens.device)
        return nothing[:1], nothing, torch.tensor([-1, 0, 0, -1], device=kv_lens.device).expand(num_sm_parts, 4)
    splits, cost = balanced_splits(kv_lens, costs, num_sm_parts)
    in_order = work_tiles_between(splits, batch)
    if not dealing.candidates(costs, batch, num_sm_parts):
        return in_order
    dealt, dealt_cost = dealing.deal(kv_lens, costs, num_sm_parts)
    cheaper = dealt_cost < cost
    split_indptr, work_indptr, work_tiles = (torch.where(cheaper, *each) for each in zip(dealt, in_order, strict=True))
    return split_indptr, work_indptr, work_tiles


def work_tiles_between(points: Splits, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """split_indptr, work_indptr, work tiles: one at each sequence's start and each distinct split point inside one."""
    capacity, device = batch + points.key.shape[0] - 1, points.key.device
    repeated = (points.sequence[1:] == points.sequence[:-1]) & (points.key[1:] == points.key[:-1])
    new = torch.cat((torch.zeros(1, dtype=torch.int64, device=device), ((points.key[1:] > 0) & ~repeated).long()))
    before = new.cumsum(0)  # distinct inner split points up to and with this one
    work_indptr = points.sequence + before

    inner = torch.zeros(batch + 1, dtype=torch.int64, device=device).scatter_add_(0, points.sequence, new)[:-1]
    start = torch.arange(batch, device=device) + inner.cumsum(0) - inner  # index of each sequence's first work tile
    splits = inner + 1
    split_indptr = torch.cat((inner.new_zeros(1), torch.where(splits > 1, splits, 0).cumsum(0)))

    # One spare slot at the end swallows what is no work tile: repeated split points and those at boundaries.
    sequence = torch.full((capacity + 1,), -1, dtype=torch.int64, device=device)
    first = torch.zeros_like(sequence)
    sequence.scatter_(0, start, torch.arange(batch, device=device))
    slot = torch.where(new > 0, work_indptr, capacity)
    sequence.scatter_(0, slot, torch.where(new > 0, points.sequence, -1))
    first.scatter_(0, slot, torch.where(new > 0, points.key, 0))

    used = sequence[:-1] >= 0
    same = used & (sequence[1:] == sequence[:-1])
    end = torch.where(same, first[1:], torch.where(used, OPEN, 0))
    owner = sequence[:-1].clamp(min=0)
    row = split_indptr[owner] + torch.arange(capacity, device=device) - start[owner]
    row = torch.where(used & (splits[owner] > 1), row, -1)
    return split_indptr, work_indptr, torch.stack((sequence[:-1], first[:-1], end, row), dim=-1)
