"""AITER's MLA decode interface on our operators: a script written for it runs after one changed import.

    from mla_suite.integrations import aiter
    aiter.mla_decode_fwd(q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q)

Outputs are written in place, into the tensors given. lse is natural, -inf where a query token sees no key, and its
output is 0. A sequence has (pages - 1) x page_size + kv_last_page_lens keys, none if it has no page. Any number of
heads, query length and page size is taken. Arguments that only tune AITER's own kernels or planner are accepted and not
read; each function names them.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NoReturn

import torch

import mla_suite
from mla_suite.integrations import plans

_FP8 = {torch.float8_e4m3fn: "fp8", torch.float8_e4m3fnuz: "fp8_fnuz"}
_LAYOUTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", **_FP8}
REDUCE_BATCHES = (0, 2, 4, 8)
REDUCE_VECS = (0, 1, 2, 4)
mla = sys.modules[__name__]  # AITER's own callers write aiter.mla.mla_decode_fwd


def mla_decode_fwd(
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    o: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    max_seqlen_q: int,
    page_size: int = 1,
    nhead_kv: int = 1,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    num_kv_splits: int | None = None,
    num_kv_splits_indptr: torch.Tensor | None = None,
    work_meta_data: torch.Tensor | None = None,
    work_indptr: torch.Tensor | None = None,
    work_info_set: torch.Tensor | None = None,
    reduce_indptr: torch.Tensor | None = None,
    reduce_final_map: torch.Tensor | None = None,
    reduce_partial_map: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    kv_scale: torch.Tensor | None = None,
    intra_batch_mode: bool = False,
    return_logits: bool = False,
    return_lse: bool = False,
    g_kv_indptr: torch.Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Decode into `o`.

    q                  [tokens, heads, head_dim] bf16, fp16, fp32 or float8
    kv_buffer          [pages, page_size, 1, head_dim] bf16, fp16, fp32 or float8
    o                  [tokens, heads, head_dim_v] in q's dtype, bf16 for float8 queries; written through decode.out
    qo_indptr          [batch + 1] int32; kv_indptr [batch + 1] int32 counts pages; kv_indices int32 page ids
    kv_last_page_lens  [batch] int32, tokens in the last page; not read with pages of one token
    sm_scale           1 / sqrt(head_dim) if None
    num_kv_splits      equal splits per sequence; with work_meta_data not read
    work_meta_data, work_indptr, work_info_set   from get_mla_metadata_v1: how the work is shared out
    q_scale, kv_scale  [1] fp32, multiply to dequantise; read with float8 tensors only
    causal             query token i of n sees keys up to kv_len - n + i

    Not read: num_kv_splits_indptr, intra_batch_mode and the reduce_* tensors (splits merge inside).

    -> (o, lse [tokens, heads] fp32 or None). Where AITER returns its scratch of partial results there is none: the
    result stands in its place.
    """
    name = "mla_decode_fwd"
    if logit_cap > 0:
        _refuse(name, f"logit_cap is {logit_cap}", "scores are not capped: pass 0")
    if nhead_kv != 1:
        _refuse(name, f"nhead_kv is {nhead_kv}", "latent attention has 1 KV head")
    if cp_world_size > 1:
        _refuse(name, f"cp_world_size is {cp_world_size}", "round-robin context parallel is not supported: pass 1")
    if return_logits:
        _refuse(name, "return_logits is True", "splits merge inside and leave no partial results: pass False")
    if kv_buffer.dtype not in _LAYOUTS:
        possible = "it takes bfloat16, float16, float32 or float8 rows; three-buffer and packed pages are not supported"
        _refuse(name, f"kv_buffer is {kv_buffer.dtype}", possible, TypeError)
    if kv_buffer.dim() != 4 or kv_buffer.shape[1:3] != (page_size, 1):
        given = f"kv_buffer has shape {tuple(kv_buffer.shape)} and page_size is {page_size}"
        _refuse(name, given, "it takes [pages, page_size, 1, head_dim]")
    if o.dim() != 3:
        _refuse(name, f"o has shape {tuple(o.shape)}", "it takes [tokens, heads, head_dim_v]")
    batch = kv_indptr.shape[0] - 1
    plan = None
    if work_meta_data is not None and batch > 0:
        if work_indptr is None or work_info_set is None:
            given = "work_meta_data is given without work_indptr and work_info_set"
            _refuse(name, given, "pass all that get_mla_metadata_v1 filled, or none of it")
        plan = plans.recall(work_info_set, batch)
        if plan is None:
            plan = plans.from_aiter(work_indptr, work_info_set, kv_indptr, page_size=page_size)
    lse = torch.empty(o.shape[:2], dtype=torch.float32, device=o.device)
    torch.ops.mla_suite.decode.out(
        q,
        kv_buffer.squeeze(2),
        _seq_lens(kv_indptr, kv_last_page_lens, page_size),
        None,
        kv_indptr,
        kv_indices,
        qo_indptr,
        q_scale if q.dtype in _FP8 else None,
        kv_scale if kv_buffer.dtype in _FP8 else None,
        plan=plan,
        softmax_scale=q.shape[-1] ** -0.5 if sm_scale is None else sm_scale,
        max_q_len=max_seqlen_q,
        head_dim_v=o.shape[-1],
        causal=causal,
        layout=_LAYOUTS[kv_buffer.dtype],
        num_splits=0 if plan is not None or num_kv_splits is None else num_kv_splits,
        out=o,
        lse=lse,
    )
    return o, lse if return_lse else None


def get_mla_metadata_info_v1(
    batch_size: int,
    max_seqlen_qo: int,
    num_head_qo: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    is_sparse: bool,
    fast_mode: bool = True,
    num_kv_splits: int = 32,
    intra_batch_mode: bool = False,
    max_split_per_batch: int = -1,
) -> tuple[tuple[Any, torch.dtype], ...]:
    """(shape, dtype) of the buffers that get_mla_metadata_v1 fills, in AITER's order.

    work_metadata_ptrs, work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map; a shape of one
    dimension is a number. Sized for the current GPU, or 8 workers without one. Only batch_size and is_sparse are read:
    one plan serves any heads, query length and dtype.
    """
    if is_sparse:
        _refuse_sparse("get_mla_metadata_info_v1", "is_sparse is True")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    workers = plans.workers_for(torch.empty(0, device=device))
    works = batch_size + workers
    return (
        (2, torch.uint64),
        (workers + 1, torch.int32),
        ((works, 8), torch.int32),
        (batch_size + 1, torch.int32),
        ((batch_size, 2), torch.int32),
        (works, torch.int32),
    )


def get_mla_metadata_v1(
    seqlens_qo_indptr: torch.Tensor,
    seqlens_kv_indptr: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
    is_causal: bool,
    work_metadata_ptrs: torch.Tensor,
    work_info_set: torch.Tensor,
    work_indptr: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor,
    reduce_partial_map: torch.Tensor,
    page_size: int = 1,
    kv_granularity: int = 16,
    max_seqlen_qo: int = -1,
    uni_seqlen_qo: int = -1,
    fast_mode: bool = True,
    topk: int = -1,
    max_split_per_batch: int = -1,
    intra_batch_mode: bool = False,
    is_cp_round_robin: bool = False,
    mla_version: Any = None,
    dtype_q_nope: torch.dtype | None = None,
    dtype_q_rope: torch.dtype | None = None,
    dtype_kv_nope: torch.dtype | None = None,
    dtype_kv_rope: torch.dtype | None = None,
    dtype_q: torch.dtype | None = None,
    dtype_kv: torch.dtype | None = None,
) -> None:
    """Plan one step and write the plan into the six buffers, in AITER's format (`plans.to_aiter`), in place.

    work_indptr says how many workers share the work: one fewer than its words. The lists are true to the plan that
    mla_decode_fwd then runs with, so other kernels may read them too, for one query tile per sequence.
    work_metadata_ptrs [2] gets the addresses of work_indptr and work_info_set. Nothing is read on the host, and no
    plan is wrong for other lengths, only less even.

    Not read, since they tune AITER's planner: is_causal, kv_granularity, uni_seqlen_qo, fast_mode, max_split_per_batch,
    intra_batch_mode, mla_version and the dtypes.
    """
    name = "get_mla_metadata_v1"
    if num_heads_k != 1:
        _refuse(name, f"num_heads_k is {num_heads_k}", "latent attention has 1 KV head")
    if topk >= 0:
        _refuse_sparse(name, f"topk is {topk}")
    if is_cp_round_robin:
        _refuse(name, "is_cp_round_robin is True", "round-robin context parallel is not supported: pass False")
    batch, workers = seqlens_kv_indptr.shape[0] - 1, work_indptr.shape[0] - 1
    q_len = max(max_seqlen_qo, uni_seqlen_qo, 1)
    if work_info_set.shape[0] < batch + workers or reduce_partial_map.shape[0] < batch + workers:
        given = f"work_info_set has {work_info_set.shape[0]} rows, reduce_partial_map {reduce_partial_map.shape[0]}"
        _refuse(name, given, f"{batch} sequences and {workers} workers need {batch + workers}: see *_info_v1")
    if reduce_indptr.shape[0] < batch + 1 or reduce_final_map.shape[0] < batch:
        given = f"reduce_indptr has {reduce_indptr.shape[0]} words, reduce_final_map {reduce_final_map.shape[0]} rows"
        _refuse(name, given, f"{batch} sequences need {batch + 1} and {batch}: see *_info_v1")
    seq_lens = _seq_lens(seqlens_kv_indptr, kv_last_page_lens, page_size)
    plan = mla_suite.plan(seq_lens, seqlens_qo_indptr, rows=num_heads_per_head_k * q_len, workers=workers, max_kv_len=0)
    made = plans.to_aiter(
        plan, seqlens_qo_indptr, seqlens_kv_indptr, workers=workers, page_size=page_size, max_seqlen_q=q_len
    )
    buffers = (work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map)
    for buffer, part in zip(buffers, made, strict=True):
        buffer[: part.shape[0]].copy_(part)
    reduce_indptr[batch + 1 :] = made.reduce_indptr[-1]  # tiles past the batch merge nothing
    pointers = work_metadata_ptrs.view(torch.int64)
    pointers[0] = work_indptr.data_ptr()  # fills: a copy from host memory could not be captured
    pointers[1] = work_info_set.data_ptr()
    plans.remember(work_info_set, plan, batch)


def mla_reduce_v1(
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor | None,
    reduce_partial_map: torch.Tensor,
    max_seqlen_q: int,
    num_kv_splits: int,
    final_output: torch.Tensor,
    final_lse: torch.Tensor | None = None,
) -> None:
    """Merge the partial results of each tile into final_output (and final_lse), in place.

    partial_output      [rows, heads, head_dim_v] or [rows, 1, heads, head_dim_v] fp32, normalised; a row is one query
                        token of one split. partial_lse [rows, heads], also [rows, 1, heads, 1], fp32 natural log
    reduce_indptr       [tiles + 1] int32: tile i merges entries reduce_indptr[i]..reduce_indptr[i + 1] of
    reduce_partial_map  [entries] int32: first row of each partial; the query tokens of a tile are adjacent rows
    reduce_final_map    [tiles, 2] int32, first and last + 1 query token of each tile; None: max_seqlen_q each, in order
    final_output        [tokens, heads, head_dim_v] bf16, fp16 or fp32; final_lse [tokens, heads] fp32

    A tile of 0 or 1 entries is left untouched: whoever made it wrote the final rows. num_kv_splits sizes AITER's
    scratch and is not read. The maps are general, so partials are gathered first; where splits are uniform
    `mla_decode_reduce` moves nothing.
    """
    heads, head_dim_v = final_output.shape[-2:]
    rows, lse_rows = partial_output.view(-1, heads, head_dim_v), partial_lse.view(-1, heads)
    tiles, tokens, device = reduce_indptr.shape[0] - 1, final_output.shape[0], final_output.device
    if max_seqlen_q < 1:
        _refuse("mla_reduce_v1", f"max_seqlen_q is {max_seqlen_q}", "pass the most query tokens of a tile")
    if tiles == 0 or tokens == 0:
        return
    step = torch.arange(max_seqlen_q, device=device)
    # Entries past reduce_indptr[-1] hold anything; clamped, they are read and never used.
    source = (reduce_partial_map.long()[:, None] + step).clamp(0, rows.shape[0] - 1)
    merged_out, merged_lse = mla_suite.combine(
        rows[source].flatten(1, 2), lse_rows[source].flatten(1), reduce_indptr, out_dtype=final_output.dtype
    )
    merged_out, merged_lse = merged_out.view(-1, heads, head_dim_v), merged_lse.view(-1, heads)
    if reduce_final_map is None:
        first = torch.arange(tiles, device=device) * max_seqlen_q
        end = first + max_seqlen_q
    else:
        first, end = reduce_final_map[:tiles].long().unbind(1)
    target = first[:, None] + step
    merges = (target < end[:, None]) & (reduce_indptr.diff() > 1)[:, None]
    # Row of the merged result for every query token, or -1; one spare token swallows what is not merged.
    row = torch.full((tokens + 1,), -1, device=device)
    target = torch.where(merges & (target >= 0), target, tokens).clamp(max=tokens)
    row.scatter_(0, target.flatten(), torch.arange(target.numel(), device=device))
    row = row[:tokens]
    taken, found = row >= 0, row.clamp(min=0)
    final_output.copy_(torch.where(taken[:, None, None], merged_out[found], final_output))
    if final_lse is not None:
        final_lse.copy_(torch.where(taken[:, None], merged_lse[found], final_lse))


def mla_decode_reduce(
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    reduced: torch.Tensor,
    kv_indptr: torch.Tensor,
    T: int,
    batch: int = 0,
    vec: int = 0,
    num_splits: int = 0,
) -> None:
    """Merge num_splits equal splits of each of T query tokens into `reduced`, in place and without a copy.

    partial_output [T, num_splits, heads, head_dim_v] fp32, normalised; partial_lse [T, num_splits, heads] or with a
    last dimension of 1, fp32 natural log, -inf for a split without keys; reduced [T, heads, head_dim_v] bf16, fp16 or
    fp32; kv_indptr [T + 1] int32 is checked and not read, since splits without keys say so themselves.

    batch (2, 4, 8) and vec (1, 2, 4) are launch shapes of the kernel this call is written for. Ours are chosen by
    `combine`, from its tuned tables; 0 or a legal value changes nothing. num_splits 0 takes partial_output's.
    """
    name = "mla_decode_reduce"
    if batch not in REDUCE_BATCHES or vec not in REDUCE_VECS:
        _refuse(name, f"batch is {batch} and vec is {vec}", f"batch takes {REDUCE_BATCHES}, vec takes {REDUCE_VECS}")
    if reduced.dim() != 3 or reduced.shape[0] != T:
        _refuse(name, f"reduced has shape {tuple(reduced.shape)}", f"it takes [T, heads, head_dim_v] with T = {T}")
    heads, head_dim_v = reduced.shape[1:]
    splits = num_splits or (partial_output.shape[1] if partial_output.dim() > 1 else 0)
    expected = (T, splits, heads, head_dim_v)
    if tuple(partial_output.shape) != expected or partial_lse.numel() != math.prod(expected[:3]):
        given = f"partial_output has shape {tuple(partial_output.shape)}, partial_lse {tuple(partial_lse.shape)}"
        _refuse(name, given, f"they take [T, num_splits, heads, head_dim_v] = {expected} and the same without the last")
    if tuple(kv_indptr.shape) != (T + 1,):
        _refuse(name, f"kv_indptr has shape {tuple(kv_indptr.shape)}", f"it takes [T + 1] = ({T + 1},)")
    torch.ops.mla_suite.combine.out(
        partial_output.view(T * splits, heads, head_dim_v),
        partial_lse.view(T * splits, heads),
        num_splits=splits,
        out_dtype=reduced.dtype,
        out=reduced,
        lse=torch.empty((T, heads), dtype=torch.float32, device=reduced.device),
    )


def _seq_lens(kv_indptr: torch.Tensor, kv_last_page_lens: torch.Tensor, page_size: int) -> torch.Tensor:
    pages = kv_indptr.diff()
    if page_size == 1:
        return pages
    return torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_lens, 0).int()


def _refuse_sparse(name: str, given: str) -> NoReturn:
    possible = "plan sparse selections as pages of one token per query token, or call mla_suite.sparse_decode"
    _refuse(name, given, possible)


def _refuse(name: str, given: str, possible: str, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{name}: {given}; {possible}")
