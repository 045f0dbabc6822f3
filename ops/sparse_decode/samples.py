"""Named sparse_decode problems: DeepSeek V3.2 (one pool of 656-byte records), V4 and V4.1 (window and compressed)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mla_suite.core.op import Sample
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format


class PoolShape(NamedTuple):
    """One pool of a sample: every query token selects `topk` of its pages * page tokens, some of them invalid."""

    kv_format: str
    pages: int
    page: int
    topk: int
    ragged: bool = False


def sample(
    batch: int, q_len: int, heads: int, pools: Sequence[PoolShape], *, sink: bool = False, lengths: bool = False
) -> Sample:
    """Random rows and selections; ragged pools give token t only topk - t % 3 indices. Per-tensor fp8 has a descale."""
    head_dim = get_kv_format(pools[0].kv_format).head_dim
    tokens = batch * q_len

    def make(device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        draw: dict[str, Any] = dict(generator=torch.Generator(device).manual_seed(0), device=device)
        q = torch.randn(batch, q_len, heads, head_dim, **draw).bfloat16()
        per_tensor = all(get_kv_format(pool.kv_format).per_tensor_descale for pool in pools)
        kv_descale = torch.tensor(0.02, device=device) if per_tensor else None
        kv_caches, indices, indptrs, topk_lengths = [], [], [], []
        for pool in pools:
            rows = torch.randn(pool.pages, pool.page, head_dim, **draw)
            packed = caches.pack(pool.kv_format, rows, descale=kv_descale)
            # As serving engines hold it; opcheck cannot compare float8 tensors.
            kv_caches.append(packed.view(torch.uint8) if packed.element_size() == 1 else packed)
            index = torch.randint(-1, pool.pages * pool.page, (batch, q_len, pool.topk), **draw).int()
            keep = [max(pool.topk - t % 3, 0) for t in range(tokens)]
            if pool.ragged:
                index = torch.cat([row[:n] for row, n in zip(index.view(tokens, -1), keep, strict=True)])
            indices.append(index.to(device))
            indptrs.append(torch.tensor([0, *keep]).cumsum(0).int().to(device) if pool.ragged else None)
            use_lengths = lengths and not pool.ragged
            topk_lengths.append(torch.tensor(keep[:batch]).int().to(device) if use_lengths else None)
        attn_sink = torch.randn(heads, **draw) if sink else None
        kwargs = {"kv_formats": [pool.kv_format for pool in pools], "softmax_scale": head_dim**-0.5}
        return (q, kv_caches, indices, indptrs, topk_lengths, attn_sink, None, None, kv_descale), kwargs

    name = f"b{batch}-q{q_len}-h{heads}-" + "-".join(
        f"{pool.kv_format}.p{pool.page}.{'r' if pool.ragged else 'k'}{pool.topk}" for pool in pools
    )
    read = sum(tokens * pool.topk * (get_kv_format(pool.kv_format).token_bytes + 4) for pool in pools)
    bytes_moved = read + tokens * heads * ((head_dim + 512) * 2 + 4)
    flops = sum(2 * tokens * pool.topk * heads * (head_dim + 512) for pool in pools)
    return Sample(name + ("-sink" if sink else ""), make, bytes_moved, flops)


def samples() -> Sequence[Sample]:
    return (
        sample(2, 1, 16, [PoolShape("v32", 3, 64, 48)]),
        sample(2, 2, 8, [PoolShape("dsv4", 2, 64, 16), PoolShape("dsv4_fnuz", 9, 2, 12, ragged=True)], sink=True),
        sample(3, 1, 12, [PoolShape("bf16", 4, 16, 9)], lengths=True),
        sample(2, 2, 16, [PoolShape("fp8", 3, 16, 40), PoolShape("fp8", 5, 1, 7, ragged=True)]),
        sample(
            2, 1, 8, [PoolShape("v41_interleaved", 3, 16, 20), PoolShape("v41_fp4_interleaved", 2, 5, 9)], sink=True
        ),
    )
