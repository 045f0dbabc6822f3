"""decode in Triton, for GPUs without a kernel of our own.

A program holds one tile of query rows and walks work tiles; a work tile is a range of one sequence's keys. A block of
keys is loaded once per row tile and serves as K, transposed, and as V.

On an H200 it took 0.26 to 0.87 of the time of SGLang's Triton kernel with its best number of splits, and 0.9 to 2.6
times that of FlashMLA (2026-11-21; "decode in Triton" in benchmarks/README.md).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from mla_suite.archs import ArchSpec
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.launch.launcher import compute_units
from mla_suite.launch.scratch import partials
from mla_suite.ops.combine.triton import finish, lse_numbers, lse_offset
from mla_suite.ops.decode.triton_blocks import (
    DOT_TYPES,
    Tile,
    dot_dtype,
    natural_lse,
    rope_queries,
    rope_scores,
    softmax_step,
)
from mla_suite.ops.plan.metadata import HEADER_WORDS, WORK_TILE_WORDS, Word, most_work_tiles, splits_of
from mla_suite.ops.plan.scheduler import SPLIT_ALIGNMENT
from mla_suite.ops.plan.triton import split_keys

KV_FORMATS = ("bf16", "fp16", "fp32", "fp8")
MAX_BLOCKS = 65535  # of a grid's second dimension
ALIGNMENT = tl.constexpr(SPLIT_ALIGNMENT)  # keys; equal splits fall on its multiples
WORK_TILES_AT = tl.constexpr(int(Word.WORK_TILES))
WORK_AT = tl.constexpr(int(Word.WORK_INDPTR))
NUM_SM_PARTS_AT = tl.constexpr(int(Word.NUM_SM_PARTS))
WORDS_PER_WORK_TILE = tl.constexpr(WORK_TILE_WORDS)


# One binary for all values of these.
SIZES = ["batch", "q_len", "num_splits", "split_size", "lse_tokens", "lse_stride_batch"]
SIZES += ["cp_interleave", "cp_period", "cp_offset", "window_left"]


@triton.jit(do_not_specialize=SIZES)
def decode_kernel(
    q,  # [tokens, heads, LATENT + ROPE]
    kv_cache,  # [num_pages, page_size, LATENT + ROPE]
    seq_lens,  # [batch] int32
    block_table,  # [batch, width] int32, or None
    kv_indptr,  # [batch + 1] int32, or None
    kv_indices,  # [entries] int32, or None
    cu_seqlens_q,  # [batch + 1] int32, or None
    q_descale,  # [1] fp32, or None
    kv_descale,  # [1] fp32, or None
    attn_sink,  # [heads] fp32, or None
    rope_cos_sin,  # [max_len, ROPE] fp32, or None
    plan,  # int32 words, or None: equal splits
    cp_tot_seq_lens,  # [batch] int32, or None: keys of a sequence on all ranks, of which seq_lens has this one's
    tree_mask,  # [tokens] int64, or None: bit j says that query token j is seen
    out,  # [tokens, heads, LATENT]
    lse,  # [tokens, heads] fp32
    partial_out,  # [splits, rows, LATENT] fp32, or None
    partial_lse,  # [splits, rows] fp32, or None
    softmax_scale,
    batch,
    heads,
    q_len,  # of the longest sequence
    num_splits,
    split_size,
    q_stride_token,
    q_stride_head,
    kv_stride_page,
    kv_stride_token,
    table_stride,
    out_stride_token,
    out_stride_head,
    lse_stride_token,
    lse_stride_head,
    lse_stride_batch,
    lse_tokens,
    empty_lse,
    cp_interleave,
    cp_period,
    cp_offset,
    window_left,
    PAGE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,  # window_left is a number of keys
    DOT: tl.constexpr,  # type of both matrix products' operands
):
    """Grid: (row tiles, blocks); block i takes SM parts i, i + blocks, ... of a plan, or split i of all.

    The last row tiles come first, since those of an extend see the most keys: none of them then begins when others end.
    """
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    block, blocks = tl.program_id(1), tl.num_programs(1)
    if plan is None:
        num_sm_parts = batch * num_splits
    else:
        num_sm_parts = tl.load(plan + NUM_SM_PARTS_AT)
    for sm_part in range(block, num_sm_parts, blocks):
        if plan is None:
            first_tile, end_tile = sm_part, sm_part + 1
        else:
            bounds = plan + tl.load(plan + WORK_AT) + sm_part
            first_tile, end_tile = tl.load(bounds), tl.load(bounds + 1)
        for tile in range(first_tile, end_tile):
            if plan is None:
                b = tile // num_splits
            else:
                words = plan + tl.load(plan + WORK_TILES_AT) + tile * WORDS_PER_WORK_TILE
                b = tl.load(words)
            kv_len = tl.load(seq_lens + b)
            first_seen, origin = 0, 0  # of the window; work tiles count keys from its origin
            if WINDOWED:
                tokens = q_len
                if cu_seqlens_q is not None:
                    tokens = tl.load(cu_seqlens_q + b + 1) - tl.load(cu_seqlens_q + b)
                first_seen = tl.maximum(tl.maximum(kv_len - tokens, 0) - window_left, 0)  # no sum leaves 32 bits
                origin = first_seen // ALIGNMENT * ALIGNMENT
            present = kv_len - origin
            if plan is None:
                split = tile % num_splits
                chunk = split_keys(split_size, num_splits, present)
                first_key = split * chunk
                # the last split is open, as in a plan: no key is lost when a length outgrows what was promised
                end_key = tl.where(split == num_splits - 1, present, tl.minimum(first_key + chunk, present))
                partial_row = tl.where(num_splits > 1, tile, -1) + tl.zeros([], tl.int64)
            else:
                first_key = tl.load(words + 1)
                end_key = tl.minimum(tl.load(words + 2), present)
                partial_row = tl.load(words + 3).to(tl.int64)
            attend_work_tile(
                q, kv_cache, block_table, kv_indptr, kv_indices, cu_seqlens_q, q_descale, kv_descale, attn_sink,
                rope_cos_sin, out, lse, partial_out, partial_lse, softmax_scale, heads, q_len, q_stride_token,
                q_stride_head, kv_stride_page, kv_stride_token, table_stride, out_stride_token, out_stride_head,
                lse_stride_token, lse_stride_head, lse_stride_batch, lse_tokens, empty_lse, row, b, kv_len,
                tl.maximum(origin + first_key, first_seen), origin + end_key, partial_row, cp_tot_seq_lens, tree_mask,
                cp_interleave, cp_period, cp_offset, window_left, PAGE, LATENT, ROPE, BLOCK_N, CAUSAL, WINDOWED, DOT,
            )  # fmt: skip


@triton.jit
def attend_work_tile(
    q, kv_cache, block_table, kv_indptr, kv_indices, cu_seqlens_q, q_descale, kv_descale, attn_sink, rope_cos_sin,
    out, lse, partial_out, partial_lse, softmax_scale, heads, q_len, q_stride_token, q_stride_head, kv_stride_page,
    kv_stride_token, table_stride, out_stride_token, out_stride_head, lse_stride_token, lse_stride_head,
    lse_stride_batch, lse_tokens, empty_lse, row, b, kv_len, first_key, end_key, partial_row, cp_tot_seq_lens,
    tree_mask, cp_interleave, cp_period, cp_offset, window_left, PAGE: tl.constexpr, LATENT: tl.constexpr,
    ROPE: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Rows `row` of sequence b over keys [first_key, end_key): to the partials, or to out when partial_row is -1."""
    LOG2E: tl.constexpr = 1.4426950408889634
    first_token = b.to(tl.int64) * q_len
    tokens = q_len
    if cu_seqlens_q is not None:
        first_token = tl.load(cu_seqlens_q + b).to(tl.int64)
        tokens = tl.load(cu_seqlens_q + b + 1) - first_token.to(tl.int32)
    token, head = row // heads, row % heads
    live = token < tokens
    column = tl.arange(0, LATENT)
    q_row = q + (first_token + token) * q_stride_token + head * q_stride_head
    q_latent = tl.load(q_row[:, None] + column[None, :], mask=live[:, None], other=0.0).to(DOT)
    if ROPE > 0:
        q_low, q_high = rope_queries(q_row, rope_cos_sin, live, LATENT, ROPE, DOT)
    scale = softmax_scale * LOG2E
    value_scale = 1.0
    if q_descale is not None:
        scale *= tl.load(q_descale)
    if kv_descale is not None:
        value_scale = tl.load(kv_descale)
        scale *= value_scale
    # Query token i of n sees the keys up to its own, which is key total - n + i of the sequence.
    visible = tl.zeros_like(token) + end_key
    if tree_mask is not None:
        drafts = tl.load(tree_mask + first_token + token, mask=live, other=0)
    elif CAUSAL:
        limit = kv_len - (tokens - 1 - token)
        if cp_tot_seq_lens is not None:
            limit = tl.maximum(tl.load(cp_tot_seq_lens + b) - (tokens - 1 - token), 0)
            rest = tl.minimum(tl.maximum(limit % cp_period - cp_offset, 0), cp_interleave)
            limit = limit // cp_period * cp_interleave + rest
        visible = tl.minimum(limit, end_key)
        end_key = tl.max(tl.where(live, visible, 0))  # no row of the tile sees a later key
    if WINDOWED:
        first_seen = tl.maximum(kv_len - tokens + token, 0) - window_left
        first_key = tl.maximum(first_key, tl.min(tl.where(live, first_seen, kv_len)))
    if block_table is None:
        pages = kv_indices + tl.load(kv_indptr + b)
    else:
        pages = block_table + b.to(tl.int64) * table_stride

    m_i = tl.full([row.shape[0]], -float("inf"), tl.float32)
    l_i = tl.zeros([row.shape[0]], tl.float32)
    accumulator = tl.zeros([row.shape[0], LATENT], tl.float32)
    # Blocks begin at multiples of BLOCK_N, so that one lies within a page wherever pages are multiples too.
    for start in range(first_key // BLOCK_N * BLOCK_N, end_key, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        inside = (key >= first_key) & (key < end_key)
        if PAGE % BLOCK_N == 0:
            page = tl.load(pages + start // PAGE).to(tl.int64)
            block = kv_cache + page * kv_stride_page + (start % PAGE) * kv_stride_token
            kv_row = block + tl.arange(0, BLOCK_N) * kv_stride_token
        else:
            page = tl.load(pages + key // PAGE, mask=inside, other=0).to(tl.int64)
            kv_row = kv_cache + page * kv_stride_page + (key % PAGE) * kv_stride_token
        latent = tl.load(kv_row[:, None] + column[None, :], mask=inside[:, None], other=0.0).to(DOT)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        if ROPE > 0:
            scores = rope_scores(scores, q_low, q_high, kv_row, rope_cos_sin, key, inside, LATENT, ROPE, DOT)
        seen = inside[None, :] & (key[None, :] < visible[:, None])
        if WINDOWED:
            seen &= key[None, :] >= first_seen[:, None]
        if tree_mask is not None:
            draft = key - (kv_len - tokens)
            shift = tl.maximum(draft, 0).to(tl.int64)
            seen &= (draft < 0)[None, :] | ((drafts[:, None] >> shift[None, :]) & 1 != 0)
        scores = tl.where(seen, scores * scale, -float("inf"))
        m_i, l_i, alpha, p = softmax_step(scores, m_i, l_i)
        accumulator = accumulator * alpha[:, None]
        accumulator = tl.dot(p.to(DOT), latent, accumulator, input_precision="ieee")

    result_lse = natural_lse(m_i, l_i)
    if partial_row < 0:
        denominator = l_i
        if attn_sink is not None:
            sink = tl.load(attn_sink + head) * LOG2E
            denominator += tl.exp2(sink - tl.where(m_i == -float("inf"), 0.0, m_i))
        factor = tl.where(l_i == 0.0, 0.0, value_scale / denominator)
        out_offset = (first_token + token) * out_stride_token + head * out_stride_head
        value = (accumulator * factor[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_offset[:, None] + column[None, :], value, mask=live[:, None])
        at = lse_offset(first_token + token, head, lse_stride_token, lse_stride_head, lse_stride_batch, lse_tokens)
        tl.store(lse + at, tl.where(result_lse == -float("inf"), empty_lse, result_lse), mask=live)
    elif partial_out is not None:
        factor = tl.where(l_i == 0.0, 0.0, value_scale / l_i)
        at = partial_row * q_len * heads + row
        tl.store(
            partial_out + at[:, None] * LATENT + column[None, :], accumulator * factor[:, None], mask=live[:, None]
        )
        tl.store(partial_lse + at, result_lse, mask=live)


def supports(problem: Any, arch: ArchSpec | None) -> Supported | Unsupported:
    if problem.kv_format not in KV_FORMATS:
        return Unsupported(f"kv_format {problem.kv_format}; it reads {', '.join(KV_FORMATS)}")
    rope = problem.head_dim - problem.head_dim_v
    if problem.head_dim_v & (problem.head_dim_v - 1) or rope & (rope - 1) or problem.head_dim_v < 16 or 0 < rope < 32:
        possible = "both must be powers of two, at least 16 and 32"
        return Unsupported(f"head_dim_v {problem.head_dim_v} and {rope} further values; {possible}")
    if problem.rope not in (0, rope):
        return Unsupported(f"rope_cos_sin rotates {problem.rope} values; it rotates all {rope} that are no part of V")
    if problem.q_dtype == torch.float8_e4m3fnuz:
        return Unsupported("q is float8_e4m3fnuz; it takes bfloat16, float16, float32 or float8_e4m3fn")
    rows = problem.heads * problem.q_len
    if arch is not None and not problem.planned and problem.split_size == 0 and _leaves_idle(problem.batch, rows, arch):
        rows = 16
    dot = dot_dtype(problem.q_dtype, (problem.kv_format,))
    tile = tile_for(rows, dot, problem.rope > 0, arch, problem.head_dim_v)
    return Supported(tile, f"Triton with tiles of {tile.rows} rows x {tile.keys} keys")


def _leaves_idle(batch: int, rows: int, arch: ArchSpec) -> bool:
    """Whether even tiles of 16 rows could each have eight splits and all run at once: then small tiles end sooner."""
    return batch * -(-rows // 16) * 8 <= arch.compute_units


def tile_for(rows: int, dot: torch.dtype, rotated: bool, arch: ArchSpec | None, head_dim_v: int = 512) -> Tile:
    """The best measured tile where an MMA has 64 rows; on other archs the largest that needs no scratch memory and fits
    64 KiB of LDS; the same where there is no record of the arch. Keys to be rotated need a sixth more buffers.

    On an H200 (batch 128, 4096 keys; us): 16 rows 173 with these and 211 with 32 keys, 4 warps, 3 stages; 64 rows 327,
    and 372 with 32 keys, 5 stages; 32 rows (batch 32) 70, and 103 as a padded tile of 64.
    """
    if head_dim_v > 512:  # chosen to fit, and not measured
        narrow = arch is None or arch.matrix_min_rows < 64 or dot == torch.float32
        return Tile(16, 16, 4, 1) if narrow else Tile(16 if rows <= 16 else 32, 32, 8, 2)
    if dot == torch.float32:
        return Tile(16, 16, 4, 1)  # fp32 tiles are for tests: twice the bytes, a twentieth of the rate
    if arch is None or arch.matrix_min_rows < 64:
        return Tile(16, 32, 4, 2) if rows <= 16 else Tile(32, 32, 4, 2)
    if rows <= 16:
        return Tile(16, 64, 8, 3 if rotated else 5)
    if rows <= 32:
        return Tile(32, 64, 8, 3 if rotated else 5)
    # 64 rows fill a warpgroup's matrix instruction; more would not fit the registers beside 512 columns
    return Tile(64, 32 if rotated else 64, 8, 2)


def run(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
    args = args.joined()
    kv_cache = args.kv_cache
    out, lse = outputs
    batch, heads, page = args.seq_lens.shape[0], args.q.shape[-2], kv_cache.shape[1]
    q_len, bound = args.q_len, args.max_keys
    rows = q_len * heads
    if batch == 0 or rows == 0:
        return
    tokens, flat_out = args.q.flatten(0, -3), out.flatten(0, -3)
    if args.kv_format == "fp8":
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
    tiles = -(-rows // config.rows)
    if args.plan is not None:
        splits, capacity = 1, int(most_work_tiles(args.plan.shape[0], batch))
    else:
        invariant = int(splits_of(bound, args.split_size, args.attn_sink is not None)) if args.split_size else 0
        splits = args.num_splits or invariant or _splits(batch * tiles, bound, compute_units(args.q.device))
        capacity = batch * splits if splits > 1 else 0
    left = partials(args.q.device, capacity, rows, args.head_dim_v) if capacity else None
    blocks = min(capacity, compute_units(args.q.device)) if args.plan is not None else min(batch * splits, MAX_BLOCKS)
    decode_kernel[(tiles, blocks)](
        tokens,
        kv_cache,
        args.seq_lens,
        args.block_table,
        args.kv_indptr,
        args.kv_indices,
        args.cu_seqlens_q,
        args.q_descale,
        args.kv_descale,
        args.attn_sink,
        args.rope_cos_sin,
        args.plan,
        args.cp_tot_seq_lens,
        None if args.tree_mask is None else args.tree_mask.contiguous(),
        flat_out,
        lse,
        *(left or (None, None)),
        args.softmax_scale,
        batch,
        heads,
        q_len,
        splits,
        args.split_size,
        tokens.stride(0),
        tokens.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        args.block_table.stride(0) if args.block_table is not None else 0,
        flat_out.stride(0),
        flat_out.stride(1),
        *lse_numbers(lse, args.plus_inf_lse),
        args.cp_interleave,
        args.cp_interleave * args.cp_world_size,
        args.cp_interleave * args.cp_rank,
        args.window_left,
        PAGE=page,
        LATENT=args.head_dim_v,
        ROPE=args.q.shape[-1] - args.head_dim_v,
        BLOCK_M=config.rows,
        BLOCK_N=config.keys,
        CAUSAL=args.causal,
        WINDOWED=args.window_left >= 0,
        DOT=DOT_TYPES[dot_dtype(args.q.dtype, (args.kv_format,))],
        num_warps=config.warps,
        num_stages=config.stages,
    )
    planned = args.plan is not None
    split_indptr = args.plan[HEADER_WORDS : HEADER_WORDS + batch + 1] if planned else None
    sizes = dict(batch=batch, num_splits=splits, skip_none=planned)
    finish(args, outputs, flat_out, left, split_indptr, args.cu_seqlens_q, **sizes)


def _splits(blocks: int, bound: int, units: int) -> int:
    """Splits per sequence where none were asked for: a block for every compute unit, but no more than combining repays.

    On an H200 a block takes about 2 us for 64 keys, and combining one more split takes 0.17 us, so that
    sqrt(12 x bound / 64) splits take the least time in all; then as many as splits of whole SPLIT_ALIGNMENTs are.
    """
    kv_blocks = max(-(-bound // SPLIT_ALIGNMENT), 1)
    most = max(min(units // blocks, math.isqrt(12 * kv_blocks)), 1)
    return -(-kv_blocks // -(-kv_blocks // most))
