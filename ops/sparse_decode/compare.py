"""A call of sparse_decode beside the reference in fp64, and the pages whose values it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mla_suite import testing
from mla_suite.core.op import Compared
from mla_suite.ops.sparse_decode import reference


def compare(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> Sequence[Compared]:
    """Out and lse, and the largest scores of the overload that returns them."""
    out, lse, *largest = outputs
    *exact, scores = (torch.zeros_like(like, dtype=torch.float64) for like in (out, lse, out, lse))
    reference.run(None, (*exact, scores), args)
    off = _scores_off(args)
    results = testing.attention_within((out, lse), testing.Exact(*exact), off, args.attn_sink)
    allowed = testing.KERNEL_LSE * scores.abs().nan_to_num(0.0, 0.0, 0.0).clamp(min=1.0) + off
    return *results, *(Compared("max_logits", found, scores, allowed) for found in largest)


def _scores_off(args: Any) -> torch.Tensor:
    """How far scores [..., heads] may be off, since fp32 rounds their sums, by the longest key that a token selects."""
    queries, dims = args.joined().q.double().nan_to_num(0.0, 0.0, 0.0) * args.softmax_scale, args.q.shape[:-2]
    queries = queries if args.q_descale is None else queries * args.q_descale
    longest = queries.new_zeros(dims.numel())
    pools = zip(args.kv_formats, args.kv_caches, args.indices, args.indptrs, args.topk_lengths, strict=True)
    for name, cache, index, indptr, lengths in pools:
        for t, chosen in enumerate(reference.selected(index, indptr, lengths, dims)):
            keys = reference.rows(name, cache, chosen, args.kv_descale).double().nan_to_num(0.0, 0.0, 0.0)
            longest[t] = torch.cat((longest[t : t + 1], keys.norm(dim=1))).amax()
    return testing.sums_rounding(queries, longest.view(*dims, 1))


def pages(args: Any) -> dict[str, Sequence[torch.Tensor]]:
    """For each pool the page ids of the tokens that any query token selects, each once."""
    found, dims = [], args.q.shape[:-2]
    selections = zip(args.kv_caches, args.indices, args.indptrs, args.topk_lengths, strict=True)
    for cache, index, indptr, lengths in selections:
        chosen = torch.cat([*reference.selected(index, indptr, lengths, dims), index.new_empty(0)]).long()
        valid = chosen[(chosen >= 0) & (chosen < cache.shape[0] * cache.shape[1])]
        found.append((valid // cache.shape[1]).unique())
    return {"kv_caches": found}
