"""sparse_decode in Triton, for GPUs without a kernel of our own.

A program holds one tile of one query token's heads and walks its selected keys pool after pool, under one softmax. A
block of keys is gathered and dequantised once per row tile and serves as K, transposed, and as V.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mla_suite.archs import ArchSpec
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.launch.launcher import compute_units
from mla_suite.launch.scratch import partials
from mla_suite.ops.combine.triton import finish, lse_numbers, lse_offset
from mla_suite.ops.decode.triton_blocks import DOT_TYPES, Tile, dot_dtype, natural_lse, softmax_step
from mla_suite.ops.plan.triton import split_keys
from mla_suite.ops.sparse_decode import splits_by_size
from mla_suite.ops.sparse_decode.triton_rows import TOO_OLD, record, row_columns, unread


class Pool(NamedTuple):
    """One pool as the kernel takes it."""

    cache: Any  # [num_pages, page_size, width]
    index: Any  # dense [tokens, topk] or ragged [entries] int32
    indptr: Any  # [tokens + 1] int32, or None: dense
    lengths: Any  # [tokens / tokens_per_length] int32, or None: all topk
    topk: Any
    index_stride: Any  # of a token of a dense index
    tokens_per_length: Any
    slots: Any  # pages x page
    block_bytes: Any
    page: Any  # a constant
    record: Any


@triton.jit(
    do_not_specialize=["num_splits", "split_size", "lse_tokens", "lse_stride_batch"]
)  # one binary for all of them
def sparse_decode_kernel(
    q,  # [tokens, heads, VALUES + REST]
    pools,  # tuple of POOLS `Pool`s
    q_descale,  # one fp32 value, or None
    kv_descale,  # one fp32 value, or None
    attn_sink,  # [heads] fp32, or None
    out,  # [tokens, heads, VALUES]
    lse,  # [tokens, heads] fp32
    partial_out,  # [tokens x num_splits, heads, VALUES] fp32, or None: one split
    partial_lse,  # [tokens x num_splits, heads] fp32, or None
    softmax_scale,
    heads,
    num_splits,
    split_size,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    lse_stride_token,
    lse_stride_head,
    lse_stride_batch,
    lse_tokens,
    empty_lse,
    POOLS: tl.constexpr,
    VALUES: tl.constexpr,
    REST: tl.constexpr,  # values of a row after those that are V too
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,  # type of both matrix products' operands
):
    """Grid: tokens x num_splits x head tiles in one dimension, since the others end at 65535; tiles of the same keys
    are neighbours. The last split is open, so no key is lost."""
    LOG2E: tl.constexpr = 1.4426950408889634
    tiles = tl.cdiv(heads, BLOCK_M)
    head = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    live = head < heads
    part = (tl.program_id(0) // tiles).to(tl.int64)
    token, split = part // num_splits, part % num_splits
    selected = tl.zeros([], tl.int64)
    for i in tl.static_range(POOLS):
        selected += count_of(pools[i], token)
    chunk = split_keys(split_size, num_splits, selected)
    first = split * chunk
    end = tl.where(split == num_splits - 1, selected, tl.minimum(first + chunk, selected))

    q_row = q + token * q_stride_token + head * q_stride_head
    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, VALUES], tl.float32)
    scale = softmax_scale * LOG2E
    if q_descale is not None:
        scale *= tl.load(q_descale)
    value_scale = 1.0
    if kv_descale is not None:
        value_scale = tl.load(kv_descale)
        scale *= value_scale
    before = tl.zeros([], tl.int64)  # keys of earlier pools
    for i in tl.static_range(POOLS):
        count = count_of(pools[i], token)
        low, high = tl.maximum(first - before, 0), tl.minimum(end - before, count)
        m_i, l_i, accumulator = attend_pool(
            pools[i], token, low, high, q_row, live, scale, m_i, l_i, accumulator,
            VALUES, REST, BLOCK_N, DOT,
        )  # fmt: skip
        before += count

    result_lse = natural_lse(m_i, l_i)
    column = tl.arange(0, VALUES)
    if partial_out is None:
        denominator = l_i
        if attn_sink is not None:
            sink = tl.load(attn_sink + head, mask=live, other=0.0) * LOG2E
            denominator += tl.exp2(sink - tl.where(m_i == -float("inf"), 0.0, m_i))
        factor = tl.where(l_i == 0.0, 0.0, value_scale / denominator)
        out_row = out + token * out_stride_token + head * out_stride_head
        value = (accumulator * factor[:, None]).to(out.dtype.element_ty)
        tl.store(out_row[:, None] + column[None, :], value, mask=live[:, None])
        at = lse_offset(token, head, lse_stride_token, lse_stride_head, lse_stride_batch, lse_tokens)
        tl.store(lse + at, tl.where(result_lse == -float("inf"), empty_lse, result_lse), mask=live)
    else:
        factor = tl.where(l_i == 0.0, 0.0, value_scale / l_i)
        partial_row = part * heads + head
        value = accumulator * factor[:, None]
        tl.store(partial_out + partial_row[:, None] * VALUES + column[None, :], value, mask=live[:, None])
        tl.store(partial_lse + partial_row, result_lse, mask=live)


@triton.jit
def count_of(pool, token):
    """Keys that a query token selects from a pool, invalid ones included."""
    if pool.indptr is not None:
        count = tl.load(pool.indptr + token + 1) - tl.load(pool.indptr + token)
    elif pool.lengths is not None:
        count = tl.minimum(tl.load(pool.lengths + token // pool.tokens_per_length), pool.topk)
    else:
        count = pool.topk + tl.zeros([], tl.int32)
    return count.to(tl.int64)


@triton.jit
def attend_pool(
    pool, token, low, high, q_row, live, scale, m_i, l_i, accumulator,
    VALUES: tl.constexpr, REST: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The softmax's state after the selected keys low <= key < high of one pool as well."""
    chosen = pool.index
    if pool.indptr is not None:
        chosen += tl.load(pool.indptr + token)
    else:
        chosen += token * pool.index_stride
    column = tl.arange(0, VALUES)
    q_values = tl.load(q_row[:, None] + column[None, :], mask=live[:, None], other=0.0).to(DOT)
    if REST > 0:
        rest = VALUES + tl.arange(0, REST)
        q_rest = tl.load(q_row[:, None] + rest[None, :], mask=live[:, None], other=0.0).to(DOT)
    for start in range(low, high, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        slot = tl.load(chosen + key, mask=key < high, other=-1).to(tl.int64)
        valid = (slot >= 0) & (slot < pool.slots)
        slot = tl.where(valid, slot, 0)
        block = pool.cache.to(tl.pointer_type(tl.uint8)) + slot // pool.page * pool.block_bytes
        at = slot % pool.page
        values = row_columns(pool, block, at, valid, 0, VALUES).to(DOT)
        scores = tl.dot(q_values, tl.trans(values), input_precision="ieee")
        if REST > 0:
            k_rest = row_columns(pool, block, at, valid, VALUES, REST).to(DOT)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores = tl.where(valid[None, :], scores * scale, -float("inf"))
        m_i, l_i, alpha, p = softmax_step(scores, m_i, l_i)
        accumulator = accumulator * alpha[:, None]
        accumulator = tl.dot(p.to(DOT), values, accumulator, input_precision="ieee")
    return m_i, l_i, accumulator


def supports(problem: Any, arch: ArchSpec | None) -> Supported | Unsupported:
    if TOO_OLD:
        return Unsupported(TOO_OLD)
    if problem.dtype == torch.float8_e4m3fnuz:
        return Unsupported("q is float8_e4m3fnuz; it takes bfloat16, float16, float32 or float8_e4m3fn")
    values, rest = problem.head_dim_v, problem.head_dim - problem.head_dim_v
    if values & (values - 1) or rest & (rest - 1) or values < 16 or 0 < rest < 16:
        return Unsupported(f"head_dim_v {values} and {rest} further values; both must be powers of two, at least 16")
    for pool in problem.pools:
        fmt = get_kv_format(pool.kv_format)
        if why := unread(pool.kv_format, problem.head_dim, (0, values, values, rest) if rest else (0, values)):
            return Unsupported(why)
        if fmt.scale_rule is not None and values != fmt.head_dim_v:
            return Unsupported(f"head_dim_v {values} of kv_format {pool.kv_format}; it takes {fmt.head_dim_v}")
    kv_formats = [pool.kv_format for pool in problem.pools]
    tile = tile_for(problem.heads, dot_dtype(problem.dtype, tuple(kv_formats)), kv_formats, arch)
    return Supported(
        tile, f"Triton with tiles of {tile.rows} heads x {tile.keys} keys; a plan is not needed and not read"
    )


def tile_for(heads: int, dot: torch.dtype, kv_formats: Sequence[str], arch: ArchSpec | None) -> Tile:
    """The best measured tile where an MMA has 64 rows; on other archs what 64 KiB of LDS hold; a smaller one elsewhere.

    On an H200 (128 tokens, 2048 keys of v32; us): 16 heads 252 with these and 519 with 32 keys, 4 warps; 64 heads 309,
    and 442 with 32 keys.
    """
    if dot == torch.float32:
        return Tile(16, 16, 4, 1)  # fp32 tiles are for tests: twice the bytes, a twentieth of the rate
    if arch is None:  # any other GPU: the least shared memory beside bf16 matrix units is 99 KiB
        return Tile(16, 32, 4, 1) if heads <= 16 else Tile(32, 16, 4, 1)
    if arch.matrix_min_rows < 64:
        return Tile(16, 32, 4, 2) if heads <= 16 else Tile(32, 32, 4, 2)
    if heads <= 16:
        # where V lies in two fields both are read at its full width, and a second stage does not fit
        formats = map(get_kv_format, kv_formats)
        two_fields = any(fmt.latent < fmt.head_dim_v and not fmt.seamless for fmt in formats)
        return Tile(16, 64, 8, 1 if two_fields else 2)
    # 64 rows fill a warpgroup's matrix instruction; more would not fit the registers beside 512 columns
    return Tile(64, 64, 8, 1)


def run(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
    out, lse = outputs
    args = args.joined()
    heads, head_dim = args.q.shape[-2:]
    queries, flat_out = args.q.flatten(0, -3), out.flatten(0, -3)
    tokens = queries.shape[0]
    if tokens == 0 or heads == 0:
        return
    lists = zip(
        map(caches.as_bytes, args.kv_caches),
        args.indices,
        args.indptrs,
        args.topk_lengths,
        args.kv_formats,
        strict=True,
    )
    pools = tuple(_pool(args.q, *members) for members in lists)
    tiles = triton.cdiv(heads, config.rows)
    splits = args.num_splits or (splits_by_size(args) if args.split_size else _splits(tokens, tiles, args.indices))
    left = partials(args.q.device, tokens * splits, heads, args.head_dim_v) if splits > 1 else None
    sparse_decode_kernel[(tiles * tokens * splits,)](
        queries,
        pools,
        args.q_descale,
        args.kv_descale,
        args.attn_sink,
        flat_out,
        lse,
        *(left or (None, None)),
        args.softmax_scale,
        heads,
        splits,
        args.split_size if splits > 1 else 0,
        queries.stride(0),
        queries.stride(1),
        flat_out.stride(0),
        flat_out.stride(1),
        *lse_numbers(lse, args.plus_inf_lse),
        POOLS=len(pools),
        VALUES=args.head_dim_v,
        REST=head_dim - args.head_dim_v,
        BLOCK_M=config.rows,
        BLOCK_N=config.keys,
        DOT=DOT_TYPES[dot_dtype(args.q.dtype, tuple(args.kv_formats))],
        num_warps=config.warps,
        num_stages=config.stages,
    )
    finish(args, outputs, flat_out, left, batch=tokens, num_splits=splits)


def _pool(
    q: torch.Tensor,
    cache: torch.Tensor,
    index: torch.Tensor,
    indptr: torch.Tensor | None,
    lengths: torch.Tensor | None,
    kv_format: str,
) -> Pool:
    pages, page, _ = cache.shape
    rows = index.flatten(0, -2) if indptr is None else index
    per_sequence = lengths is not None and q.dim() == 4 and lengths.dim() == 1
    return Pool(
        cache,
        rows,
        indptr,
        lengths.flatten().contiguous() if lengths is not None else None,  # [batch, 1] may be a column of a table
        rows.shape[-1],
        rows.stride(0),
        q.shape[1] if per_sequence else 1,
        pages * page,
        cache.stride(0) * cache.element_size(),
        tl.constexpr(page),
        record(kv_format, q.shape[-1]),
    )


def _splits(tokens: int, tiles: int, indices: Sequence[torch.Tensor]) -> int:
    """Splits per query token where nothing asks for a number: blocks for all compute units, none under 128 keys."""
    keys = sum(index.numel() for index in indices) // tokens
    return max(1, min(compute_units(indices[0].device) // (tokens * tiles), keys // 128))
