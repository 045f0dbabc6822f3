"""Hostile inputs, for tests of every backend: what no call may read is NaN, and ids that no call may follow are absurd.

Beside them the covers by which tests choose among many shapes.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.plan.window import first_key
from mla_suite.testing import poison

ABSURD = (-1, 2**31 - 1, -(2**31), -7)
NO_PAGE = (2**31 - 1, -(2**31), -1, 10**6)


def pairwise_cover(axes):
    """A few rows in which every pair of values of two axes meets at least once; greedy and deterministic."""
    names = list(axes)
    missing = {
        frozenset(((one, a), (other, b)))
        for one, other in itertools.combinations(names, 2)
        for a, b in itertools.product(axes[one], axes[other])
    }
    rows = []
    while missing:
        row = dict(sorted(min(missing, key=lambda pair: sorted(map(repr, pair)))))
        for name in names:
            if name not in row:
                row[name] = max(
                    axes[name],
                    key=lambda value: sum(frozenset(((name, value), pair)) in missing for pair in row.items()),
                )
        missing -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append(row)
    return rows


def in_turn(turns, values):
    """Parameters (turn, value): a default run takes each value with one of the turns, a full run with each of them."""
    return [
        pytest.param(turn, value, marks=[] if row % len(turns) == column else pytest.mark.full)
        for row, value in enumerate(values)
        for column, turn in enumerate(turns)
    ]


def raw(cache):
    """All bytes of the storage, padding included."""
    return torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())


def hostile(args, window_left=-1):
    """The same decode with every token that is not read turned to NaN and every unused table entry to an absurd id."""
    q_lens = args[0].shape[1] if args[6] is None else args[6].diff()
    firsts = first_key(args[2], q_lens, window_left).tolist()
    args = list(args)
    cache, seq_lens, table, indptr, indices = args[1].clone(), args[2], args[3], args[4], args[5]
    page, clean = cache.shape[1], args[1]
    poison(cache)
    for b, length in enumerate(seq_lens.tolist()):
        own = table[b] if table is not None else indices[indptr[b] :]
        for start in range(firsts[b] // page * page, length, page):
            used = slice(max(firsts[b] - start, 0), min(page, length - start))
            cache[own[start // page], used] = clean[own[start // page], used]
    args[1] = cache
    absurd = itertools.cycle(NO_PAGE)
    if table is not None:
        table = args[3] = torch.cat((table, torch.zeros_like(table)), dim=1)
        for b, length in enumerate(seq_lens.tolist()):
            for column in (*range(firsts[b] // page), *range(-(-length // page), table.shape[1])):
                table[b, column] = next(absurd)
    else:
        args[5] = torch.cat((indices[: indptr[-1]], torch.tensor(NO_PAGE, dtype=torch.int32)))
    return tuple(args)


def poisoned(name, pages, page, used, seed, head_dim=None, padded=True, spread=0):
    """A cache of random rows at the slots `used`; every other byte is one that reads as NaN in the kv_format.

    Rows are scaled by up to 2^+-spread. `head_dim` is the width of dense rows, where that is not the format's own.
    """
    one = get_kv_format(name)
    one = one.sized(head_dim, 0) if head_dim is not None and one.dense else one
    cache = caches.empty(one, pages, page, padded=padded)
    raw(cache).fill_(0x80 if one.encodings == {"e4m3fnuz"} else 0xFF)
    slots = torch.tensor(sorted(used), dtype=torch.int64)
    rows = torch.randn(len(slots), one.head_dim, generator=torch.Generator().manual_seed(seed))
    if spread:
        rows *= 2.0 ** torch.randint(-spread, spread + 1, (len(slots), 1))
    caches.scatter(one, cache, slots, rows)
    return cache


def select(tokens, topk, slots, seed, invalid=0.2):
    """int32 [tokens, topk] of random slots, some repeated, some absurd."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(0, slots, (tokens, topk), generator=generator)
    absurd = torch.tensor([*ABSURD, slots])[torch.randint(0, 5, (tokens, topk), generator=generator)]
    return torch.where(torch.rand(tokens, topk, generator=generator) < invalid, absurd, index).int()


POOLS: dict[str, list[tuple[str, int, int, int]]] = {
    "v32": [("v32", 3, 64, 40)],
    "dsv4 window and compressed": [("dsv4", 2, 64, 24), ("dsv4", 30, 2, 16)],
    "two flavours": [("dsv4_fnuz", 2, 16, 13), ("dsv4", 3, 5, 7)],
    "three pools": [("dsv4", 1, 256, 9), ("bf16", 4, 61, 8), ("dsv4_fnuz", 5, 1, 5)],
    "bf16": [("bf16", 4, 16, 33)],
}


def problem(shape, tokens, heads, seed=0, dtype=torch.bfloat16):
    """q, caches whose unselected slots are NaN, and dense indices per pool."""
    head_dim = get_kv_format(shape[0][0]).head_dim if len(shape) == 1 else 512
    q = torch.randn(tokens, heads, head_dim, generator=torch.Generator().manual_seed(seed)).to(dtype)
    kv_caches, indices = [], []
    for i, (name, pages, page, topk) in enumerate(shape):
        index = select(tokens, topk, pages * page, seed + i)
        used = {s for s in index.flatten().tolist() if 0 <= s < pages * page}
        kv_caches.append(poisoned(name, pages, page, used, seed + i, head_dim))
        indices.append(index)
    return q, kv_caches, indices, [name for name, *_ in shape]
