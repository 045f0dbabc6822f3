"""Pools for sparse_decode in which every slot that nobody selects is NaN."""

from __future__ import annotations

import torch

from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format

ABSURD = (-1, 2**31 - 1, -(2**31), -7)


def poisoned(name, pages, page, used, seed, head_dim=None):
    """A cache of random rows at the slots `used`; every other byte is 0xff, which reads as NaN in every kv_format."""
    one = get_kv_format(name) if head_dim is None else get_kv_format(name).sized(head_dim, 0)
    cache = caches.empty(one, pages, page)
    torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()).fill_(0xFF)
    slots = torch.tensor(sorted(used), dtype=torch.int64)
    rows = torch.randn(len(slots), one.head_dim, generator=torch.Generator().manual_seed(seed))
    caches.scatter(one, cache, slots, rows)
    return cache


def select(tokens, topk, slots, seed, invalid=0.2):
    """int32 [tokens, topk] of random slots, some repeated, some absurd."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(0, slots, (tokens, topk), generator=generator)
    absurd = torch.tensor([*ABSURD, slots])[torch.randint(0, 5, (tokens, topk), generator=generator)]
    return torch.where(torch.rand(tokens, topk, generator=generator) < invalid, absurd, index).int()


POOLS = {
    "v32": [("v32", 3, 64, 40)],
    "dsv4 window and compressed": [("dsv4", 2, 64, 24), ("dsv4", 30, 2, 16)],
    "two flavours": [("dsv4_fnuz", 2, 16, 13), ("dsv4", 3, 5, 7)],
    "three pools": [("dsv4", 1, 256, 9), ("bf16", 4, 61, 8), ("dsv4_fnuz", 5, 1, 5)],
    "bf16": [("bf16", 4, 16, 33)],
}


def problem(shape, tokens, heads, seed, dtype=torch.bfloat16):
    """q, caches whose unselected slots are NaN, and dense indices per pool."""
    head_dim = get_kv_format(shape[0][0]).head_dim if len(shape) == 1 else 512
    q = torch.randn(tokens, heads, head_dim, generator=torch.Generator().manual_seed(seed)).to(dtype)
    kv_caches, indices = [], []
    for i, (name, pages, page, topk) in enumerate(shape):
        index = select(tokens, topk, pages * page, seed + i)
        used = {s for s in index.flatten().tolist() if 0 <= s < pages * page}
        kv_caches.append(
            poisoned(name, pages, page, used, seed + i, 512 if len(shape) > 1 and name == "bf16" else None)
        )
        indices.append(index)
    return q, kv_caches, indices, [name for name, *_ in shape]
