"""combine in Triton, for GPUs without a kernel of our own."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from mla_suite.archs import ArchSpec
from mla_suite.core.dispatch import Supported, Unsupported
from mla_suite.ops.combine.reference import LseLayout, empty_lse

BLOCK_SPLITS = 8  # splits whose partials are in flight together: [8, 512] fp32 is 32 registers a thread at 4 warps


# One binary for all sizes of these.
@triton.jit(do_not_specialize=["num_splits", "q_len", "rows", "lse_tokens", "lse_stride_batch"])
def combine_kernel(
    partial_out,  # [splits, rows, D_V] fp32
    partial_lse,  # [splits, rows] fp32
    split_indptr,  # [batch + 1] int32, or None
    cu_seqlens_q,  # [batch + 1] int32, or None: q_len tokens each
    attn_sink,  # [sink_heads] fp32, or None
    out,  # [tokens, heads, D_V]
    lse,  # [tokens, heads] fp32
    num_splits,
    q_len,
    rows,  # q_len x heads
    heads,
    sink_heads,
    partial_stride_split,
    partial_stride_row,
    partial_lse_stride_split,
    partial_lse_stride_row,
    out_stride_token,
    out_stride_head,
    lse_stride_token,
    lse_stride_head,
    lse_stride_batch,
    lse_tokens,
    empty_lse,  # of a row that no split has keys for
    D_V: tl.constexpr,
    BLOCK: tl.constexpr,
    SKIP_NONE: tl.constexpr,
    SKIP_SINGLE: tl.constexpr,
):
    """One program merges the splits of one row = token x heads + head of one sequence, row after row in one dimension:
    the others of a grid end at 65535.

    SKIP_NONE and SKIP_SINGLE leave the rows of sequences with no split, or one, as their producer wrote them.
    """
    b = (tl.program_id(0) // rows).to(tl.int64)
    row = tl.program_id(0) % rows
    token, head = row // heads, row % heads
    first_token = b * q_len
    if cu_seqlens_q is not None:
        first_token = tl.load(cu_seqlens_q + b).to(tl.int64)
        if first_token + token >= tl.load(cu_seqlens_q + b + 1):
            return
    if split_indptr is None:
        first = b * num_splits
        end = first + num_splits
    else:
        first = tl.load(split_indptr + b).to(tl.int64)
        end = tl.load(split_indptr + b + 1).to(tl.int64)
    if (SKIP_SINGLE and end - first == 1) or (SKIP_NONE and end == first):
        return
    split = tl.arange(0, BLOCK)
    column = tl.arange(0, D_V)
    lse_row = partial_lse + row * partial_lse_stride_row
    row_out = partial_out + row * partial_stride_row

    largest = -float("inf")
    for start in range(first, end, BLOCK):
        at = start + split
        part = lse_of(lse_row + at * partial_lse_stride_split, row_out + at * partial_stride_split, at < end, D_V)
        largest = tl.maximum(largest, tl.max(part, 0))
    reference = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    total = 0.0
    for start in range(first, end, BLOCK):
        at = start + split
        part = lse_of(lse_row + at * partial_lse_stride_split, row_out + at * partial_stride_split, at < end, D_V)
        total += tl.sum(tl.exp(part - reference), 0)
    merged = reference + tl.log(total)
    # Weights are divided by their own sum: an lse of 1000 is rounded to 3e-5, and so would they be.
    denominator = total
    if attn_sink is not None:
        sink = tl.load(attn_sink + row % sink_heads)
        # exp(sink - reference) overflows to inf only where the sink leaves nothing of the keys' weight
        denominator += tl.exp(sink - reference)

    accumulator = tl.zeros([D_V], tl.float32)
    for start in range(first, end, BLOCK):
        at = start + split
        part = lse_of(lse_row + at * partial_lse_stride_split, row_out + at * partial_stride_split, at < end, D_V)
        weight = tl.where(part == -float("inf"), 0.0, tl.exp(part - reference) / denominator)
        address = row_out + at[:, None] * partial_stride_split + column[None, :]
        values = tl.load(address, mask=(weight != 0.0)[:, None], other=0.0)
        accumulator += tl.sum(weight[:, None] * values, 0)
    out_row = out + (first_token + token) * out_stride_token + head * out_stride_head
    tl.store(out_row + column, accumulator.to(out.dtype.element_ty))
    at = lse_offset(first_token + token, head, lse_stride_token, lse_stride_head, lse_stride_batch, lse_tokens)
    tl.store(lse + at, tl.where(merged == -float("inf"), empty_lse, merged))


@triton.jit
def lse_of(lse, values, present, D_V: tl.constexpr):
    """The log-sum-exps at pointers `lse` [splits], whose partials begin at `values`; -inf where not present, and for
    +inf beside a partial of zeros, which is FlashMLA's mark of a part without keys."""
    part = tl.load(lse, mask=present, other=-float("inf"))
    infinite = part == float("inf")
    if tl.max(infinite.to(tl.int32), 0) > 0:
        value = tl.load(values[:, None] + tl.arange(0, D_V)[None, :], mask=infinite[:, None], other=0.0)
        nonzero = tl.max((value != 0.0).to(tl.int32), 1)  # NaN is not zero either
        part = tl.where(infinite & (nonzero == 0), -float("inf"), part)
    return part


@triton.jit
def lse_offset(token, head, stride_token, stride_head, stride_batch, tokens):
    """Where the lse of a query token, counted through the batch, and a head lies (reference.LseLayout)."""
    return token * stride_token + token // tokens * stride_batch + head * stride_head


def lse_numbers(lse: torch.Tensor, plus_inf: bool) -> tuple[int | float, ...]:
    """The arguments of `lse_offset` behind token and head, and the lse of a row without keys."""
    layout = LseLayout.of(lse)
    return layout.token, layout.head, layout.batch, layout.tokens, empty_lse(plus_inf)


def merge(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    split_indptr: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    batch: int,
    num_splits: int,
    plus_inf_lse: bool,
    skip_none: bool = False,
    skip_single: bool = False,
) -> None:
    """Merge partials [splits, q_len x heads, D_v] into out [tokens, heads, D_v] and lse, [tokens, heads] or [batch,
    q_len, heads], of any strides."""
    rows, heads = partial_lse.shape[1], out.shape[1]
    if batch == 0 or rows == 0:
        return
    combine_kernel[(batch * rows,)](
        partial_out,
        partial_lse,
        split_indptr,
        cu_seqlens_q,
        attn_sink,
        out,
        lse,
        num_splits,
        rows // heads,
        rows,
        heads,
        attn_sink.shape[0] if attn_sink is not None else 1,
        partial_out.stride(0),
        partial_out.stride(1),
        partial_lse.stride(0),
        partial_lse.stride(1),
        out.stride(0),
        out.stride(1),
        *lse_numbers(lse, plus_inf_lse),
        D_V=out.shape[2],
        BLOCK=BLOCK_SPLITS,
        SKIP_NONE=skip_none,
        SKIP_SINGLE=skip_single,
        num_warps=4,
    )


def finish(
    args: Any,
    outputs: tuple[torch.Tensor, ...],
    flat_out: torch.Tensor,
    partials: tuple[torch.Tensor, torch.Tensor] | None,
    split_indptr: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    **sizes: Any,
) -> None:
    """The end of a call of attention that wrote `flat_out`, which is out as [tokens, heads, D_v]: merge what it left in
    partials, and copy a caller's output whose leading strides do not merge. `sizes` go to `merge`, too."""
    (out, lse), plus_inf = outputs, args.plus_inf_lse
    if partials is not None:
        merge(*partials, split_indptr, cu_seqlens_q, args.attn_sink, flat_out, lse, plus_inf_lse=plus_inf, **sizes)
    if flat_out.data_ptr() != out.data_ptr():
        out.copy_(flat_out.view(out.shape))


def run(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
    out, lse = outputs
    batch = out.shape[0]
    merge(
        args.partial_out,
        args.partial_lse,
        args.split_indptr,
        None,
        args.attn_sink,
        out,
        lse,
        batch=batch,
        num_splits=args.num_splits,
        plus_inf_lse=args.plus_inf_lse,
        skip_single=args.skip_single,
    )


def supports(problem: Any, arch: ArchSpec | None) -> Supported | Unsupported:
    if problem.head_dim_v & (problem.head_dim_v - 1):
        return Unsupported(f"head_dim_v {problem.head_dim_v}; it takes powers of two")
    return Supported(None, f"Triton, {BLOCK_SPLITS} splits of a row at a time")
