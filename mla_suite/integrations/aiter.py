"""AITER's MLA decode interface on our operators: a script written for it runs after one changed import.

    from mla_suite.integrations import aiter
    aiter.mla_decode_fwd(q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q)

Outputs are written in place, into the tensors given. lse is natural, -inf where a query token sees no key, and its
output is 0. A sequence has (pages - 1) x page_size + kv_last_page_lens keys, none if it has no page. Any number of
heads, query length and page size is taken. A dense decode enqueues what `decode.out` does and, since AITER's calls
bring page counts and no lengths, one operation of torch that makes lengths for pages of one token, five for larger
pages. Arguments that only tune AITER's own kernels or planner are accepted and not read; each function names them.

Sparse attention is spelled in either of AITER's ways: kv_indptr per query token over pages of one token, or metadata
with topk, where kv_indices has topk entries for every query token. Metadata says in its own data that it selects, so a
copy or a slice of it means the same.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

import mla_suite
from mla_suite.core import checks
from mla_suite.errors import CallError
from mla_suite.integrations import FP8, KV_FORMATS, absent, capturing, check_kinds, metadata_convert, restate
from mla_suite.integrations import refuse as _refuse
from mla_suite.integrations.aiter_reduce import mla_decode_reduce as mla_decode_reduce
from mla_suite.integrations.aiter_reduce import mla_reduce_v1 as mla_reduce_v1
from mla_suite.ops.plan import sm_parts

_LENGTH = "by kv_indptr and kv_last_page_lens, length"
_WORDS = {
    **{"kv_cache": "kv_buffer", "seq_lens": _LENGTH, "cu_seqlens_q": "qo_indptr", "out": "o", "q_descale": "q_scale"},
    **{"kv_descale": "kv_scale", "plan": "work_info_set", "softmax_scale": "sm_scale", "kv_format": "format"},
    **{"head_dim_v": "the last dimension of o", "num_splits": "num_kv_splits", "kv_caches[0]": "kv_buffer"},
    **{"indices[0]": "kv_indices", "topk_lengths[0]": "by kv_indptr and topk, length"},
}
"""Arguments of the operators -> those of `mla_decode_fwd`."""
_METADATA_WORDS = {
    **{"seq_lens": "by seqlens_kv_indptr and kv_last_page_lens, length", "cu_seqlens_q": "seqlens_qo_indptr"},
    **{"num_heads x max_seqlen_q": "num_heads_per_head_k x max_seqlen_qo", "num_heads": "num_heads_per_head_k"},
    **{"max_seqlen_q": "max_seqlen_qo", "num_sm_parts": "the length of work_indptr less 1"},
}
"""Arguments of plan -> those of `get_mla_metadata_v1`."""
mla = sys.modules[__name__]  # AITER's own callers write aiter.mla.mla_decode_fwd
# The last column of work_info_set, which AITER does not use, holds this plus topk where the metadata selects keys. An
# int32 that memory nobody wrote is unlikely to hold; topk takes the lower 16 bits.
TOPK_MARK = 0x4D4C0000
MAX_TOPK = 0xFFFF
DENSE = -1
# work_info_set -> (topk or DENSE, version of the tensor when that was so): saves reading the mark on the host.
_topk_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


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

    Not read: num_kv_splits_indptr, intra_batch_mode, the reduce_* tensors (splits merge inside), and g_kv_indptr and
    cp_rank, which say something about more than one rank only.

    After metadata with topk, or a copy or slice of it: kv_indices [tokens x topk], of which query token t has
    kv_indices[t x topk :][: min(keys of its sequence, topk)] and sees all; pages of one token; bf16, fp16 or fp32.

    -> (o, lse [tokens, heads] fp32 or None). Where AITER returns its scratch of partial results there is none: the
    result stands in its place.
    """
    name = "mla_decode_fwd"
    tensors = q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices
    if not all(map(torch.is_tensor, tensors)) or kv_indptr.dim() != 1 or not isinstance(max_seqlen_q, int):
        _refuse_kinds(name, tensors, max_seqlen_q)
    if kv_indptr.dtype != torch.int32:  # lengths, of which the operator would speak, are made from it
        checks.tensor(name, "kv_indptr", kv_indptr, rank=1, dtypes=checks.INDEX)
    if logit_cap > 0:
        _refuse(name, f"logit_cap is {logit_cap}", "scores are not capped: pass 0")
    if nhead_kv != 1:
        _refuse(name, f"nhead_kv is {nhead_kv}", "latent attention has 1 KV head")
    if cp_world_size > 1:
        _refuse(name, f"cp_world_size is {cp_world_size}", "round-robin context parallel is not supported: pass 1")
    if return_logits:
        _refuse(name, "return_logits is True", "splits merge inside and leave no partial results: pass False")
    if kv_buffer.dtype not in KV_FORMATS:
        possible = "it takes bfloat16, float16, float32 or float8 rows; three-buffer and packed pages are not supported"
        _refuse(name, f"kv_buffer is {kv_buffer.dtype}", possible, TypeError)
    if kv_buffer.dim() != 4 or kv_buffer.shape[1:] != (page_size, 1, q.shape[-1]) or page_size < 1:
        given = f"kv_buffer has shape {tuple(kv_buffer.shape)}, page_size is {page_size} and q has {q.shape[-1]} values"
        _refuse(name, given, "it takes [pages, page_size, 1, head_dim]")
    if o.dim() != 3:
        _refuse(name, f"o has shape {tuple(o.shape)}", "it takes [tokens, heads, head_dim_v]")
    batch = kv_indptr.shape[0] - 1
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    lse = torch.empty(o.shape[:2], dtype=torch.float32, device=o.device)
    plan = None
    if work_meta_data is not None and batch > 0:
        if work_indptr is None or work_info_set is None:
            given = "work_meta_data is given without work_indptr and work_info_set"
            _refuse(name, given, "pass all that get_mla_metadata_v1 filled, or none of it")
        if not (torch.is_tensor(work_indptr) and torch.is_tensor(work_info_set) and work_info_set.dim() == 2):
            check_kinds(name, dict(work_indptr=work_indptr, work_info_set=work_info_set), {}, {})
        if work_info_set.shape[1:] != (len(metadata_convert.AiterColumn),) or work_indptr.dim() != 1:
            given = f"work_info_set has shape {tuple(work_info_set.shape)} and work_indptr {tuple(work_indptr.shape)}"
            _refuse(name, given, "they take what get_mla_metadata_v1 filled: [works, 8] and [parts + 1]")
        if work_info_set.device != q.device or work_indptr.device != q.device:
            given = f"work_info_set is on {work_info_set.device} and work_indptr on {work_indptr.device}"
            _refuse(name, given, f"q is on {q.device}: move them there")
        topk = _topk_of(name, work_info_set)
        if topk != DENSE:
            _decode_selected(q, kv_buffer, o, lse, kv_indptr, kv_indices, topk, scale)
            return o, lse if return_lse else None
        plan = metadata_convert.recall(work_info_set, batch)
        if plan is None:
            plan = metadata_convert.from_aiter(work_indptr, work_info_set, kv_indptr, page_size=page_size)
    seq_lens = _seq_lens(name, kv_indptr, kv_last_page_lens, page_size)
    try:
        torch.ops.mla_suite.decode.out(
            q,
            kv_buffer.squeeze(2),
            seq_lens,
            None,
            kv_indptr,
            kv_indices,
            qo_indptr,
            q_scale if q.dtype in FP8 else None,
            kv_scale if kv_buffer.dtype in FP8 else None,
            plan=plan,
            softmax_scale=scale,
            max_seqlen_q=max_seqlen_q,
            head_dim_v=o.shape[-1],
            causal=causal,
            kv_format=KV_FORMATS[kv_buffer.dtype],
            num_splits=0 if plan is not None or num_kv_splits is None else num_kv_splits,
            out=o,
            lse=lse,
        )
    except (CallError, RuntimeError) as error:
        restate(name, _WORDS, error)
    return o, lse if return_lse else None


def _refuse_kinds(name: str, tensors: tuple[Any, ...], max_seqlen_q: Any) -> None:
    """TypeError for what is no tensor, has no dimension or is no int; apart, since every call would pay for it."""
    names = ("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices")
    check_kinds(name, dict(zip(names, tensors, strict=True)), {}, dict(max_seqlen_q=max_seqlen_q))
    checks.tensor(name, "kv_indptr", tensors[4], rank=1, dtypes=checks.INDEX)


def mla_reduce_decode(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Decode and reduce, with the arguments of `mla_decode_fwd`, which does both here and is what this always calls."""
    try:
        return mla_decode_fwd(*args, **kwargs)
    except CallError as error:
        restate("mla_reduce_decode", {}, error)


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
    dimension is a number. Sized for the current GPU, or 8 SM parts without one. Only batch_size, and with is_sparse
    max_seqlen_qo, are read: one plan serves any heads, query length and dtype, and a selection is planned per token.
    """
    tiles = batch_size * max_seqlen_qo if is_sparse else batch_size
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_sm_parts = sm_parts(torch.empty(0, device=device), 1)
    works = tiles + num_sm_parts
    return (
        (2, torch.uint64),
        (num_sm_parts + 1, torch.int32),
        ((works, 8), torch.int32),
        (tiles + 1, torch.int32),
        ((tiles, 2), torch.int32),
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
    """Plan one step and write the plan into the six buffers, in AITER's format (`metadata_convert.to_aiter`), in place.

    work_indptr says how many SM parts share the work: one fewer than its words. The lists are true to the plan that
    mla_decode_fwd then runs with, so other kernels may read them too, for one query tile per sequence.
    work_metadata_ptrs [2] gets the addresses of work_indptr and work_info_set. Nothing is read on the host, and no
    plan is wrong for other lengths, only less even.

    With topk each query token is planned for itself: reduce_final_map [batch x query tokens, 2] says how many there
    are. The last column of work_info_set, which AITER leaves unused, then says topk to mla_decode_fwd. That reads it on
    the host for a tensor that it has not seen, once; a captured or compiled step cannot wait for it, and checks on the
    device that the metadata is of the kind that it was captured with.

    Not read, since they tune AITER's planner: is_causal, kv_granularity, uni_seqlen_qo, fast_mode, max_split_per_batch,
    intra_batch_mode, mla_version and the dtypes.
    """
    name = "get_mla_metadata_v1"
    if not isinstance(kv_last_page_lens, torch.Tensor):
        given = f"kv_last_page_lens is {kv_last_page_lens!r}"
        _refuse(name, given, "it is the third argument, a tensor [batch], which AITER's first signature did not have")
    buffers = dict(work_metadata_ptrs=work_metadata_ptrs, work_info_set=work_info_set, work_indptr=work_indptr)
    buffers |= dict(reduce_indptr=reduce_indptr, reduce_final_map=reduce_final_map)
    buffers |= dict(reduce_partial_map=reduce_partial_map)
    indptrs = dict(seqlens_qo_indptr=seqlens_qo_indptr, seqlens_kv_indptr=seqlens_kv_indptr)
    sizes = dict(num_heads_per_head_k=num_heads_per_head_k, page_size=page_size, max_seqlen_qo=max_seqlen_qo, topk=topk)
    check_kinds(name, buffers | indptrs, {}, sizes)
    for argument, value in indptrs.items():
        checks.tensor(name, argument, value, rank=1, dtypes=checks.INDEX)
    if num_heads_k != 1:
        _refuse(name, f"num_heads_k is {num_heads_k}", "latent attention has 1 KV head")
    if is_cp_round_robin:
        _refuse(name, "is_cp_round_robin is True", "round-robin context parallel is not supported: pass False")
    if page_size < 1:
        _refuse(name, f"page_size is {page_size}", "a page holds 1 token or more")
    wide = dict(
        work_info_set=(work_info_set, len(metadata_convert.AiterColumn)), reduce_final_map=(reduce_final_map, 2)
    )
    for argument, (buffer, width) in wide.items():
        if buffer.dim() != 2 or buffer.shape[1] != width:
            _refuse(name, f"{argument} has shape {tuple(buffer.shape)}", f"it takes rows of {width}: see *_info_v1")
    if work_metadata_ptrs.nbytes != 16 or work_metadata_ptrs.dim() != 1:
        given = f"work_metadata_ptrs is {work_metadata_ptrs.dtype} {tuple(work_metadata_ptrs.shape)}"
        _refuse(name, given, "it takes two addresses, uint64 [2]")
    seq_lens, queries = _seq_lens(name, seqlens_kv_indptr, kv_last_page_lens, page_size), seqlens_qo_indptr
    q_len, spans = max(max_seqlen_qo, uni_seqlen_qo, 1), None
    if topk >= 0:
        if page_size != 1:
            _refuse(name, f"topk is {topk} and page_size {page_size}", "selections are of tokens: page_size 1")
        if topk > MAX_TOPK:
            _refuse(name, f"topk is {topk}", f"it takes 0..{MAX_TOPK}")
        tokens = reduce_final_map.shape[0]
        seq_lens = _selected_lens(name, seqlens_kv_indptr, tokens, topk)
        q_len, queries = 1, torch.arange(tokens + 1, dtype=torch.int32, device=seq_lens.device)
        begin = queries.long() * topk
        spans = torch.stack((begin, begin + torch.nn.functional.pad(seq_lens, (0, 1))))
    batch, num_sm_parts = seq_lens.shape[0], work_indptr.shape[0] - 1
    if work_info_set.shape[0] < batch + num_sm_parts or reduce_partial_map.shape[0] < batch + num_sm_parts:
        given = f"work_info_set has {work_info_set.shape[0]} rows, reduce_partial_map {reduce_partial_map.shape[0]}"
        _refuse(
            name, given, f"{batch} sequences and {num_sm_parts} SM parts need {batch + num_sm_parts}: see *_info_v1"
        )
    if reduce_indptr.shape[0] < batch + 1 or reduce_final_map.shape[0] < batch:
        given = f"reduce_indptr has {reduce_indptr.shape[0]} words, reduce_final_map {reduce_final_map.shape[0]} rows"
        _refuse(name, given, f"{batch} sequences need {batch + 1} and {batch}: see *_info_v1")
    sizes = dict(num_heads=num_heads_per_head_k, max_seqlen_q=q_len, num_sm_parts=num_sm_parts)
    try:
        plan = mla_suite.plan(seq_lens, queries, **sizes)
    except (CallError, RuntimeError) as error:
        restate(name, _METADATA_WORDS, error)
    sizes = dict(num_sm_parts=num_sm_parts, page_size=page_size, max_seqlen_q=q_len)
    if spans is None:
        made = metadata_convert.to_aiter(plan, queries, seqlens_kv_indptr, **sizes)
        metadata_convert.remember(work_info_set, plan, batch)
    else:
        made = metadata_convert.aiter_lists(plan, queries, spans, **sizes)
    filled = (work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map)
    for buffer, part in zip(filled, made, strict=True):
        buffer[: part.shape[0]].copy_(part)
    # Every row is marked, so that a slice of them still says what they are.
    work_info_set[:, metadata_convert.AiterColumn.PAD].fill_(0 if spans is None else TOPK_MARK + topk)
    _remember_topk(work_info_set, DENSE if spans is None else topk)
    reduce_indptr[batch + 1 :] = made.reduce_indptr[-1]  # tiles past the batch merge nothing
    pointers = work_metadata_ptrs.view(torch.int64)
    # Assigned, a number would be copied from host memory, which cannot be captured.
    pointers[0].fill_(work_indptr.data_ptr())
    pointers[1].fill_(work_info_set.data_ptr())


def _remember_topk(work_info_set: torch.Tensor, topk: int) -> None:
    """Keep what the tensor says as long as nobody writes it; traced code has no tensors to keep it for."""
    if not torch.compiler.is_dynamo_compiling():
        version = None if work_info_set.is_inference() else work_info_set._version
        _topk_known[work_info_set] = (topk, version)


def _topk_of(name: str, work_info_set: torch.Tensor) -> int:
    """The topk that metadata was made with, or DENSE, from its own data."""
    mark = work_info_set[:1, metadata_convert.AiterColumn.PAD]
    guess = DENSE
    if not torch.compiler.is_dynamo_compiling():
        inference = work_info_set.is_inference()  # such tensors do not count their writes
        guess, version = _topk_known.get(work_info_set, (DENSE, None))
        if version is not None and not inference and version == work_info_set._version:
            return guess
        if not work_info_set.is_meta and not capturing(work_info_set):
            word = int(mark) if mark.numel() else 0
            topk = word - TOPK_MARK if word & ~MAX_TOPK == TOPK_MARK else DENSE
            if not inference:
                _remember_topk(work_info_set, topk)
            return topk
    # The host cannot wait here, so the metadata is taken for what it was, and the device stops where it is not.
    same = mark == TOPK_MARK + guess if guess != DENSE else (mark & ~MAX_TOPK) != TOPK_MARK
    torch._assert_async(
        same.all(),
        f"{name}: work_info_set was made with another topk than the captured or compiled step; pass the tensor that "
        "get_mla_metadata_v1 filled when it was captured, or do not compile this call",
    )
    return guess


def _decode_selected(
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    topk: int,
    scale: float,
) -> None:
    """Each query token over its own row of kv_indices."""
    name, tokens = "mla_decode_fwd", q.shape[0]
    if kv_buffer.dtype in FP8 or kv_buffer.shape[1] != 1:
        given = f"the metadata was made with topk and kv_buffer is {kv_buffer.dtype} in pages of {kv_buffer.shape[1]}"
        _refuse(name, given, "selections are read from bf16, fp16 or fp32 pages of one token")
    if kv_indices.numel() < tokens * topk:
        given = f"kv_indices has {kv_indices.numel()} entries"
        _refuse(name, given, f"{tokens} query tokens and topk {topk} need {tokens * topk}")
    lens = _selected_lens(name, kv_indptr, tokens, topk)
    try:
        torch.ops.mla_suite.sparse_decode.out(
            q,
            [kv_buffer.squeeze(2)],
            [kv_indices.view(-1)[: tokens * topk].view(tokens, topk)],
            [None],
            [lens],
            kv_formats=[KV_FORMATS[kv_buffer.dtype]],
            softmax_scale=scale,
            head_dim_v=o.shape[-1],
            out=o,
            lse=lse,
        )
    except (CallError, RuntimeError) as error:
        restate(name, _WORDS, error)


def _selected_lens(name: str, kv_indptr: torch.Tensor, tokens: int, topk: int) -> torch.Tensor:
    """Keys of each query token: those of its sequence, at most topk."""
    batch = kv_indptr.shape[0] - 1
    if batch < 1 or tokens % batch != 0:
        _refuse(name, f"there are {tokens} query tokens for {batch} sequences", "with topk each has equally many")
    lens = kv_indptr.diff().clamp(max=topk)
    return lens[:, None].expand(batch, tokens // batch).reshape(-1)


_INSTEAD = {
    "mla_decode_fwd_v4_nm": "call mla_suite.sparse_decode, which takes V4's pools and sink",
    "mla_v40_decode_fwd": "call mla_suite.sparse_decode, which takes V4's pools and sink",
    "mla_decode_fwd_ds32": "call mla_suite.sparse_decode, which takes V3.2's records",
    "mla_prefill_fwd": "prefill attends un-absorbed: see mla_suite.models.MLA.prefill",
    "mla_prefill_ps_fwd": "prefill attends un-absorbed: see mla_suite.models.MLA.prefill",
    "decode_update_mla_metadata_v1": "call get_mla_metadata_v1 again: it runs on the device, into the same buffers",
}
__getattr__ = absent(__name__, {n: f"it is not in mla_suite's AITER interface; {do}" for n, do in _INSTEAD.items()})


def _seq_lens(name: str, kv_indptr: torch.Tensor, kv_last_page_lens: torch.Tensor, page_size: int) -> torch.Tensor:
    pages = kv_indptr.diff()
    if page_size == 1:
        return pages
    if not isinstance(kv_last_page_lens, torch.Tensor):
        given = f"kv_last_page_lens is {kv_last_page_lens!r} and page_size is {page_size}"
        _refuse(name, given, "give the tokens in the last page of each sequence, a tensor [batch]")
    if kv_last_page_lens.shape != pages.shape or kv_last_page_lens.device != pages.device:
        given = f"kv_last_page_lens has shape {tuple(kv_last_page_lens.shape)} on {kv_last_page_lens.device}"
        _refuse(name, given, f"it takes [batch] = {tuple(pages.shape)} on {pages.device}, as the pages are counted")
    return torch.where(pages > 0, torch.add(kv_last_page_lens, pages - 1, alpha=page_size), 0).int()
