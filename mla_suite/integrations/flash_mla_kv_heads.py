"""FlashMLA's dense calls with several KV heads, as one call with a single KV head.

Each pair of a sequence and a KV head becomes a sequence of its own.

The operators take one KV head, which is what MLA has. A cache [num_pages, page_size, kv_heads, width] is, without a
copy, a cache of one KV head whose pages hold one token: the row of token t of page p for head k has the number
(p x page_size + t) x kv_heads + k. So one call serves all heads, with a table of rows in place of the table of pages:
four bytes per place in the block table, per token and KV head. Queries and results of several query tokens change the
order of their rows on the way, which is a copy of each; a single query token's are views.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from mla_suite.core import checks
from mla_suite.errors import CallError
from mla_suite.integrations import refuse, restate
from mla_suite.ops.decode.validate_data import check_table
from mla_suite.ops.plan import check_lengths


class SingleHeadProblem(NamedTuple):
    """The leading arguments of a call with one KV head over batch x kv_heads sequences."""

    q: torch.Tensor  # [batch x kv_heads, q_len, heads / kv_heads, head_dim]
    k_cache: torch.Tensor  # [pages x page x kv_heads, 1, 1, width]
    block_table: torch.Tensor  # [batch x kv_heads, columns x page]
    cache_seqlens: torch.Tensor  # [batch x kv_heads]


def split(
    name: str, q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor, cache_seqlens: torch.Tensor
) -> SingleHeadProblem:
    """The problem with one KV head; sequence b of KV head k is its sequence b x kv_heads + k. Query heads that follow
    each other share a KV head. Refuses heads that cannot be shared out, and a cache that is no row after row."""
    pages, page_size, kv_heads, width = k_cache.shape
    if q.shape[2] % kv_heads:
        refuse(name, f"{q.shape[2]} query heads with {kv_heads} KV heads", "the first is a multiple of the second")
    if not k_cache.is_contiguous():
        given = f"k_cache has strides {k_cache.stride()} and {kv_heads} KV heads"
        refuse(name, given, "it takes a contiguous cache: call .contiguous()")
    if block_table.dim() != 2:
        refuse(name, f"block_table has shape {tuple(block_table.shape)}", "it takes [batch, columns]")
    index_like_q = partial(checks.tensor, name, dtypes=checks.INDEX, like=q)
    index_like_q("cache_seqlens", cache_seqlens, sizes=q.shape[:1], names="[batch]")
    sizes = q.shape[0], block_table.shape[1]
    index_like_q("block_table", block_table, sizes=sizes, names="[batch, columns]")
    if checks.readable(q) and (q.is_cpu or checks.debugging()):
        try:  # here, since the operator would name sequences and pages of its own
            check_lengths("decode", cache_seqlens, 0)
            check_table(block_table, cache_seqlens, pages, page_size, torch.zeros_like(cache_seqlens))
        except CallError as error:
            restate(name, {"seq_lens": "cache_seqlens", "kv_cache": "k_cache"}, error)
    within_page = torch.arange(page_size, dtype=block_table.dtype, device=block_table.device) * kv_heads
    of_head = torch.arange(kv_heads, dtype=block_table.dtype, device=block_table.device)
    # An entry past a sequence's pages may be any number, and so may its product: no such row is read.
    first = (block_table * (page_size * kv_heads))[:, None, :, None]
    return SingleHeadProblem(
        q.unflatten(2, (kv_heads, q.shape[2] // kv_heads)).transpose(1, 2).flatten(0, 1),
        k_cache.view(pages * page_size * kv_heads, 1, 1, width),
        (first + (of_head[:, None, None] + within_page)).flatten(2).flatten(0, 1),
        of_each_head(cache_seqlens, kv_heads),
    )


def join(out: torch.Tensor, lse: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """out [batch, q_len, heads, head_dim_v] and lse [batch, heads, q_len] from those of the problem of `split`."""
    by_head = out.unflatten(0, (out.shape[0] // kv_heads, kv_heads)).transpose(1, 2)
    return by_head.flatten(2, 3), lse.reshape(lse.shape[0] // kv_heads, lse.shape[1] * kv_heads, lse.shape[2])


def of_each_head(values: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[batch x kv_heads]: each sequence's value once for every KV head."""
    return values[:, None].expand(-1, kv_heads).contiguous().flatten()
