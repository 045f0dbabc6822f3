"""FlashMLA's sparse prefill on sparse_decode."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

import mla_suite
from mla_suite.integrations import WIDE, check_kinds, in_words
from mla_suite.integrations import refuse as _refuse
from mla_suite.ops.plan.metadata import OPEN

NAME = "flash_mla_sparse_fwd"
_WORDS = {
    **{"kv_caches[0]": "kv", "indices[0]": "indices", "topk_lengths[0]": "topk_length", "head_dim_v": "d_v"},
    **{"softmax_scale": "sm_scale", "kv_format": "format"},
}
"""Arguments of sparse_decode -> those of `flash_mla_sparse_fwd`."""
LOG2_E = math.log2(math.e)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
    *,
    out: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Sparse prefill: every query token attends to its own selection of unpaged keys.

    q [s_q, heads, head_dim] and kv [s_kv, 1, head_dim] of one dtype; indices [s_q, 1, topk] int32, -1 or >= s_kv
    selects nothing; sm_scale multiplies q . kv; topk_length [s_q] int32; attn_sink [heads] fp32

    -> out [s_q, heads, d_v], max_logits [s_q, heads] fp32, lse [s_q, heads] fp32: both natural, of scaled scores,
    without the sink. A query token without keys gives out 0, max_logits -inf, lse +inf. With return_log2_lse=True both
    have base 2, with False None stands for each. use_legacy is not read: it chooses between FlashMLA's own kernels.
    `out` [s_q, heads, d_v], by its name, is written and returned, head slices included; the kernel writes there with
    return_log2_lse=False, and otherwise its result is copied. With enable_batch_invariant keys are not split, so the
    bits of a query token do not depend on the others; by default few query tokens share their keys out among CTAs.

    On an H100 or H200 with bf16 rows of 576 or 512 values the kernel stores max_logits, in eager and compiled calls; it
    ignores scores that are NaN. Elsewhere torch computes it, which takes many times as long as the rest.
    """
    optional = dict(attn_sink=attn_sink, topk_length=topk_length, out=out)
    flags = dict(enable_batch_invariant=enable_batch_invariant, use_legacy=use_legacy)
    flags |= {} if return_log2_lse is None else dict(return_log2_lse=return_log2_lse)
    check_kinds(NAME, dict(q=q, kv=kv, indices=indices), optional, dict(d_v=d_v), flags)
    if kv.dim() != 3 or kv.shape[1] != 1 or indices.dim() != 3 or indices.shape[1] != 1:
        shapes = f"kv has shape {tuple(kv.shape)} and indices {tuple(indices.shape)}"
        _refuse(NAME, shapes, "they take [s_kv, 1, head_dim] and [s_q, 1, topk]")
    if q.dim() != 3 or indices.shape[0] != q.shape[0] or kv.shape[2] != q.shape[2]:
        shapes = f"q has shape {tuple(q.shape)}, kv {tuple(kv.shape)} and indices {tuple(indices.shape)}"
        _refuse(NAME, shapes, "they take [s_q, heads, head_dim], [s_kv, 1, head_dim] and [s_q, 1, topk]")
    if kv.dtype not in WIDE:
        _refuse(NAME, f"kv is {kv.dtype}", "it takes bfloat16, float16 or float32", TypeError)
    wanted = (*q.shape[:2], d_v)
    if out is not None and (tuple(out.shape), out.dtype) != (wanted, q.dtype):
        _refuse(NAME, f"out is {out.dtype} {tuple(out.shape)}", f"it takes {q.dtype} {wanted}, what is returned")
    tensors = q, [kv], [indices.squeeze(1)], [None], [topk_length], attn_sink, None  # pages of one token
    options: dict[str, Any] = dict(kv_formats=[WIDE[kv.dtype]], softmax_scale=sm_scale, head_dim_v=d_v)
    options["split_size"] = OPEN if enable_batch_invariant else 0
    checked, operator = partial(in_words, NAME, _WORDS), torch.ops.mla_suite.sparse_decode
    if return_log2_lse is False:
        if out is None:
            out, _ = checked(mla_suite.sparse_decode, *tensors, **options)
        else:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
            checked(operator.out, *tensors, **options, out=out, lse=lse)
        return out, None, None
    found, lse, max_logits = checked(operator.max_logits, *tensors, **options, plus_inf_lse=True)
    out = found if out is None else out.copy_(found)
    return (out, max_logits * LOG2_E, lse * LOG2_E) if return_log2_lse else (out, max_logits, lse)
