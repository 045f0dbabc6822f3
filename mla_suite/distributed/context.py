"""Attention over keys that are dealt to the ranks of a group: local partial results, one exchange, one combine.

Each rank attends to its own keys with all heads, which gives a normalised partial result and its lse. Both travel in
one collective, and `combine` merges them. With `all_to_all` a rank receives every partial result of heads / ranks of
the heads, which are those that it multiplies by its share of W_UV and o_proj next; with `all_gather` every rank
receives all heads.
"""

from __future__ import annotations

from typing import Any

import torch

import mla_suite
from mla_suite.core import checks
from mla_suite.distributed import peer_memory
from mla_suite.distributed.parallel import KeyShard, all_to_all, check_place, check_same_shape, gather

EXCHANGES = ("all_to_all", "all_gather")


def cp_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    shard: KeyShard,
    group: str,
    exchange: str = "all_to_all",
    causal: bool = True,
    attn_sink: torch.Tensor | None = None,
    local_seq_lens: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_suite.decode` over keys that are spread over the ranks of `group`.

    q            [batch, q_len, heads, head_dim], the same on every rank of the group
    kv_cache     [num_pages, page_size, width], this rank's keys of every sequence
    seq_lens     [batch] int32, keys of each sequence on all ranks together, those of the query tokens included
    block_table  [batch, width] int32, this rank's pages
    shard        this rank's share of the keys, whose world and rank are those of the group
    group        name of the context-parallel process group
    exchange     "all_to_all" leaves each rank its share of the heads, "all_gather" all of them
    causal       query token i of n sees the keys at global positions below seq_lens - n + i + 1; otherwise all keys
    attn_sink    [heads] fp32 logits, added to the denominator of the merged result
    local_seq_lens  [batch] int32, `shard.local_lens(seq_lens)` where a model has it for all layers; None computes it
    options      more arguments of decode, by name: softmax_scale, kv_format, q_descale, kv_descale, head_dim_v,
                 num_splits, split_size, precision, plan (made from the local lengths), max_seqlen_kv (of the whole
                 sequence)

    -> out [batch, q_len, own heads, head_dim_v] in q's dtype, lse [batch, q_len, own heads] fp32, natural log.

    Ranks that were given different values of softmax_scale, causal, exchange or interleave are told so on a CPU and in
    debug mode, by a ValueError on all; elsewhere nobody compares them, since every call would wait on the host.
    """
    _check("cp_decode", q, shard, group, exchange, attn_sink)
    checks.is_tensor("cp_decode", "seq_lens", seq_lens)
    if options.get("rope_cos_sin") is not None:
        raise ValueError(
            "cp_decode: rope_cos_sin is not taken: local positions are not the sequence's; cache rotated keys"
        )
    checks.whole("cp_decode", "max_seqlen_kv", options.get("max_seqlen_kv", 0))
    if longest := options.get("max_seqlen_kv"):
        options["max_seqlen_kv"] = min(longest, -(-longest // shard.world) + shard.interleave)
    reads_values = q.is_cpu or (not torch.compiler.is_compiling() and checks.debugging())  # and compares both lengths
    out, lse = mla_suite.decode(
        q,
        kv_cache,
        shard.local_lens(seq_lens) if local_seq_lens is None else local_seq_lens,
        block_table,
        cp_tot_seq_lens=seq_lens if reads_values or (causal and q.shape[1] > 1) else None,
        max_seqlen_q=q.shape[1],
        causal=causal,
        cp_world_size=shard.world,
        cp_rank=shard.rank,
        cp_interleave=shard.interleave,
        **options,
    )
    facts = dict(causal=causal, softmax_scale=options.get("softmax_scale"))
    return merge_ranks(out, lse, shard, group, exchange=exchange, attn_sink=attn_sink, **facts)


def cp_sparse_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    *,
    shard: KeyShard,
    group: str,
    kv_format: str,
    exchange: str = "all_to_all",
    attn_sink: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_suite.sparse_decode` over keys that are spread over the ranks of `group`: each attends to those it owns.

    q            [batch, q_len, heads, head_dim], the same on every rank of the group
    positions    [batch, q_len, topk] int32, selected keys as global positions in the sequence; -1 selects nothing, nor
                 does a position past the table
    block_table  [batch, width] int32, this rank's pages
    options      more arguments of sparse_decode, by name: softmax_scale, head_dim_v, q_descale, kv_descale, plan,
                 num_splits, split_size

    The other arguments and the result are those of `cp_decode`.
    """
    _check("cp_sparse_decode", q, shard, group, exchange, attn_sink)
    shapes = "[num_pages, page_size, width]", "[batch, q_len, topk]", "[batch, width]"
    for argument, value, shape in zip(
        ("kv_cache", "positions", "block_table"), (kv_cache, positions, block_table), shapes, strict=True
    ):
        checks.is_tensor("cp_sparse_decode", argument, value)
        if value.dim() != shape.count(",") + 1:
            checks.fail("cp_sparse_decode", argument, f"has shape {tuple(value.shape)}", f"it takes {shape}")
    of_each = (("positions", positions, q.shape[:2]), ("block_table", block_table, q.shape[:1]))
    for (argument, value, sizes), shape in zip(of_each, shapes[1:], strict=True):
        checks.shape("cp_sparse_decode", argument, value, (*sizes, value.shape[-1]), shape)
    page_size = kv_cache.shape[1]
    local = shard.local_positions(positions)
    own = (positions >= 0) & shard.owns(positions) & (local < block_table.shape[1] * page_size)
    local = torch.where(own, local, 0)
    if block_table.shape[1] == 0:  # of a rank without keys, which owns none of them
        block_table = block_table.new_zeros(block_table.shape[0], 1)
    pages = block_table.gather(1, (local // page_size).flatten(1).long()).view_as(local)
    slots = torch.where(own, pages * page_size + local % page_size, -1).to(torch.int32)
    out, lse = mla_suite.sparse_decode(q, [kv_cache], [slots], kv_formats=[kv_format], **options)
    scale = options.get("softmax_scale")
    return merge_ranks(out, lse, shard, group, exchange=exchange, attn_sink=attn_sink, softmax_scale=scale)


def merge_ranks(
    out: torch.Tensor,
    lse: torch.Tensor,
    shard: KeyShard,
    group: str,
    *,
    exchange: str = "all_to_all",
    attn_sink: torch.Tensor | None = None,
    **facts: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges the ranks' partial results, out [..., heads, dim] and lse [..., heads], as `cp_decode` returns them.

    facts  what else the partial results are of, compared as `check_same_shape` compares
    """
    world, heads, dim = shard.world, out.shape[-2], out.shape[-1]
    if world == 1 and attn_sink is None:
        return out, lse
    own_heads = heads // world if exchange == "all_to_all" else heads
    if world > 1:
        facts |= dict(
            exchange=exchange, interleave=shard.interleave, attn_sink="given" if attn_sink is not None else None
        )
        check_same_shape("merge", out, group, **facts)
    if world > 1 and peer_memory.merges(group, out, own_heads):
        flat = out.reshape(-1, heads, dim), lse.reshape(-1, heads)
        merged, merged_lse = torch.ops.mla_suite_ranks.peer_merge(*flat, attn_sink, own_heads, str(group))
        return merged.view(*out.shape[:-2], own_heads, dim), merged_lse.view(*out.shape[:-2], own_heads)
    # One collective carries both: the fp32 lse lies behind each row as that row's last bytes.
    width = dim + 4 // out.element_size()
    rows = torch.cat((out, lse[..., None].view(out.dtype)), dim=-1).view(-1, heads, width)
    if exchange == "all_to_all" and world > 1:
        rows = all_to_all(rows.view(rows.shape[0], world, own_heads, width).transpose(0, 1), group)
        sink = None if attn_sink is None else attn_sink.narrow(0, shard.rank * own_heads, own_heads).contiguous()
    else:
        sink = attn_sink
        rows = gather(rows, group, world) if world > 1 else rows[None]
    partial_out = rows[..., :dim].float().reshape(world, -1, dim)
    # contiguous() would leave an empty tensor as it is, at an offset that fp32 may not have.
    partial_lse = rows[..., dim:].clone(memory_format=torch.contiguous_format).view(torch.float32).reshape(world, -1)
    merged, merged_lse = mla_suite.combine(
        partial_out, partial_lse, attn_sink=sink, num_splits=world, out_dtype=out.dtype
    )
    shape = (*out.shape[:-2], own_heads)
    return merged.view(*shape, dim), merged_lse.view(shape)


def _check(
    name: str, q: torch.Tensor, shard: KeyShard, group: Any, chosen: str, attn_sink: torch.Tensor | None
) -> None:
    if not isinstance(shard, KeyShard):
        checks.fail(name, "shard", f"is a {type(shard).__name__}", "it takes a KeyShard", TypeError)
    shard.check()
    checks.is_tensor(name, "q", q)
    if chosen not in EXCHANGES:
        checks.fail(name, "exchange", f"is {chosen!r}", f"it takes {' or '.join(EXCHANGES)}")
    if q.dim() != 4:
        checks.fail(name, "q", f"has shape {tuple(q.shape)}", "it takes [batch, q_len, heads, head_dim]")
    if chosen == "all_to_all" and q.shape[-2] % shard.world:
        given = f"has {q.shape[-2]} heads, which do not split over {shard.world} ranks"
        checks.fail(name, "q", given, "use exchange='all_gather'")
    if attn_sink is not None:
        checks.tensor(
            name, "attn_sink", attn_sink, sizes=(q.shape[-2],), dtypes=checks.FLOAT32, like=q, names="[heads]"
        )
    if shard.world > 1:
        check_place(name, shard, group)
