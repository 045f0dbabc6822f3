"""AITER's MLA decode interface on our operators: a script written for it runs after one changed import.

    from mla_suite.integrations import aiter
    aiter.mla_decode_fwd(q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q)

Outputs are written in place, into the tensors given. lse is natural, -inf where a query token sees no key, and its
output is 0. A sequence has (pages - 1) x page_size + kv_last_page_lens keys, none if it has no page. A dense decode
enqueues what `decode.out` does and, since AITER's calls bring page counts and no lengths, one operation of torch that
makes lengths for pages of one token, five for larger pages. Sparse attention is spelled in either of AITER's ways:
kv_indptr per query token over pages of one token, or metadata with topk. docs/serving_engineer.md lists the rest.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from mla_suite.core import checks
from mla_suite.errors import CallError
from mla_suite.integrations import FP8, KV_FORMATS, absent, check_kinds, in_words, metadata_convert, restate
from mla_suite.integrations import refuse as _refuse
from mla_suite.integrations.aiter_metadata import DENSE, lengths, selected, topk_of
from mla_suite.integrations.aiter_metadata import get_mla_metadata_info_v1 as get_mla_metadata_info_v1
from mla_suite.integrations.aiter_metadata import get_mla_metadata_v1 as get_mla_metadata_v1
from mla_suite.integrations.aiter_reduce import mla_decode_reduce as mla_decode_reduce
from mla_suite.integrations.aiter_reduce import mla_reduce_v1 as mla_reduce_v1

_LENGTH = "by kv_indptr and kv_last_page_lens, length"
_WORDS = {
    **{"kv_cache": "kv_buffer", "seq_lens": _LENGTH, "cu_seqlens_q": "qo_indptr", "out": "o", "q_descale": "q_scale"},
    **{"kv_descale": "kv_scale", "plan": "work_info_set", "softmax_scale": "sm_scale", "kv_format": "format"},
    **{"head_dim_v": "the last dimension of o", "num_splits": "num_kv_splits", "kv_caches[0]": "kv_buffer"},
    **{"indices[0]": "kv_indices", "topk_lengths[0]": "by kv_indptr and topk, length"},
}
"""Arguments of the operators -> those of `mla_decode_fwd`."""
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
    kv_buffer          [num_pages, page_size, 1, head_dim] bf16, fp16, fp32 or float8
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
    Metadata that AITER's own planner made does not say topk: where it selects, it is refused, by its last key.

    -> (o, lse [tokens, heads] fp32 or None). Where AITER returns its scratch of partial results there is none: the
    result stands in its place.
    """
    name = "mla_decode_fwd"
    tensors = q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices
    sizes = max_seqlen_q, page_size, nhead_kv, cp_world_size
    counted = isinstance(max_seqlen_q, int) and isinstance(page_size, int)
    counted = counted and isinstance(nhead_kv, int) and isinstance(cp_world_size, int)
    if not (counted and all(map(torch.is_tensor, tensors)) and q.dim() and kv_indptr.dim() == 1):
        _refuse_kinds(name, tensors, sizes)
    if not isinstance(logit_cap, (int, float)):
        _refuse(name, f"logit_cap is {logit_cap!r}", "scores are not capped: pass 0", TypeError)
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
        _refuse(name, given, "it takes [num_pages, page_size, 1, head_dim]")
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
        for argument, value in (("work_info_set", work_info_set), ("work_indptr", work_indptr)):
            if value.dtype != torch.int32:
                _refuse(name, f"{argument} is {value.dtype}", "it takes int32", TypeError)
        wide = work_info_set.shape[1:] == (len(metadata_convert.AiterColumn),)
        if not (wide and work_info_set.shape[0] and work_indptr.dim() == 1 and work_indptr.shape[0] > 1):
            given = f"work_info_set has shape {tuple(work_info_set.shape)} and work_indptr {tuple(work_indptr.shape)}"
            _refuse(name, given, "they take what get_mla_metadata_v1 filled: [works, 8] and [parts + 1]")
        if work_info_set.device != q.device or work_indptr.device != q.device:
            given = f"work_info_set is on {work_info_set.device} and work_indptr on {work_indptr.device}"
            _refuse(name, given, f"q is on {q.device}: move them there")
        topk = topk_of(name, work_indptr, work_info_set, kv_indptr)
        if topk != DENSE:
            _decode_selected(q, kv_buffer, o, lse, qo_indptr, kv_indptr, kv_indices, topk, scale)
            return o, lse if return_lse else None
        plan = metadata_convert.lookup(work_info_set, batch)
        if plan is None:
            plan = metadata_convert.from_aiter(work_indptr, work_info_set, kv_indptr, page_size=page_size)
    seq_lens = lengths(name, kv_indptr, kv_last_page_lens, page_size)
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


def _refuse_kinds(name: str, tensors: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
    """TypeError for what is no tensor, has no dimension or is no int; apart, since every call would pay for it."""
    names = ("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices")
    counts = ("max_seqlen_q", "page_size", "nhead_kv", "cp_world_size")
    check_kinds(name, dict(zip(names, tensors, strict=True)), {}, dict(zip(counts, sizes, strict=True)))
    checks.tensor(name, "kv_indptr", tensors[4], rank=1, dtypes=checks.INDEX)


def mla_reduce_decode(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Decode and reduce, with the arguments of `mla_decode_fwd`, which does both here and is what this always calls."""
    return in_words("mla_reduce_decode", {}, mla_decode_fwd, *args, **kwargs)


def _decode_selected(
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    qo_indptr: torch.Tensor,
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
    lens, _ = selected(name, "qo_indptr", qo_indptr, kv_indptr, tokens, topk)
    chosen = kv_indices.view(-1)[: tokens * topk].view(tokens, topk)
    in_words(
        *(name, _WORDS, torch.ops.mla_suite.sparse_decode.out),
        *(q, [kv_buffer.squeeze(2)], [chosen], [None], [lens]),
        kv_formats=[KV_FORMATS[kv_buffer.dtype]],
        softmax_scale=scale,
        head_dim_v=o.shape[-1],
        out=o,
        lse=lse,
    )


_INSTEAD = {
    "mla_decode_fwd_v4_nm": "call mla_suite.sparse_decode, which takes V4's pools and sink",
    "mla_v40_decode_fwd": "call mla_suite.sparse_decode, which takes V4's pools and sink",
    "mla_decode_fwd_ds32": "call mla_suite.sparse_decode, which takes V3.2's records",
    "mla_prefill_fwd": "prefill attends un-absorbed: see mla_suite.models.MLA.prefill",
    "mla_prefill_ps_fwd": "prefill attends un-absorbed: see mla_suite.models.MLA.prefill",
    "decode_update_mla_metadata_v1": "call get_mla_metadata_v1 again: it runs on the device, into the same buffers",
}
__getattr__ = absent(__name__, {n: f"it is not in mla_suite's AITER interface; {do}" for n, do in _INSTEAD.items()})
