"""A call of decode beside the reference in fp64, and the pages whose values it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch

from mla_suite import testing
from mla_suite.core.op import Compared
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.decode import reference


def compare(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> Sequence[Compared]:
    out, lse = outputs
    exact = testing.Exact(*(torch.zeros_like(like, dtype=torch.float64) for like in (out, lse, out)))
    reference.run(None, exact, args)
    off = _sums_off(args) if getattr(config, "fp8_scores", False) else _scores_off(args)
    results = testing.attention_within(outputs, exact, off, args.attn_sink)
    if getattr(config, "fp8_weights", False):
        options = {entry.name: getattr(args, entry.name) for entry in fields(args) if entry.kw_only}
        tensors = [getattr(args, name) for name in args.__match_args__]
        allowed = testing.fp8_weights_bound(*tensors, **options) + testing.ulp(exact.out, out.dtype)
        allowed += testing.flushed(exact.magnitude, exact.lse, args.attn_sink)
        results = results[0]._replace(allowed=allowed), results[1]
    if args.cu_seqlens_q is not None:  # no sequence has the tokens behind the last
        for result in results:
            result.allowed[int(args.cu_seqlens_q[-1]) :] = torch.inf  # type: ignore[index]  # tensors here
    return results


def _scores_off(args: Any) -> torch.Tensor | float:
    """How far scores [..., heads] may be off: a kernel that fuses may round rotated keys the other way."""
    if args.rope_cos_sin is None:
        return 0.0
    rounded = slice(-args.rope_cos_sin.shape[1], None)
    longest = torch.zeros(1, dtype=torch.float64, device=args.q.device)
    for keys in _keys(args):
        longest = torch.cat((longest, keys[:, rounded].norm(dim=-1))).amax(0, keepdim=True)
    return testing.OPERAND_ROUNDING * _scaled_queries(args)[..., rounded].norm(dim=-1) * longest


def _sums_off(args: Any) -> torch.Tensor:
    """How far scores [..., heads] may be off that fp8 tensor cores sum, by the largest sum of first products."""
    queries = _scaled_queries(args)
    steps = queries.reshape(-1, queries.shape[-1] // testing.FP8_DEPTH, testing.FP8_DEPTH)
    largest = torch.zeros(len(steps), dtype=torch.float64, device=args.q.device)
    for keys in _keys(args):
        sums = torch.einsum("rsd,ksd->rks", steps, keys.unflatten(-1, (-1, testing.FP8_DEPTH))).cumsum(-1)
        products = steps.flatten(1).abs().amax(-1) * keys.abs().amax()
        largest = torch.stack((largest, sums.abs().amax((-2, -1)), products)).amax(0)
    return testing.FP8_SUMS * largest.view(args.q.shape[:-1])


def _scaled_queries(args: Any) -> torch.Tensor:
    queries = args.q.double() * args.softmax_scale
    return queries if args.q_descale is None else queries * args.q_descale


def _keys(args: Any) -> Iterator[torch.Tensor]:
    """The rows [n, head_dim] of all sequences' pages, some pages at a time.

    Those of a last page that belong to no sequence may hold anything: what is not finite there becomes 0.
    """
    fmt, page = get_kv_format(args.kv_format), torch.arange(args.kv_cache.shape[1], device=args.q.device)
    for ids in pages(args)["kv_cache"][0].split(max(1, reference.BLOCK // len(page))):
        slots = (ids[:, None] * len(page) + page).flatten()
        yield caches.gather(fmt, args.kv_cache, slots, descale=args.kv_descale).double().nan_to_num(0.0, 0.0, 0.0)


def pages(args: Any) -> dict[str, Sequence[torch.Tensor]]:
    """The page ids of all sequences, each once."""
    first, end = reference.pages_read(args)
    return {"kv_cache": [torch.cat([*_of_each(args, first.tolist(), end.tolist()), first.new_empty(0)]).unique()]}


def _of_each(args: Any, firsts: Sequence[int], ends: Sequence[int]) -> Iterator[torch.Tensor]:
    if args.block_table is not None:
        for row, first, end in zip(args.block_table, firsts, ends, strict=True):
            yield row[first:end].long()
    else:
        for at, first, end in zip(args.kv_indptr.tolist(), firsts, ends, strict=False):
            yield args.kv_indices[at + first : at + end].long()
