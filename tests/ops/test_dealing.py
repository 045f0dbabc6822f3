"""Plans that deal sequences out of order: what they promise, and where they are taken."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import check, make

from mla_suite import archs as arch
from mla_suite.ops.plan import dealing, reference
from mla_suite.ops.plan.metadata import OPEN, Plan
from mla_suite.ops.plan.scheduler import SPLIT_ALIGNMENT, balanced_splits, scheduler_costs

SM_90 = arch.get("sm_90")
few = settings(max_examples=60, deadline=None, derandomize=True)
lengths = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 20000)), min_size=1, max_size=60)
parts = st.integers(dealing.CANDIDATES, 70)


@pytest.fixture(autouse=True)
def on_sm_90(monkeypatch):
    """The definition as it plans for that arch."""
    monkeypatch.setattr(reference, "current_arch", lambda tensor: SM_90)


def blocks_of(keys):
    return -(-keys // SPLIT_ALIGNMENT)


def by_hand(lens, costs, num_sm_parts):
    """(cost, work tiles of each SM part) of the cheapest candidate, by scalar integers; None where none is possible."""
    fixed = costs.tile
    keys = [blocks_of(length) * SPLIT_ALIGNMENT for length in lens]
    total = sum(keys) + fixed * len(lens)
    found = []
    for number in range(dealing.CANDIDATES):
        share = total * (32 + number) // (32 * num_sm_parts)
        chunk = max(blocks_of(share) - blocks_of(fixed), 1) * SPLIT_ALIGNMENT
        whole = [max(-(-own // chunk) - 1, 0) for own in keys]
        bins = num_sm_parts - sum(whole)
        if bins * dealing.MAX_TURNS < len(lens):
            continue
        left = [own - n * chunk for own, n in zip(keys, whole, strict=True)]
        dealt = [[(b, i * chunk, (i + 1) * chunk)] for b, n in enumerate(whole) for i in range(n)]
        shared: list[list[tuple[int, int, int]]] = [[] for _ in range(bins)]
        load = [0] * bins
        queue = sorted(range(len(lens)), key=lambda b: (-left[b], b))
        for first in range(0, len(lens), bins):
            takers = sorted(range(bins), key=lambda i: (load[i], i))
            for taker, b in zip(takers, queue[first : first + bins], strict=False):
                load[taker] += left[b] + fixed
                shared[taker].append((b, whole[b] * chunk, OPEN))
        slowest = max(*load, chunk + fixed) if dealt else max(load)
        cost = slowest + costs.partial * sum(n + 1 for n in whole if n)
        found.append((cost, number, dealt + shared))
    return min(found)[::2] if found else None


def parts_of(read):
    """The work tiles of each SM part, without their partial rows."""
    return [[tile[:3] for tile in read.work_tiles[at:to]] for at, to in itertools.pairwise(read.work_indptr)]


@given(lengths, parts, st.sampled_from([1, 16, 128, 512]))
@few
def test_dealt_plans_are_what_scalar_integers_give(lens, num_sm_parts, rows):
    costs = scheduler_costs(SM_90, rows)
    read = check(
        make(lens, rows=rows, num_sm_parts=num_sm_parts),
        len(lens),
        num_sm_parts,
        most=len(lens) + num_sm_parts,
        in_order=False,
    )
    _, in_order = balanced_splits(torch.tensor(lens), costs, num_sm_parts)
    found = by_hand(lens, costs, num_sm_parts)
    if found is not None and found[0] < int(in_order):
        assert parts_of(read) == found[1]
    else:
        assert [tile[0] for tile in read.work_tiles] == sorted(tile[0] for tile in read.work_tiles)


@pytest.mark.parametrize(
    ("batch", "num_sm_parts", "dealt"),
    [(1, 16, True), (256, 256, True), (257, 66, False), (128, 15, False), (128, 257, False), (0, 66, False)],
)
def test_sizes_that_are_dealt(batch, num_sm_parts, dealt):
    assert bool(dealing.candidates(scheduler_costs(SM_90, 128), batch, num_sm_parts)) == dealt


@pytest.mark.parametrize("name", ["gfx942", "gfx950", None])
def test_other_archs_keep_their_order(name):
    found = None if name is None else arch.get(name)
    assert dealing.candidates(scheduler_costs(found, 128), 128, 66) == 0


def test_the_costs_of_all_candidates_fit_into_the_items():
    """A kernel keeps a cost in two words, and a plan for one sequence has four words for each SM part and one more."""
    for num_sm_parts in range(dealing.CANDIDATES, dealing.MAX_PARTS + 1):
        assert 2 * (num_sm_parts + dealing.CANDIDATES) <= 4 * (1 + num_sm_parts)


def test_a_chunk_that_leaves_too_few_parts_is_no_candidate():
    """Sixteen SM parts for 200 sequences: eight turns do not reach all, so they stay in order."""
    lens = [64] * 199 + [100_000]
    read = Plan.read(make(lens, rows=16, num_sm_parts=16))
    assert by_hand(lens, scheduler_costs(SM_90, 16), 16) is None
    assert [tile[0] for tile in read.work_tiles] == sorted(tile[0] for tile in read.work_tiles)


def test_no_host_read_while_dealing():
    """The definition is tensor code: meta tensors, which have no data, pass through it."""
    parts, cost = dealing.deal(torch.zeros(5, dtype=torch.int64, device="meta"), scheduler_costs(SM_90, 16), 20)
    assert [tuple(part.shape) for part in parts] == [(6,), (21,), (25, 4)]
    assert cost.shape == ()
