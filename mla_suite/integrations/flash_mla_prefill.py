"""FlashMLA's sparse prefill on sparse_decode."""

from __future__ import annotations

import torch

from mla_suite.integrations import WIDE, check_kinds
from mla_suite.integrations import refuse as _refuse


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sparse prefill: every query token attends to its own selection of unpaged keys.

    q [s_q, heads, head_dim] and kv [s_kv, 1, head_dim] of one dtype; indices [s_q, 1, topk] int32, -1 or >= s_kv
    selects nothing; topk_length [s_q] int32; attn_sink [heads] fp32

    -> out [s_q, heads, d_v], max_logits [s_q, heads] fp32, lse [s_q, heads] fp32: both natural, of scaled scores,
    without the sink. A query token without keys gives out 0, max_logits -inf, lse +inf.

    On an H100 or H200 with bf16 rows of 576 or 512 values the kernel stores max_logits, in eager and compiled calls; it
    ignores scores that are NaN. Elsewhere torch computes it, which takes many times as long as the rest.
    """
    optional = dict(attn_sink=attn_sink, topk_length=topk_length)
    check_kinds("flash_mla_sparse_fwd", dict(q=q, kv=kv, indices=indices), optional, dict(d_v=d_v))
    if kv.dim() != 3 or kv.shape[1] != 1 or indices.dim() != 3 or indices.shape[1] != 1:
        shapes = f"kv has shape {tuple(kv.shape)} and indices {tuple(indices.shape)}"
        _refuse("flash_mla_sparse_fwd", shapes, "they take [s_kv, 1, head_dim] and [s_q, 1, topk]")
    if kv.dtype not in WIDE:
        _refuse("flash_mla_sparse_fwd", f"kv is {kv.dtype}", "it takes bfloat16, float16 or float32", TypeError)
    out, lse, max_logits = torch.ops.mla_suite.sparse_decode.max_logits(
        *(q, [kv], [indices.squeeze(1)], [None], [topk_length], attn_sink, None),  # pages of one token
        kv_formats=[WIDE[kv.dtype]],
        softmax_scale=sm_scale,
        head_dim_v=d_v,
        plus_inf_lse=True,
    )
    return out, max_logits, lse
