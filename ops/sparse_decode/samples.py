"""Named sparse_decode problems: DeepSeek V3.2 (one pool of 656-byte records), V4 and V4.1 (window and compressed)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mla_suite.core.op import Sample
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.decode.samples import in_parts


class PoolShape(NamedTuple):
    """One pool of a sample: every query token selects `topk` of its pages * page tokens, some of them invalid."""

    kv_format: str
    pages: int
    page: int
    topk: int
    ragged: bool = False


def sample(
    batch: int,
    q_len: int,
    heads: int,
    pools: Sequence[PoolShape],
    *,
    sink: bool = False,
    lengths: bool = False,
    widths: tuple[int, int] | None = None,
    parts: bool = False,
) -> Sample:
    """Random rows and selections; ragged pools give token t only topk - t % 3 indices. Per-tensor fp8 has a descale.

    widths  latent and rope values of dense rows; None: 512 + 64
    parts   queries are two tensors
    """
    fmt = get_kv_format(pools[0].kv_format)
    fmt = fmt if widths is None else fmt.sized(*widths)
    head_dim, head_dim_v, tokens = fmt.head_dim, 512 if widths is None else widths[0], batch * q_len

    def make(device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        draw: dict[str, Any] = dict(generator=torch.Generator(device).manual_seed(0), device=device)
        q = torch.randn(batch, q_len, heads, head_dim, **draw).bfloat16()
        per_tensor = all(get_kv_format(pool.kv_format).per_tensor_descale for pool in pools)
        kv_descale = torch.tensor(0.02, device=device) if per_tensor else None
        kv_caches, indices, indptrs, topk_lengths = [], [], [], []
        for pool in pools:
            rows = torch.randn(pool.pages, pool.page, head_dim, **draw)
            kv_caches.append(caches.as_bytes(caches.pack(pool.kv_format, rows, descale=kv_descale)))
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
        kwargs |= {} if widths is None else {"head_dim_v": head_dim_v}
        q, q_rope = in_parts(q, head_dim_v) if parts else (q, None)
        return (q, kv_caches, indices, indptrs, topk_lengths, attn_sink, None, None, kv_descale, q_rope), kwargs

    name = f"b{batch}-q{q_len}-h{heads}-" + "-".join(
        f"{pool.kv_format}.p{pool.page}.{'r' if pool.ragged else 'k'}{pool.topk}" for pool in pools
    )
    sizes = [fmt.token_bytes if widths is not None else get_kv_format(pool.kv_format).token_bytes for pool in pools]
    read = sum(tokens * pool.topk * (size + 4) for pool, size in zip(pools, sizes, strict=True))
    bytes_moved = read + tokens * heads * ((head_dim + head_dim_v) * 2 + 4)
    flops = sum(2 * tokens * pool.topk * heads * (head_dim + head_dim_v) for pool in pools)
    name += ("-sink" if sink else "") + (f"-{widths[0]}+{widths[1]}" if widths is not None else "")
    name += "-parts" if parts else ""
    return Sample(name, make, bytes_moved, flops)


def samples() -> Sequence[Sample]:
    return (
        sample(2, 1, 16, [PoolShape("v32", 3, 64, 48)]),
        sample(2, 2, 8, [PoolShape("dsv4", 2, 64, 16), PoolShape("dsv4_fnuz", 9, 2, 12, ragged=True)], sink=True),
        sample(3, 1, 12, [PoolShape("bf16", 4, 16, 9)], lengths=True),
        sample(2, 1, 20, [PoolShape("bf16", 5, 3, 40), PoolShape("bf16", 2, 16, 9)], sink=True, widths=(128, 32)),
        sample(2, 2, 24, [PoolShape("v32", 3, 64, 40)], parts=True),
        sample(2, 2, 16, [PoolShape("fp8", 3, 16, 40), PoolShape("fp8", 5, 1, 7, ragged=True)]),
        sample(
            2, 1, 8, [PoolShape("v41_interleaved", 3, 16, 20), PoolShape("v41_fp4_interleaved", 2, 5, 9)], sink=True
        ),
    )
