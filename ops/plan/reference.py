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


def run(config: None, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
    batch = args.seq_lens.shape[0]
    sizes = dict(max_seqlen_kv=args.max_seqlen_kv, num_splits=args.num_splits, split_size=args.split_size)
    layout = words.layout_for(batch, args.num_sm_parts, **sizes)
    kv_lens = args.seq_lens.long()
    if args.cu_seqlens_q is not None:
        kv_lens = torch.where(args.cu_seqlens_q.diff() > 0, kv_lens, 0)  # no query token, nothing to read
    costs = scheduler_costs(current_arch(args.seq_lens), args.num_heads * args.max_seqlen_q)
    if args.num_splits > 0:
        parts = _uniform(kv_lens, equal_chunk(kv_lens, args.num_splits), args.num_splits, costs, args.num_sm_parts)
    elif args.split_size > 0:
        size = torch.full_like(kv_lens, args.split_size)
        parts = _uniform(
            kv_lens, size, int(words.splits_of(args.max_seqlen_kv, args.split_size)), costs, args.num_sm_parts
        )
    else:
        parts = _balanced(kv_lens, costs, args.num_sm_parts)
    words.assemble(layout, layout.header(**sizes), *parts, into=outputs[0])


def equal_chunk(kv_lens: torch.Tensor, num_splits: int) -> torch.Tensor:
    """Keys per split when each sequence has num_splits equal ones: a multiple of SPLIT_ALIGNMENT, at least one."""
    kv_blocks = (kv_lens + SPLIT_ALIGNMENT - 1) // SPLIT_ALIGNMENT
    return ((kv_blocks + num_splits - 1) // num_splits).clamp(min=1) * SPLIT_ALIGNMENT


def _uniform(
    kv_lens: torch.Tensor, chunk: torch.Tensor, splits: int, costs: SchedulerCosts, num_sm_parts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`splits` work tiles per sequence, split s from key s x chunk; num_sm_parts share them by cost, in order."""
    batch = kv_lens.shape[0]
    split = torch.arange(splits, device=kv_lens.device)
    first = (split * chunk[:, None]).clamp(max=OPEN)
    end = torch.where(split == splits - 1, OPEN, (first + chunk[:, None]).clamp(max=OPEN))
    sequence = torch.arange(batch, device=kv_lens.device)[:, None].expand_as(first)
    row = sequence * splits + split if splits > 1 else torch.full_like(first, -1)
    work_tiles = torch.stack((sequence, first, end, row), dim=-1).flatten(0, 1)

    present = torch.minimum(end, kv_lens[:, None]) - first
    # An empty work tile still costs its look at the plan; 1 gives every work tile a position in the prefix sum.
    cost = torch.where(present > 0, round_up(present.clamp(min=0)) + costs.tile, 1).flatten()
    ends = cost.cumsum(0)
    total = torch.cat((ends.new_zeros(1), ends))[-1]
    part = torch.arange(num_sm_parts + 1, device=kv_lens.device)
    work_indptr = torch.searchsorted(ends - cost, (part * total + num_sm_parts - 1) // num_sm_parts)
    split_indptr = torch.arange(batch + 1, device=kv_lens.device) * (splits if splits > 1 else 0)
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
    work_indptr, split_indptr, work_tiles = dealt
    first, second, third = in_order
    cheaper = dealt_cost < cost
    return (
        torch.where(cheaper, work_indptr, first),
        torch.where(cheaper, split_indptr, second),
        torch.where(cheaper, work_tiles, third),
    )


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
