"""plan in Triton, for GPUs without a kernel of our own: the definition's words, bit for bit.

A balanced plan takes four small kernels: the prefix sum of the sequences' costs, the cost of every candidate, the
split points of the cheapest, and the numbers of the sequences' work tiles. A uniform one takes three: count the work
tiles, write them, share them out. Nothing is read on the host, so a captured plan is made anew at every replay.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from mla_suite.archs import ArchSpec
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.launch import current_arch
from mla_suite.launch.scratch import take
from mla_suite.ops.plan import dealing, metadata, scheduler
from mla_suite.ops.plan.metadata import Word, WorkTile

SPLIT_ALIGNMENT = tl.constexpr(scheduler.SPLIT_ALIGNMENT)
READ_TOGETHER = tl.constexpr(scheduler.READ_TOGETHER)
OPEN = tl.constexpr(metadata.OPEN)
WORK_TILE_WORDS = tl.constexpr(metadata.WORK_TILE_WORDS)
SEQUENCE, FIRST_KEY, END_KEY, PARTIAL_ROW = (tl.constexpr(int(word)) for word in WorkTile)
HEADER_WORDS = tl.constexpr(metadata.HEADER_WORDS)  # split_indptr follows the header
WORK_TILES_USED, PARTIAL_ROWS = tl.constexpr(int(Word.WORK_TILES_USED)), tl.constexpr(int(Word.PARTIAL_ROWS))
# Sizes that change from call to call; one binary serves them all.
SIZES = [
    "header", "batch", "num_sm_parts", "capacity", "fixed", "partial_cost", "shared", "steps", "num_splits",
    "split_size", "splits", "work_at", "counters_at", "work_tiles_at", "q_len", "window_left",
]  # fmt: skip
BLOCK = 1024  # sequences or work tiles a program looks at together


@triton.jit(do_not_specialize=SIZES)
def cost_sum_kernel(
    seq_lens, cu_seqlens_q, keys, cost_sum, longest, batch, fixed, q_len, window_left, SIZE: tl.constexpr
):  # fmt: skip
    """Sequences end to end: keys [batch + 1] rounded up, cost_sum [batch + 1]. One program."""
    total = tl.zeros([], tl.int64)
    most = tl.zeros([], tl.int64)
    for start in range(0, batch + 1, SIZE):
        b = start + tl.arange(0, SIZE)
        present = round_up(present_keys(seq_lens, cu_seqlens_q, q_len, window_left, b, b < batch))
        cost = tl.where(b < batch, present + fixed, 0)
        tl.store(keys + b, present, mask=b <= batch)
        tl.store(cost_sum + b, total + tl.cumsum(cost, 0) - cost, mask=b <= batch)
        total += tl.sum(cost, 0)
        most = tl.maximum(most, tl.max(present, 0))
    tl.store(longest, most)


@triton.jit(do_not_specialize=SIZES)
def candidates_kernel(
    cost_sum, keys, longest, costs, batch, num_sm_parts, fixed, partial_cost, shared, steps, WIDTH: tl.constexpr
):  # fmt: skip
    """costs [2][num_sm_parts]: of the two families that divide the prefix sum into 1 + program equal parts."""
    used = tl.program_id(0) + 1
    point = tl.arange(0, WIDTH)
    unsplit, split, key = split_point_at(point, used, cost_sum, keys, batch, fixed, steps)
    next_unsplit, next_split, next_key = split_point_at(point + 1, used, cost_sum, keys, batch, fixed, steps)
    none = tl.zeros_like(key)
    whole = slowest_sm_part(cost_sum, unsplit, none, next_unsplit, none, fixed, partial_cost)
    parts = slowest_sm_part(cost_sum, split, key, next_split, next_key, fixed, partial_cost)
    if tl.max(key, 0) > 0:
        spacing = tl.maximum((tl.load(cost_sum + batch) + used - 1) // used, 1)
        reads = partial_cost * (1 + (tl.load(longest) + spacing - 1) // spacing)
        parts += tl.where(shared > 0, partial_cost + reads // READ_TOGETHER, reads)
    begins, begins_sequence = work_tiles_begun(split, key, next_split, next_key)
    parts += shared * (tl.sum(begins, 0) + tl.sum(begins_sequence, 0))
    tl.store(costs + used - 1, whole)
    tl.store(costs + num_sm_parts + used - 1, parts)


@triton.jit(do_not_specialize=SIZES)
def split_points_kernel(
    cost_sum, keys, costs, point_sequence, point_tiles, point_splits, work_indptr, work_tiles, batch, num_sm_parts,
    fixed, steps, CANDIDATES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The cheapest candidate's split points: where each SM part begins, and the work tiles that begin there. One
    program.

    A new split point inside a sequence begins a work tile and ends the one before it. point_sequence, point_tiles and
    point_splits [num_sm_parts + 1] are each split point's sequence and the work tiles and split sequences begun before
    it.
    """
    index = tl.arange(0, CANDIDATES)
    cost = tl.load(costs + index, mask=index < 2 * num_sm_parts, other=0)
    # the index in the low digits makes the first of equals the minimum, as in the definition
    cost = tl.where(index < 2 * num_sm_parts, cost * (2 * num_sm_parts) + index, 0x7FFFFFFFFFFFFFFF)
    best = tl.min(cost, 0) % (2 * num_sm_parts)
    in_parts, used = best >= num_sm_parts, (best % num_sm_parts).to(tl.int32) + 1
    point = tl.arange(0, WIDTH)
    unsplit, split, key = split_point_at(point, used, cost_sum, keys, batch, fixed, steps)
    sequence, key = tl.where(in_parts, split, unsplit), tl.where(in_parts, key, 0)
    unsplit, split, last_key = split_point_at(tl.maximum(point - 1, 0), used, cost_sum, keys, batch, fixed, steps)
    last_sequence, last_key = tl.where(in_parts, split, unsplit), tl.where(in_parts, last_key, 0)

    begins, first_in_sequence = work_tiles_begun(last_sequence, last_key, sequence, key)
    begun = tl.cumsum(begins, 0)
    split_yet = tl.cumsum(first_in_sequence, 0)
    tile = sequence + begun
    tl.store(work_indptr + point, tile.to(tl.int32), mask=point <= num_sm_parts)
    words = work_tiles + tile * WORK_TILE_WORDS
    tl.store(words + SEQUENCE, sequence.to(tl.int32), mask=begins > 0)
    tl.store(words + FIRST_KEY, key.to(tl.int32), mask=begins > 0)
    tl.store(words + PARTIAL_ROW, (begun + split_yet - 1).to(tl.int32), mask=begins > 0)
    tl.store(words - WORK_TILE_WORDS + END_KEY, key.to(tl.int32), mask=begins > 0)
    tl.store(point_sequence + point, sequence, mask=point <= num_sm_parts)
    tl.store(point_tiles + point, begun - begins, mask=point <= num_sm_parts)
    tl.store(point_splits + point, split_yet - first_in_sequence, mask=point <= num_sm_parts)


@triton.jit(do_not_specialize=SIZES)
def sequences_kernel(
    point_sequence, point_tiles, point_splits, plan, header, batch, num_sm_parts, capacity, counters_at, work_tiles_at,
    steps, SIZE: tl.constexpr,
):  # fmt: skip
    """split_indptr, the first work tile and the open end of each sequence, and what fills the unused work tiles."""
    b = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    store_frame(plan, b, header, counters_at, work_tiles_at)
    work_tiles = plan + work_tiles_at
    here = count_below(point_sequence, num_sm_parts + 1, b.to(tl.int64), b <= batch, steps)
    there = count_below(point_sequence, num_sm_parts + 1, b.to(tl.int64) + 1, b < batch, steps)
    tiles_before = tl.load(point_tiles + here, mask=b <= batch, other=0)
    row = tiles_before + tl.load(point_splits + here, mask=b <= batch, other=0)
    tiles_after = tl.load(point_tiles + there, mask=b < batch, other=0)
    tl.store(plan + HEADER_WORDS + b, row.to(tl.int32), mask=b <= batch)
    words = work_tiles + (b + tiles_before) * WORK_TILE_WORDS
    tl.store(words + SEQUENCE, b, mask=b < batch)
    tl.store(words + FIRST_KEY, tl.zeros_like(b), mask=b < batch)
    tl.store(words + PARTIAL_ROW, tl.where(tiles_after > tiles_before, row, -1).to(tl.int32), mask=b < batch)
    tl.store(work_tiles + (b + tiles_after) * WORK_TILE_WORDS + END_KEY, tl.zeros_like(b) + OPEN, mask=b < batch)
    tl.store(plan + WORK_TILES_USED + 0 * b, (batch + tiles_before).to(tl.int32), mask=b == batch)
    tl.store(plan + PARTIAL_ROWS + 0 * b, row.to(tl.int32), mask=b == batch)

    unused = (b >= batch + tl.load(point_tiles + num_sm_parts)) & (b < capacity)
    words = work_tiles + b.to(tl.int64) * WORK_TILE_WORDS
    tl.store(words + SEQUENCE, tl.full(b.shape, -1, tl.int32), mask=unused)
    tl.store(words + FIRST_KEY, tl.zeros_like(b), mask=unused)
    tl.store(words + END_KEY, tl.zeros_like(b), mask=unused)
    tl.store(words + PARTIAL_ROW, tl.full(b.shape, -1, tl.int32), mask=unused)


@triton.jit
def split_keys(split_size, num_splits, kv_len):
    """Keys of each split of one length or of many, in their type: num_splits equal ones where split_size is 0, else
    as `reference.split_keys` has them. No sum leaves 32 bits."""
    size = tl.zeros_like(kv_len) + split_size
    number = tl.where(split_size == 0, num_splits, 4)
    kv_blocks = (kv_len - 1) // SPLIT_ALIGNMENT + 1
    equal = tl.maximum((kv_blocks + number - 1) // number, 1) * SPLIT_ALIGNMENT
    in_four = (kv_len > size) & ((kv_len - 1) // 4 < size)
    return tl.where(split_size == 0, equal, tl.where(in_four, tl.minimum(size, equal), size))


@triton.jit(do_not_specialize=SIZES)
def count_kernel(
    seq_lens, cu_seqlens_q, begin, split_indptr, batch, num_splits, split_size, splits, q_len, window_left,
    SIZE: tl.constexpr,
):  # fmt: skip
    """begin [batch + 1]: work tiles before each sequence of a plan with splits of one number or size; split_indptr. One
    program."""
    tiles = tl.zeros([], tl.int64)
    rows = tl.zeros([], tl.int64)
    for first in range(0, batch + 1, SIZE):
        b = first + tl.arange(0, SIZE)
        kv_len = present_keys(seq_lens, cu_seqlens_q, q_len, window_left, b, b < batch)
        own = tl.zeros_like(kv_len) + splits
        if num_splits == 0:
            size = split_keys(split_size, num_splits, kv_len)
            own = tl.minimum(tl.maximum((kv_len + size - 1) // size, 1), splits)
        own = tl.where(b < batch, own, 0)
        partial = tl.where(own > 1, own, 0)
        tl.store(begin + b, tiles + tl.cumsum(own, 0) - own, mask=b <= batch)
        tl.store(split_indptr + b, (rows + tl.cumsum(partial, 0) - partial).to(tl.int32), mask=b <= batch)
        tiles += tl.sum(own, 0)
        rows += tl.sum(partial, 0)


@triton.jit(do_not_specialize=SIZES)
def uniform_kernel(
    seq_lens, cu_seqlens_q, begin, split_indptr, starts, total_cost, work_tiles, batch, num_splits, split_size, fixed,
    capacity, steps, q_len, window_left, SIZE: tl.constexpr,
):  # fmt: skip
    """The work tiles of a plan with splits of one number or size, and starts [capacity], the prefix sum of their costs.
    One program."""
    total = tl.zeros([], tl.int64)
    all_tiles = tl.load(begin + batch)
    for first in range(0, capacity, SIZE):
        tile = (first + tl.arange(0, SIZE)).to(tl.int64)
        inside, used = tile < capacity, tile < all_tiles
        b = tl.minimum(count_below(begin + 1, batch, tile + 1, used, steps), batch - 1)
        split = tile - tl.load(begin + b, mask=used, other=0)
        splits = tl.load(begin + b + 1, mask=used, other=0) - tl.load(begin + b, mask=used, other=0)
        kv_len = present_keys(seq_lens, cu_seqlens_q, q_len, window_left, b, used)
        chunk = split_keys(split_size, num_splits, kv_len)
        start = tl.minimum(split * chunk, OPEN)
        end = tl.where(split == splits - 1, OPEN, tl.minimum(start + chunk, OPEN))
        row = tl.where(splits > 1, tl.load(split_indptr + b, mask=used, other=0) + split, -1)
        words = work_tiles + tile * WORK_TILE_WORDS
        tl.store(words + SEQUENCE, tl.where(used, b, -1).to(tl.int32), mask=inside)
        tl.store(words + FIRST_KEY, tl.where(used, start, 0).to(tl.int32), mask=inside)
        tl.store(words + END_KEY, tl.where(used, end, 0).to(tl.int32), mask=inside)
        tl.store(words + PARTIAL_ROW, tl.where(used, row, -1).to(tl.int32), mask=inside)
        present = tl.minimum(end, kv_len) - start
        # an empty work tile costs its look at the plan
        cost = tl.where(used, tl.where(present > 0, round_up(present) + fixed, 1), 0)
        tl.store(starts + tile, total + tl.cumsum(cost, 0) - cost, mask=inside)
        total += tl.sum(cost, 0)
    tl.store(total_cost, total)


@triton.jit(do_not_specialize=SIZES)
def share_kernel(
    begin, starts, total_cost, plan, header, batch, num_sm_parts, work_at, counters_at, work_tiles_at, capacity, steps,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Uniform work tiles dealt to SM parts in order and by cost, and what the header counts."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    store_frame(plan, i, header, counters_at, work_tiles_at)
    parts = tl.minimum(num_sm_parts, capacity)  # a launch has no more blocks than tiles
    share = (tl.minimum(i, parts).to(tl.int64) * tl.load(total_cost) + parts - 1) // parts
    tile = count_below(starts, capacity, share, i <= num_sm_parts, steps)
    tl.store(plan + work_at + i, tile.to(tl.int32), mask=i <= num_sm_parts)
    used = tl.zeros_like(i) + tl.load(begin + batch).to(tl.int32)
    rows = tl.zeros_like(i) + tl.load(plan + HEADER_WORDS + batch)
    tl.store(plan + WORK_TILES_USED + 0 * i, used, mask=i == 0)
    tl.store(plan + PARTIAL_ROWS + 0 * i, rows, mask=i == 0)


@triton.jit
def store_frame(plan, lane, header, counters_at, work_tiles_at):
    """The header but for its two words that depend on lengths, and zeros from the counters to the work tiles."""
    if tl.program_id(0) == 0:
        for word in tl.static_range(HEADER_WORDS):
            if word != WORK_TILES_USED and word != PARTIAL_ROWS:
                tl.store(plan + word, header[word])
    tl.store(plan + counters_at + lane, tl.zeros_like(lane), mask=counters_at + lane < work_tiles_at)


@triton.jit
def split_point_at(point, used, cost_sum, keys, batch, fixed, steps):
    """Split point `point` of the candidate with `used` equal parts.

    Returns its sequence where nothing is split, its sequence where something is, and the key before which it lies there
    (0 at a boundary between sequences).
    """
    total = tl.load(cost_sum + batch)
    position = total * tl.minimum(point, used) // used
    # Every sequence costs something, so those that end at or before `position` are those below the one it lies in.
    sequence = count_below(cost_sum + 1, batch, position + 1, point >= 0, steps)
    offset, length = position - tl.load(cost_sum + sequence), tl.load(keys + sequence)
    near = (offset * length // (length + fixed) + SPLIT_ALIGNMENT // 2) // SPLIT_ALIGNMENT * SPLIT_ALIGNMENT
    min_split = round_up(fixed // 2)
    too_small = (near < min_split) | (length - near < min_split)
    unsplit = sequence + (2 * offset > length + fixed).to(tl.int64)
    split = sequence + (too_small & (2 * near > length)).to(tl.int64)
    return unsplit, split, tl.where(too_small, 0, near)


@triton.jit
def slowest_sm_part(cost_sum, sequence, key, next_sequence, next_key, fixed, partial_cost):
    """The largest cost of an SM part, each from its split point to the next: fixed costs, keys and partial results."""
    first, last = (key > 0).to(tl.int64), (next_key > 0).to(tl.int64)
    position = tl.load(cost_sum + sequence) + first * (fixed + key)
    next_position = tl.load(cost_sum + next_sequence) + last * (fixed + next_key)
    same_work_tile = first * last * (sequence == next_sequence).to(tl.int64)
    load = next_position - position + first * fixed + 2 * partial_cost * (first + last - same_work_tile)
    return tl.max(tl.where(next_position == position, 0, load), 0)


@triton.jit
def work_tiles_begun(last_sequence, last_key, sequence, key):
    """Returns 0 or 1 each: whether a work tile begins at this split point, and whether it is the first split there."""
    same = sequence == last_sequence
    begins = (key > 0) & ~(same & (key == last_key))
    return begins.to(tl.int64), (begins & ~(same & (last_key > 0))).to(tl.int64)


@triton.jit
def count_below(ascending, count, value, mask, steps):
    """How many of `count` ascending int64 words in memory are below `value`; steps is the bit length of count."""
    low = tl.zeros_like(value)
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        open_yet = mask & (low < high)
        below = open_yet & (tl.load(ascending + middle, mask=open_yet, other=0) < value)
        high = tl.where(open_yet & ~below, middle, high)
        low = tl.where(below, middle + 1, low)
    return low


@triton.jit
def present_keys(seq_lens, cu_seqlens_q, q_len, window_left, b, inside):
    """Keys of each sequence as int64, from where its window begins; none where no query token reads them."""
    kv_len = tl.load(seq_lens + b, mask=inside, other=0).to(tl.int64)
    tokens = tl.zeros_like(kv_len) + q_len
    if cu_seqlens_q is not None:
        first = tl.load(cu_seqlens_q + b, mask=inside, other=0)
        tokens = tl.load(cu_seqlens_q + b + 1, mask=inside, other=0).to(tl.int64) - first
    kv_len -= window_start(kv_len, tokens, window_left)
    return tl.where(tokens > 0, kv_len, 0)


@triton.jit
def window_start(kv_len, tokens, window_left):
    """`origin` of `first_key` in ops/plan/window.py: 0 where window_left is negative."""
    first = tl.maximum(kv_len - tokens - window_left, 0) // SPLIT_ALIGNMENT * SPLIT_ALIGNMENT
    return tl.where(window_left < 0, 0, first)


@triton.jit
def round_up(keys):
    """`keys` rounded up to SPLIT_ALIGNMENT."""
    return (keys + SPLIT_ALIGNMENT - 1) // SPLIT_ALIGNMENT * SPLIT_ALIGNMENT


def supports(problem: Any, arch: ArchSpec | None) -> Supported | Unsupported:
    if problem.num_splits or problem.split_size:
        return Supported(None, "Triton, three kernels")
    costs = scheduler.scheduler_costs(arch, problem.num_heads * problem.max_seqlen_q)
    if dealing.candidates(costs, problem.batch, problem.num_sm_parts):
        return Unsupported(f"{problem.batch} sequences may be dealt out of order; it keeps them in order")
    return Supported(None, f"Triton, four kernels over {2 * problem.num_sm_parts} candidates")


def run(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
    seq_lens, cu_seqlens_q = args.seq_lens, args.cu_seqlens_q
    num_sm_parts, num_splits, split_size = args.num_sm_parts, args.num_splits, args.split_size
    (plan,) = outputs
    batch = seq_lens.shape[0]
    sizes = dict(max_seqlen_kv=args.max_seqlen_kv, num_splits=num_splits, split_size=split_size)
    layout = metadata.layout_for(batch, num_sm_parts, **sizes)
    capacity, work_at, counters_at, work_tiles_at = (
        int(word) for word in (layout.work_tile_capacity, layout.work_indptr, layout.counters, layout.work_tiles)
    )
    header = tuple(layout.header(**sizes))
    fixed, partial_cost, shared, _ = scheduler.scheduler_costs(
        current_arch(seq_lens), args.num_heads * args.max_seqlen_q
    )
    lanes = max(capacity, batch + 1, num_sm_parts + 1, work_tiles_at - counters_at, metadata.HEADER_WORDS)
    blocks = triton.cdiv(lanes, BLOCK)
    work_tiles = plan[work_tiles_at:]
    window = args.max_seqlen_q, args.window_left
    if num_splits or split_size:
        begin, starts, total_cost = _words(plan.device, batch + 1, capacity, 1)
        split_indptr = plan[metadata.HEADER_WORDS :]
        count_kernel[(1,)](
            seq_lens, cu_seqlens_q, begin, split_indptr, batch, num_splits, split_size, capacity // max(batch, 1),
            *window, SIZE=BLOCK,
        )  # fmt: skip
        uniform_kernel[(1,)](
            seq_lens, cu_seqlens_q, begin, split_indptr, starts, total_cost, work_tiles, batch, num_splits, split_size,
            fixed, capacity, batch.bit_length(), *window, SIZE=BLOCK
        )  # fmt: skip
        share_kernel[(blocks,)](
            begin, starts, total_cost, plan, header, batch, num_sm_parts, work_at, counters_at, work_tiles_at, capacity,
            capacity.bit_length(), SIZE=BLOCK,
        )  # fmt: skip
        return
    cost_sum, keys, longest, costs, *points = _words(
        plan.device, batch + 1, batch + 1, 1, 2 * num_sm_parts, *[num_sm_parts + 1] * 3
    )
    steps = batch.bit_length()
    cost_sum_kernel[(1,)](seq_lens, cu_seqlens_q, keys, cost_sum, longest, batch, fixed, *window, SIZE=BLOCK)
    candidates_kernel[(num_sm_parts,)](
        cost_sum, keys, longest, costs, batch, num_sm_parts, fixed, partial_cost, shared, steps,
        WIDTH=triton.next_power_of_2(num_sm_parts),
    )  # fmt: skip
    split_points_kernel[(1,)](
        cost_sum, keys, costs, *points, plan[work_at:], work_tiles, batch, num_sm_parts, fixed, steps,
        CANDIDATES=triton.next_power_of_2(2 * num_sm_parts), WIDTH=triton.next_power_of_2(num_sm_parts + 1),
    )  # fmt: skip
    sequences_kernel[(blocks,)](
        *points, plan, header, batch, num_sm_parts, capacity, counters_at, work_tiles_at,
        (num_sm_parts + 1).bit_length(), SIZE=BLOCK
    )  # fmt: skip


def _words(device: torch.device, *counts: int) -> tuple[torch.Tensor, ...]:
    """int64 scratch in parts of these numbers of words."""
    total = sum(counts)
    return take(device, 2 * total)[: 2 * total].view(torch.int64).split(counts)
