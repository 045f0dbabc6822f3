"""FlashAttention 3 in torch, and SGLang's server on a CPU with prompts expanded through it, as on an H100."""

from __future__ import annotations

from typing import Any

import torch


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    return_softmax_lse: bool,
) -> Any:
    """`flash_attn_varlen_func`: [tokens, heads, width] each, the causal limit at the last key; lse [heads, tokens]."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(cu_seqlens_k.diff().max())
    assert (len(q), len(k), len(v)) == (int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1]), int(cu_seqlens_k[-1]))
    outs, lses = [], []
    for b in range(len(cu_seqlens_q) - 1):
        queries = q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]].float()
        own = slice(int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1]))
        scores = torch.einsum("qhd,khd->hqk", queries, k[own].float()) * softmax_scale
        q_len, kv_len = scores.shape[1:]
        if causal:
            hidden = torch.arange(kv_len) > torch.arange(q_len)[:, None] + kv_len - q_len
            scores = scores.masked_fill(hidden, -torch.inf)
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - lse[..., None]) if kv_len else scores
        outs.append(torch.einsum("hqk,khd->qhd", weights, v[own].float()).to(q.dtype))
        lses.append(lse)
    out = torch.cat(outs)
    return (out, torch.cat(lses, dim=1)) if return_softmax_lse else out


def expand() -> None:
    """Entry point: prompts go through `varlen`, behind short prefixes too, and each call's lengths to a file."""
    import installed_plugins

    from mla_suite.integrations import sglang_prompts

    def counted(**given: Any) -> Any:
        lens = {name: given[f"cu_seqlens_{name}"].diff().tolist() for name in "qk"}
        installed_plugins.write_call(expanded=lens["q"], expanded_keys=lens["k"])
        return varlen(**given)

    sglang_prompts.flash_attn_varlen_func = counted
    sglang_prompts.over = lambda dtype, like, width, heads: sglang_prompts.Prompts(8)
