"""The largest scaled score of every row, which the overload `sparse_decode.max_logits` returns behind out and lse.

A kernel whose configuration says `returns_max_logits` stores it. Beside every other backend, torch reads the selected
keys once more and computes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mla_suite.core import dispatch
from mla_suite.core.dispatch import Backend, Launch
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.sparse_decode.reference import per_token

CHUNK_BYTES = 64 * 2**20  # of gathered fp32 keys


def with_max_logits(backend: Backend) -> Backend:
    """The backend with a third output."""

    def prepare(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> Launch:
        if getattr(config, "returns_max_logits", False):
            launch = backend.prepare(config, outputs, args)

            def raise_from_none(outputs: tuple[torch.Tensor, ...], tensors: tuple[Any, ...]) -> None:
                outputs[2].fill_(-torch.inf)
                launch(outputs, tensors)

            return raise_from_none
        attend = backend.prepare(config, outputs[:2], args)
        second_pass = dispatch.reference_backend(largest_scores).prepare(None, outputs[2:], args)

        def run(outputs: tuple[torch.Tensor, ...], tensors: tuple[Any, ...]) -> None:
            attend(outputs[:2], tensors)
            second_pass(outputs[2:], tensors)

        return run

    return replace(backend, prepare=prepare)


def largest_scores(config: None, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
    """Fill max_logits; -inf where a query token selects nothing. Reads no length on the host."""
    args = args.joined()
    dims = args.q.shape[:-2]
    q, largest = args.q.flatten(0, -3), outputs[0].fill_(-torch.inf).flatten(0, -2)
    pools = zip(args.kv_formats, args.kv_caches, args.indices, args.topk_lengths, strict=True)
    for name, cache, index, lengths in pools:
        fmt, index = get_kv_format(name), index.flatten(0, -2)
        if not index.numel() or not cache.numel():
            continue
        counts = (index >= 0) & (index < cache.shape[0] * cache.shape[1])
        if lengths is not None:
            counts &= torch.arange(index.shape[1], device=q.device) < per_token(lengths, dims)[:, None]
        tokens = max(1, CHUNK_BYTES // (4 * index.shape[1] * q.shape[-1]))
        for chosen, rows, present, found in zip(*(t.split(tokens) for t in (index, q, counts, largest)), strict=True):
            slots = torch.where(present, chosen, 0).long()
            keys = caches.gather(fmt, cache, slots.flatten(), descale=args.kv_descale)
            keys = caches.as_keys(fmt, keys).unflatten(0, slots.shape)
            scores = rows.float() @ keys.transpose(1, 2) * args.softmax_scale  # [tokens, heads, keys]
            if args.q_descale is not None:
                scores *= args.q_descale
            scores.masked_fill_(~present[:, None], -torch.inf)
            torch.maximum(found, scores.amax(-1), out=found)
