"""FlashMLA's sparse prefill on sparse_decode.

FlashMLA returns the largest scaled score of every row beside out and lse. The operator does not. A kernel that can
return it does so in eager calls; otherwise it is a second pass in torch over the selected keys.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_suite.core import allocation, dispatch, eager
from mla_suite.core.eager import PreparedCall
from mla_suite.core.op import Output
from mla_suite.integrations import WIDE, check_kinds
from mla_suite.integrations import refuse as _refuse
from mla_suite.ops.sparse_decode import SPARSE_DECODE, SparseDecodeArgs

_SLOT = "flash_mla_sparse_fwd"  # of the eager fast path
SPARSE_CHUNK_BYTES = 64 * 2**20  # of gathered fp32 keys while max_logits is computed by torch


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

    On an H100 or H200 with bf16 rows of 576 or 512 values, eager calls take max_logits from the kernel, which ignores
    scores that are NaN. Calls that torch traces, or that debug mode or a profiler observes, and other problems compute
    it by torch, which takes many times as long as the rest.
    """
    given, settings = (q, kv, indices, attn_sink, topk_length), (sm_scale, d_v)
    known = eager.recall(_SLOT, given, settings)
    if known is not None:
        out, lse, max_logits = outputs = known.allocate()
        known.launch(outputs, given)
        return out, max_logits, lse
    optional = dict(attn_sink=attn_sink, topk_length=topk_length)
    check_kinds("flash_mla_sparse_fwd", dict(q=q, kv=kv, indices=indices), optional, dict(d_v=d_v))
    if kv.dim() != 3 or kv.shape[1] != 1 or indices.dim() != 3 or indices.shape[1] != 1:
        shapes = f"kv has shape {tuple(kv.shape)} and indices {tuple(indices.shape)}"
        _refuse("flash_mla_sparse_fwd", shapes, "they take [s_kv, 1, head_dim] and [s_q, 1, topk]")
    if kv.dtype not in WIDE:
        _refuse("flash_mla_sparse_fwd", f"kv is {kv.dtype}", "it takes bfloat16, float16 or float32", TypeError)
    out = q.new_empty((*q.shape[:-1], max(d_v, 0)))
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    options: dict[str, Any] = dict(
        kv_formats=[WIDE[kv.dtype]], softmax_scale=sm_scale, head_dim_v=d_v, plus_inf_lse=True
    )
    if not torch.compiler.is_dynamo_compiling() and out.numel() and kv.numel():
        outputs = out, lse, torch.empty_like(lse)
        known = _remember(given, settings, options, outputs)
        if known is not None:
            known.launch(outputs, given)
            return out, outputs[2], lse
    torch.ops.mla_suite.sparse_decode.out(*_tensors(given), **options, out=out, lse=lse)
    return out, _max_logits(q, kv.squeeze(1), indices.squeeze(1), sm_scale, topk_length), lse


def _tensors(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The positional arguments of sparse_decode: pages of one token."""
    q, kv, indices, attn_sink, topk_length = given
    return q, [kv], [indices.squeeze(1)], [None], [topk_length], attn_sink, None


def _remember(
    given: tuple[Any, ...], settings: tuple[Any, ...], options: dict[str, Any], outputs: tuple[torch.Tensor, ...]
) -> PreparedCall | None:
    """Have `eager.recall` find calls like this one, where their kernel returns max_logits; what it finds now."""
    arch = dispatch.arch_of(outputs[0])
    if arch is None:
        return None
    args = SparseDecodeArgs(*_tensors(given), **options)
    SPARSE_DECODE.check(args)
    first, problem = outputs[0], SPARSE_DECODE.describe(args)
    choice = dispatch.choose(SPARSE_DECODE.name, SPARSE_DECODE.backends, problem, arch, first.device.type)
    if not getattr(choice.supported.config, "returns_max_logits", False):
        return None
    launch = choice.backend.prepare(choice.supported.config, outputs, args)
    allocate = allocation.allocator([Output(tuple(t.shape), t.dtype) for t in outputs], first.device)

    def start(outputs: tuple[torch.Tensor, ...], given: tuple[Any, ...]) -> None:
        outputs[2].fill_(-torch.inf)
        launch(outputs, _tensors(given))

    eager.remember(_SLOT, given, settings, PreparedCall(allocate, start, tuple(map(type, settings)), {}))
    return eager.recall(_SLOT, given, settings)


def _max_logits(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, topk_length: torch.Tensor | None
) -> torch.Tensor:
    counts = (indices >= 0) & (indices < kv.shape[0])
    if topk_length is not None:
        counts &= torch.arange(indices.shape[1], device=q.device) < topk_length[:, None]
    largest = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    if not counts.numel() or not kv.numel():
        return largest
    tokens = max(1, SPARSE_CHUNK_BYTES // (4 * indices.shape[1] * kv.shape[1]))
    for first in range(0, q.shape[0], tokens):
        some = slice(first, first + tokens)
        keys = kv[torch.where(counts[some], indices[some], 0).long()].float()
        scores = (q[some].float() @ keys.transpose(1, 2)) * scale
        largest[some] = scores.masked_fill_(~counts[some, None, :], -torch.inf).amax(-1)
    return largest
