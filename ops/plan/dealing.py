"""Plans that deal sequences to SM parts out of order, so that few are split.

A plan in order splits a sequence at nearly every SM part's end, and the whole device combines two partials of each. A
dealt plan splits only what is longer than a chunk:

- A sequence gives away whole chunks until at most one chunk is left. Each chunk is an SM part of its own.
- What is left of every sequence is dealt to the other SM parts, the longest first, in turns: each turn gives every part
  one sequence, the longest to the part with the least cost so far.

    cost(plan) = max over the SM parts of the cost of their work tiles: keys, rounded up to SPLIT_ALIGNMENT, + tile
                 + partial x partials

CANDIDATES chunks are tried, of which the j-th fills (32 + j) / 32 of an SM part's even share. All numbers are integers,
so a kernel that follows the same steps makes the same plan bit for bit: equal remainders are taken in the order of
sequences, equally busy parts in that of their numbers, and equally cheap chunks from the smallest on.
"""

from __future__ import annotations

import torch

from mla_suite.ops.plan.metadata import OPEN
from mla_suite.ops.plan.scheduler import SPLIT_ALIGNMENT, SchedulerCosts, round_up

CANDIDATES = 16
MAX_PARTS = 256  # SM parts; at least as many as candidates have their costs kept in the words of a plan's work tiles
MAX_TURNS = 8  # a chunk that leaves so few SM parts for the rest that these take more turns is no candidate


def candidates(costs: SchedulerCosts, batch: int, num_sm_parts: int) -> int:
    """How many chunks are tried; 0 where a plan keeps sequences in order."""
    dealt = 0 < batch <= costs.max_dealt and CANDIDATES <= num_sm_parts <= MAX_PARTS
    return CANDIDATES if dealt else 0


def deal(
    kv_lens: torch.Tensor, costs: SchedulerCosts, num_sm_parts: int
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """(split_indptr, work_indptr, work tiles) of the cheapest candidate, and its cost. kv_lens [batch] int64."""
    batch, device, fixed = kv_lens.shape[0], kv_lens.device, costs.tile
    keys = round_up(kv_lens)
    share = (keys + fixed).sum() * (32 + torch.arange(CANDIDATES, device=device)) // (32 * num_sm_parts)
    chunk = (round_up(share) - round_up(fixed)).clamp(min=SPLIT_ALIGNMENT)[:, None]  # [candidate, 1], as what follows
    whole = ((keys + chunk - 1) // chunk - 1).clamp(min=0)  # [candidate, sequence], chunks that are given away
    left = keys - whole * chunk
    chunks = whole.sum(-1, keepdim=True)
    bins = num_sm_parts - chunks  # SM parts that what is left is dealt to
    owner, turn, load = _turns(left, bins, fixed, num_sm_parts)
    slowest = torch.maximum(load.amax(-1), torch.where(chunks > 0, chunk + fixed, 0)[:, 0])
    partials = torch.where(whole > 0, whole + 1, 0)
    cost = slowest + costs.partial * partials.sum(-1)
    cost = torch.where((bins * MAX_TURNS >= batch)[:, 0], cost, torch.iinfo(torch.int64).max // (2 * CANDIDATES))
    best = (cost * CANDIDATES + torch.arange(CANDIDATES, device=device)).amin()
    at = (best % CANDIDATES).reshape(1)
    chosen = [x.index_select(0, at)[0] for x in (chunk, whole, chunks, owner, turn)]
    return _items(num_sm_parts, *chosen), best // CANDIDATES


def _turns(
    left: torch.Tensor, bins: torch.Tensor, fixed: int, num_sm_parts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The bin and the turn of each sequence [candidate, sequence], and the cost of each bin [candidate, bin]."""
    tried, batch = left.shape
    number = torch.arange(num_sm_parts, device=left.device).expand(tried, -1)
    order = (torch.arange(batch, device=left.device) - left * batch).argsort(-1)  # the longest first
    load = left.new_zeros(tried, num_sm_parts)
    owner, turn = left.new_zeros(tried, batch + 1), left.new_zeros(tried, batch + 1)  # the last swallows what is none
    for t in range(MAX_TURNS):
        key = torch.where(number < bins, load * num_sm_parts + number, torch.iinfo(torch.int64).max)
        taker = key.argsort(-1)  # the bin with the least cost first
        place = t * bins + number
        taken = (number < bins) & (place < batch)
        sequence = order.gather(1, place.clamp(0, batch - 1))
        load.scatter_add_(1, taker, torch.where(taken, left.gather(1, sequence) + fixed, 0))
        slot = torch.where(taken, sequence, batch)
        owner.scatter_(1, slot, taker)
        turn.scatter_(1, slot, t)
    return owner[:, :-1], turn[:, :-1], load


def _items(
    num_sm_parts: int,
    chunk: torch.Tensor,
    whole: torch.Tensor,
    chunks: torch.Tensor,
    owner: torch.Tensor,
    turn: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """split_indptr, work_indptr and work tiles. First come the SM parts of chunks, in the order of sequences."""
    batch, device = whole.shape[0], whole.device
    capacity = batch + num_sm_parts
    splits = torch.where(whole > 0, whole + 1, 0)
    split_indptr = torch.cat((splits.new_zeros(1), splits.cumsum(0)))
    ends = whole.cumsum(0)
    tiles = whole.new_zeros(num_sm_parts).scatter_add_(0, owner, torch.ones_like(owner))  # of each bin
    part = torch.arange(num_sm_parts + 1, device=device)
    begins = torch.cat((tiles.new_zeros(1), tiles.cumsum(0)))  # of each bin's work tiles among those of bins
    work_indptr = torch.where(part < chunks, part, chunks + begins[(part - chunks).clamp(min=0)])

    # A work tile for each chunk; the last slot swallows what is none.
    number = torch.arange(capacity, device=device)
    sequence = torch.searchsorted(ends, number, right=True).clamp(max=batch - 1)
    split = number - (ends - whole)[sequence]
    of_chunk = torch.stack((sequence, split * chunk, (split + 1) * chunk, split_indptr[sequence] + split), dim=-1)
    none = torch.tensor([-1, 0, 0, -1], device=device)
    work_tiles = torch.where((number < chunks)[:, None], of_chunk, none)
    work_tiles = torch.cat((work_tiles, none[None]))
    rest = torch.where(whole > 0, split_indptr[:-1] + whole, -1)
    last = torch.stack((torch.arange(batch, device=device), whole * chunk, torch.full_like(whole, OPEN), rest), dim=-1)
    # No candidate at all leaves numbers of no meaning, which nobody reads.
    work_tiles[(chunks + begins[owner] + turn).clamp(max=capacity)] = last
    return split_indptr, work_indptr, work_tiles[:-1]
