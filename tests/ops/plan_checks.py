"""Plans to test, what their words promise, and what they cost."""

import itertools

import torch

import mla_suite
from mla_suite.ops.plan.metadata import COUNTERS, OPEN, Plan, Word, most_work_tiles
from mla_suite.ops.plan.scheduler import SPLIT_ALIGNMENT, tile_cost


def make(lens, *, rows=16, num_sm_parts=8, max_seqlen_kv=1 << 17, cu_seqlens_q=None, **split):
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    return mla_suite.plan(
        seq_lens, cu_seqlens_q, num_heads=rows, num_sm_parts=num_sm_parts, max_seqlen_kv=max_seqlen_kv, **split
    )


def check(plan, batch, num_sm_parts, *, most, in_order=True):
    """Every promise of the kv_format that does not depend on how the plan was made; and sequences in order."""
    read = Plan.read(plan)
    header = read.header
    assert (header[Word.BATCH], header[Word.NUM_SM_PARTS], header[Word.WORK_TILE_CAPACITY]) == (
        batch,
        num_sm_parts,
        most,
    )
    assert header[Word.COUNTERS_PER_SEQUENCE] == COUNTERS
    assert header[Word.WORK_TILES] % 4 == 0
    assert header[Word.WORK_TILES_USED] == len(read.work_tiles) == read.work_indptr[-1] <= most
    assert (
        header[Word.PARTIAL_ROWS]
        == read.split_indptr[-1]
        <= len(read.work_tiles)
        <= most_work_tiles(plan.numel(), batch)
    )
    assert read.counters == [0] * (batch * COUNTERS)
    assert read.work_indptr[0] == read.split_indptr[0] == 0
    assert read.work_indptr == sorted(read.work_indptr)
    if in_order:
        assert [tile[0] for tile in read.work_tiles] == sorted(tile[0] for tile in read.work_tiles)
    for b in range(batch):
        own = [tile for tile in read.work_tiles if tile[0] == b]
        rows = list(range(read.split_indptr[b], read.split_indptr[b + 1]))
        assert own, f"sequence {b} has no tile"
        assert own[0][1] == 0
        assert own[-1][2] == OPEN
        for left, right in itertools.pairwise(own):
            assert left[2] == right[1]
            assert left[1] < left[2] or left[1] == OPEN
        assert [tile[3] for tile in own] == (rows if len(own) > 1 else [-1])
        assert len(rows) == (len(own) if len(own) > 1 else 0)
    unused = plan[header[Word.WORK_TILES] :].view(-1, 4)[len(read.work_tiles) :]
    assert torch.equal(unused, torch.tensor([-1, 0, 0, -1], dtype=torch.int32).expand_as(unused))
    return read


def cost_of(read, lens, rows):
    """Cost of a plan's slowest SM part and of its merge, from its work tiles alone, by the formula."""
    tile = min(rows, 128)
    splits = [0] * len(lens)
    for sequence, *_ in read.work_tiles:
        splits[sequence] += 1
    padded = [-(-length // SPLIT_ALIGNMENT) * SPLIT_ALIGNMENT for length in lens]
    loads = []
    for first, end in itertools.pairwise(read.work_indptr):
        load = 0
        for sequence, key, end_key, _ in read.work_tiles[first:end]:
            load += min(end_key, padded[sequence]) - key + tile_cost(rows) + (2 * tile if splits[sequence] > 1 else 0)
        loads.append(load)
    return max(loads), tile * max((n for n in splits if n > 1), default=0)
