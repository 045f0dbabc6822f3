"""The definition of sparse_decode, in fp32, one query token at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.combine.reference import empty_lse


def run(config: None, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
    """Fill out and lse; given outputs for sum(p |v|) and the largest score, these too, and all in their dtype."""
    out, lse, *more = outputs
    args = args.joined()
    dtype = more[0].dtype if more else torch.float32
    dims = args.q.shape[:-2]
    selections = [
        selected(index, indptr, lengths, dims)
        for index, indptr, lengths in zip(args.indices, args.indptrs, args.topk_lengths, strict=True)
    ]
    for t, here in enumerate(itertools.product(*map(range, dims))):
        pools = zip(args.kv_formats, args.kv_caches, selections, strict=True)
        parts = [rows(name, cache, selection[t], args.kv_descale) for name, cache, selection in pools]
        keys = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype)
        scores = args.q[here].to(dtype) @ keys.T * args.softmax_scale  # [heads, keys]
        if args.q_descale is not None:
            scores = scores * args.q_descale
        found = torch.logsumexp(scores, dim=-1)
        lse[here] = found.masked_fill(found == -torch.inf, empty_lse(args.plus_inf_lse))
        denominator = found if args.attn_sink is None else torch.logaddexp(found, args.attn_sink)
        p, values = torch.exp(scores - denominator[:, None]), keys[:, : args.head_dim_v]
        out[here] = p @ values
        if more:
            magnitude, largest = more
            magnitude[here] = p @ values.abs()
            largest[here] = scores.amax(dim=-1) if len(keys) else -torch.inf


def selected(
    index: torch.Tensor, indptr: torch.Tensor | None, lengths: torch.Tensor | None, dims: Sequence[int]
) -> list[torch.Tensor]:
    """The indices of each query token, in order, as views."""
    if indptr is not None:
        bounds = indptr.tolist()
        return [index[bounds[t] : bounds[t + 1]] for t in range(len(bounds) - 1)]
    flat = index.flatten(0, -2)
    if lengths is None:
        return list(flat)
    return [row[:length] for row, length in zip(flat, per_token(lengths, dims).tolist(), strict=True)]


def per_token(lengths: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The length of each query token `[tokens]`, where those of a sequence may share one."""
    return lengths.reshape(*lengths.shape, *[1] * (len(dims) - lengths.dim())).expand(dims).flatten()


def rows(kv_format: str, cache: torch.Tensor, index: torch.Tensor, kv_descale: torch.Tensor | None) -> torch.Tensor:
    """fp32 keys `[keys, head_dim]` that `index` selects; negative and out-of-range entries select none."""
    slots = cache.shape[0] * cache.shape[1]
    valid = index[(index >= 0) & (index < slots)].long()
    fmt = get_kv_format(kv_format)
    return caches.as_keys(fmt, caches.gather(fmt, cache, valid, descale=kv_descale))
