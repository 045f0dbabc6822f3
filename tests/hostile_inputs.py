"""Hostile inputs, for tests of every backend: what no call may read is NaN, and ids that no call may follow are absurd.

Beside them the covers by which tests choose among many shapes.
"""

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


def fused_pairs(count, seed):
    """(a, b, cos, sin) of `count` pairs, bf16 in fp32 and angles in fp32, of which rounding a cos before b sin is
    subtracted gives another bf16: the two nearly cancel."""
    draw = torch.Generator().manual_seed(seed)
    turn = torch.rand(count * 1000, generator=draw) * 6.28
    b, cos, sin = torch.randn(len(turn), generator=draw).bfloat16().float(), turn.cos(), turn.sin()
    a = (b * sin / cos).bfloat16().float()
    kept = b * sin
    once, twice = (a.double() * cos.double() - kept).float().bfloat16(), (a * cos - kept).bfloat16()
    (found,) = ((once != twice) & (a.abs() < 1000)).nonzero(as_tuple=True)
    return tuple(values[found[:count]] for values in (a, b, cos, sin))


def raw(cache):
    """All bytes of the storage, padding included."""
    return torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())


def filled(kind, pages, page, byte=0xAA, padded=True):
    """A cache that is full of one byte, the room between its blocks included."""
    cache = caches.empty(kind, pages, page, padded=padded)
    raw(cache).fill_(byte)
    return cache


def hostile(args, window_left=-1, nan_byte=0xFF, wider=True):
    """The same decode with every token that is not read turned to NaN and every unused table entry to an absurd id.

    nan_byte  what is NaN in a cache of bytes
    wider     the table gets as many entries more
    """
    args = list(args)
    q_lens = args[0].shape[1] if args[6] is None else args[6].diff()
    firsts = first_key(args[2], q_lens, window_left).tolist()
    clean, cache, page = args[1], args[1].clone(), args[1].shape[1]
    poison(cache) if cache.dtype != torch.uint8 else cache.fill_(nan_byte)
    args[1] = cache
    if args[3] is not None:
        args[3] = torch.cat((args[3], torch.zeros_like(args[3])), dim=1) if wider else args[3].clone()
        tables = args[3]
    else:
        args[5] = torch.cat((args[5][: args[4][-1]], torch.tensor(NO_PAGE, dtype=torch.int32)))
        tables = [args[5][first:end] for first, end in itertools.pairwise(args[4].tolist())]
    absurd = itertools.cycle(NO_PAGE)
    for own, first, length in zip(tables, firsts, args[2].tolist(), strict=True):
        for start in range(first // page * page, length, page):
            used = slice(max(first - start, 0), min(page, length - start))
            cache[own[start // page], used] = clean[own[start // page], used]
        for column in (*range(first // page), *range(-(-length // page), len(own))):
            own[column] = next(absurd)
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
