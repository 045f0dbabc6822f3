"""plan: what its words promise, and how well it shares the work."""

import bisect
import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import check, cost_of, make

import mla_suite
from mla_suite import archs as arch
from mla_suite.ops.plan import PlanArgs, dealing, reference
from mla_suite.ops.plan.metadata import (
    COUNTERS,
    HEADER_WORDS,
    Plan,
    Word,
    layout_for,
    most_work_tiles,
    smallest_words,
    splits_of,
)
from mla_suite.ops.plan.reference import split_keys
from mla_suite.ops.plan.scheduler import SPLIT_ALIGNMENT, TILE_COST, scheduler_costs, tile_cost

few = settings(max_examples=60, deadline=None, derandomize=True)


def by_hand(lens, sums, num_sm_parts):
    """(sequence, first_key) of the work tiles and work_indptr, by the steps of `scheduler.py` in scalar integers.

    As a device kernel would: one prefix sum, then every candidate and split point by itself.
    """
    fixed, tile, shared, _ = sums
    keys = [-(-length // SPLIT_ALIGNMENT) * SPLIT_ALIGNMENT for length in lens]
    cost_sum = [0, *itertools.accumulate(length + fixed for length in keys)]
    min_split = -(-(fixed // 2) // SPLIT_ALIGNMENT) * SPLIT_ALIGNMENT

    def split_point_at(position, split):
        b = bisect.bisect_right(cost_sum, position) - 1
        if b == len(lens):
            return b, 0
        near = (
            (((position - cost_sum[b]) * keys[b] // (keys[b] + fixed)) + SPLIT_ALIGNMENT // 2)
            // SPLIT_ALIGNMENT
            * SPLIT_ALIGNMENT
        )
        if not split:
            return b + (2 * (position - cost_sum[b]) > keys[b] + fixed), 0
        if near < min_split or keys[b] - near < min_split:
            return b + (2 * near > keys[b]), 0
        return b, near

    def cost(points, used):
        loads = []
        for (b, key), (end_b, end_key) in itertools.pairwise(points):
            load = cost_sum[end_b] - cost_sum[b] + (fixed + end_key if end_key else 0) - key
            partials = (key > 0) + (end_key > 0) - (b == end_b and key > 0 and end_key > 0)
            loads.append(0 if (b, key) == (end_b, end_key) else load + 2 * tile * partials)
        merge = tile * (1 - (-max(keys) // -(-cost_sum[-1] // used)))
        merge = tile + merge // 16 if shared else merge
        inner = {point for point in points if point[1]}
        return max(loads) + (merge if inner else 0) + shared * (len(inner) + len({b for b, _ in inner}))

    candidates = [
        [split_point_at(cost_sum[-1] * min(point, used) // used, split) for point in range(num_sm_parts + 1)]
        for split in (False, True)
        for used in range(1, num_sm_parts + 1)
    ]
    best = min(range(2 * num_sm_parts), key=lambda i: (cost(candidates[i], i % num_sm_parts + 1), i))
    work_tiles = sorted({*((b, 0) for b in range(len(lens))), *(point for point in candidates[best] if point[1])})
    starts = {tile: i for i, tile in enumerate(work_tiles)} | {(len(lens), 0): len(work_tiles)}
    return work_tiles, [starts[point] for point in candidates[best]]


lengths = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 20000)), min_size=1, max_size=40)


@given(lengths, st.integers(1, 64), st.sampled_from([1, 16, 48, 128, 512]))
@few
def test_balanced_plans_keep_every_promise(lens, num_sm_parts, rows):
    read = check(
        make(lens, rows=rows, num_sm_parts=num_sm_parts), len(lens), num_sm_parts, most=len(lens) + num_sm_parts
    )
    min_split = -(-(tile_cost(rows) // 2) // SPLIT_ALIGNMENT) * SPLIT_ALIGNMENT
    for b, splits in enumerate(read.splits()):
        if len(splits) > 1:
            sizes = [min(end, -(-lens[b] // SPLIT_ALIGNMENT) * SPLIT_ALIGNMENT) - first for first, end in splits]
            assert all(first % SPLIT_ALIGNMENT == 0 for first, _ in splits)
            assert min(sizes[0], sizes[-1]) >= min_split  # no too_small at the ends of a sequence
            assert min(sizes) >= SPLIT_ALIGNMENT


planned_for = st.sampled_from([None, arch.get("sm_90"), arch.get("gfx942"), arch.get("gfx950")])


@given(lengths, st.integers(1, 24), st.sampled_from([1, 16, 128, 512]), planned_for)
@few
def test_balanced_plans_are_what_scalar_integers_give(lens, num_sm_parts, rows, planned_for):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "current_arch", lambda tensor: planned_for)
        patch.setattr(dealing, "candidates", lambda *sizes: 0)  # those are in test_dealing.py
        read = Plan.read(make(lens, rows=rows, num_sm_parts=num_sm_parts))
    work_tiles, work_indptr = by_hand(lens, scheduler_costs(planned_for, rows), num_sm_parts)
    assert [(sequence, first) for sequence, first, _, _ in read.work_tiles] == work_tiles
    assert read.work_indptr == work_indptr


@given(lengths, st.integers(1, 64), st.sampled_from([16, 128]))
@few
def test_balanced_plans_are_never_worse_than_simple_ones(lens, num_sm_parts, rows):
    """Not than one sequence after another to the next SM part, and within a work tile of the bound no plan can beat."""
    slowest, merge = cost_of(Plan.read(make(lens, rows=rows, num_sm_parts=num_sm_parts)), lens, rows)
    alone = [-(-length // SPLIT_ALIGNMENT) * SPLIT_ALIGNMENT + tile_cost(rows) for length in lens]
    per_sm_part = -(-len(lens) // num_sm_parts)
    grouped = max(sum(alone[i : i + per_sm_part]) for i in range(0, len(lens), per_sm_part))
    assert slowest <= -(-sum(alone) // num_sm_parts) + max(alone) + SPLIT_ALIGNMENT
    if len(lens) <= num_sm_parts:
        assert slowest + merge <= max(alone)
    elif len(set(lens)) == 1:
        assert slowest + merge <= grouped


@given(lengths, st.integers(1, 64), st.integers(1, 9))
@few
def test_forced_plans(lens, num_sm_parts, num_splits):
    plan = make(lens, num_sm_parts=num_sm_parts, num_splits=num_splits)
    read = check(plan, len(lens), num_sm_parts, most=len(lens) * num_splits)
    assert read.header[Word.NUM_SPLITS] == num_splits
    for length, splits in zip(lens, read.splits(), strict=True):
        assert len(splits) == num_splits
        sizes = [max(min(end, length) - first, 0) for first, end in splits]
        assert sum(sizes) == length
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) <= -(-length // num_splits) + SPLIT_ALIGNMENT


@given(lengths, st.integers(1, 64), st.sampled_from([64, 100, 1024, 1100]))
@few
def test_batch_invariant_plans(lens, num_sm_parts, split_size):
    read = check(
        make(lens, num_sm_parts=num_sm_parts, max_seqlen_kv=20000, split_size=split_size),
        len(lens),
        num_sm_parts,
        most=len(lens) * -(-20000 // split_size),
    )
    assert read.header[Word.SPLIT_SIZE] == split_size
    for length, splits in zip(lens, read.splits(), strict=True):
        size = split_size
        if split_size < length <= 4 * split_size:
            size = min(split_size, -(-length // 4 // 64) * 64)
        assert [first for first, _ in splits] == [s * size for s in range(max(1, -(-length // size)))]


@pytest.mark.parametrize("split_size", [1, 48, 64, 100, 128, 1024, 1100])
def test_room_for_the_splits_of_any_length(split_size):
    """Of shorter sequences as well, which may have more of them."""
    lengths = torch.arange(8 * split_size)
    sizes = split_keys(lengths, split_size)
    most = torch.cummax((lengths + sizes - 1) // sizes, dim=0).values.clamp(min=1)
    room = torch.tensor([splits_of(length, split_size, may_have_sink=False) for length in lengths.tolist()])
    assert (room >= most).all()
    assert (room == torch.where(lengths > split_size, most.clamp(min=4), 1)).all()
    lengths = 2**31 - 1 - lengths
    assert torch.equal(split_keys(lengths, 2**30 + split_size), split_keys(lengths.int(), 2**30 + split_size).long())


def test_work_is_shared_when_splits_are_forced():
    lens = [8192, 64, 64, 8192]
    read = Plan.read(make(lens, num_sm_parts=4, max_seqlen_kv=8192, split_size=1024))
    loads = [
        sum(max(min(end, lens[b]) - first, 0) for b, first, end, _ in read.work_tiles[at:to])
        for at, to in itertools.pairwise(read.work_indptr)
    ]
    assert sum(loads) == sum(lens)
    assert max(loads) <= sum(lens) / 4 + 1024


def test_sequences_without_query_tokens_cost_nothing():
    cu_seqlens_q = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    read = Plan.read(make([4096, 100000, 4096], num_sm_parts=2, cu_seqlens_q=cu_seqlens_q))
    assert [len(splits) for splits in read.splits()] == [1, 1, 1]
    assert read.work_indptr[1] in (1, 2)


def test_same_bits_every_time_and_rows_are_only_a_cost():
    lens = list(range(0, 9000, 317))
    assert torch.equal(make(lens, rows=32), make(lens, rows=32))
    assert make(lens, rows=32).shape == make(lens, rows=4096).shape


def test_no_sequences():
    for split in ({}, {"num_splits": 3}, {"split_size": 64}):
        check(make([], **split), 0, 8, most=8 if not split else 0)


def test_sizes_follow_from_arguments():
    assert make([5, 6], num_sm_parts=3).shape == (layout_for(2, 3, max_seqlen_kv=0, num_splits=0, split_size=0).words,)
    words = (HEADER_WORDS + 3 + 4 + 2 * COUNTERS + 3) // 4 * 4 + 4 * 5
    assert make([5, 6], num_sm_parts=3).numel() == words
    for num_sm_parts in (1, 2, 7, 132):
        assert make([5, 6], num_sm_parts=num_sm_parts).numel() >= smallest_words(2)
        assert most_work_tiles(make([5, 6], num_sm_parts=num_sm_parts).numel(), 2) >= 2 + num_sm_parts
    assert TILE_COST % SPLIT_ALIGNMENT == 0


@pytest.mark.parametrize("batch", range(6))
@pytest.mark.parametrize("num_sm_parts", [1, 2, 3, 4, 132])
def test_where_kernels_find_the_words(batch, num_sm_parts):
    """Kernels take these positions for granted: header words, where bounds and work tiles lie, and their alignment."""
    source = arch.CSRC / "common" / "plan_header.hpp"
    named = {name: int(word) for name, word in re.findall(r"constexpr int (\w+) = (\d+);", source.read_text())}
    layout = layout_for(batch, num_sm_parts, max_seqlen_kv=100, num_splits=0, split_size=0)
    header = layout.header(num_splits=0, split_size=0, max_seqlen_kv=100)
    assert header[named["num_sm_parts"]] == num_sm_parts
    assert header[named["work_tiles"]] == layout.work_tiles
    assert layout.work_tiles % 4 == 0
    assert header[named["work_indptr"]] == layout.work_indptr == named["words"] + batch + 1
    assert header[Word.WORK_TILE_WORDS] == named["work_tile_words"]
    assert named["partial_rows"] == Word.PARTIAL_ROWS
    assert layout.work_tiles == (layout.work_indptr + num_sm_parts + 1 + named["counters"] * batch + 3) // 4 * 4
    # A launch has no more SM parts than the plan has work tiles, so a bound past the plan's own is a word of it.
    slots = most_work_tiles(layout.words, batch)
    assert layout.work_indptr + slots + 1 <= layout.words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq_lens": torch.zeros(2)}, "plan: seq_lens is float32; it takes int32"),
        ({"seq_lens": torch.zeros(2, 1, dtype=torch.int32)}, r"seq_lens has shape \(2, 1\); it takes 1 dimension"),
        (
            {"seq_lens": torch.tensor([3, -1], dtype=torch.int32)},
            r"seq_lens\[1\] is -1; it takes 0..100 \(max_seqlen_kv\)",
        ),
        ({"seq_lens": torch.tensor([3, 101], dtype=torch.int32)}, r"seq_lens\[1\] is 101; it takes 0..100"),
        (
            {"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)},
            r"cu_seqlens_q has shape \(2,\); it takes \[batch \+ 1\]",
        ),
        ({"cu_seqlens_q": torch.tensor([0, 2, 1], dtype=torch.int32)}, "it must rise from 0"),
        ({"num_heads": 0}, "num_heads is 0; it takes 1 or more"),
        ({"max_seqlen_q": 0}, "max_seqlen_q is 0; it takes 1 or more"),
        ({"num_sm_parts": 0}, "num_sm_parts is 0; it takes 1..1024"),
        ({"num_sm_parts": 1025}, "num_sm_parts is 1025"),
        ({"max_seqlen_kv": -1}, "max_seqlen_kv is -1"),
        ({"num_splits": -1}, "num_splits is -1"),
        ({"split_size": -64}, "split_size is -64"),
        ({"num_splits": 2, "split_size": 64}, "num_splits is 2 with split_size=64; pass one of the two"),
        ({"max_seqlen_kv": 0, "split_size": 64}, "max_seqlen_kv is 0 with split_size=64"),
        ({"num_splits": 5_000_000}, r"would have 10000000 work tiles in 160000\d\d\d bytes; at most 67108864 bytes"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, words):
    arguments = {
        "seq_lens": torch.tensor([3, 4], dtype=torch.int32),
        "num_heads": 1,
        "num_sm_parts": 2,
        "max_seqlen_kv": 100,
    }
    with pytest.raises((ValueError, TypeError), match=words):
        mla_suite.plan(**(arguments | change))


FREE_WORDS = Word.NUM_SPLITS, Word.SPLIT_SIZE, Word.MAX_SEQLEN_KV
"""Words that repeat arguments of `plan`, so that any number may be right."""


@pytest.mark.parametrize("damage", ["magic", "version", "short", "empty"])
def test_a_tensor_that_is_no_plan_is_refused(damage):
    plan = make([5])
    damaged = {"short": plan[:-4], "empty": plan[:0]}.get(damage, plan.clone())
    if damage in ("magic", "version"):
        damaged[{"magic": 0, "version": 1}[damage]] += 1
    with pytest.raises(ValueError, match=r"plan (does not begin with|has \d+ words)"):
        Plan.read(damaged)


def test_a_damaged_word_is_found():
    """In any word that a kernel reads, but counters, which may be in use."""
    plan = make([700, 5, 0], num_sm_parts=4)
    read = Plan.read(plan)
    counters = range(read.header[Word.COUNTERS], read.header[Word.COUNTERS] + 3 * COUNTERS)
    end = read.header[Word.WORK_TILES] + 4 * len(read.work_tiles)
    free = {*counters, *range(counters.stop, read.header[Word.WORK_TILES]), *FREE_WORDS}
    for word in set(range(end)) - free:
        for number in {-1, 2**31 - 1, -(2**31)} - {int(plan[word])}:
            damaged = plan.clone()
            damaged[word] = number
            with pytest.raises(ValueError, match="plan (is damaged: |does not begin with|has .* words)"):
                Plan.read(damaged)
    assert Plan.read(plan) == read


def test_no_host_read_while_planning():
    """The definition is tensor code: meta tensors, which have no data, pass through it."""
    lens = torch.zeros(5, dtype=torch.int32, device="meta")
    for split in ({}, {"num_splits": 2}, {"split_size": 64}):
        arguments = {"num_heads": 16, "max_seqlen_q": 1, "num_sm_parts": 4, "max_seqlen_kv": 128} | split
        sizes = {key: arguments.get(key, 0) for key in ("max_seqlen_kv", "num_splits", "split_size")}
        into = torch.empty(layout_for(5, 4, **sizes).words, dtype=torch.int32, device="meta")
        reference.run(None, (into,), PlanArgs(lens, **arguments))
