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


def _scores_off(args: Any) -> torch.Tensor:
    """How far scores [..., heads] may be off: fp32 rounds sums, and fused kernels rotated keys the other way."""
    queries = _scaled_queries(args).nan_to_num(0.0, 0.0, 0.0)  # no bound helps where a score is not finite
    plain = queries.shape[-1] - (0 if args.rope_cos_sin is None else args.rope_cos_sin.shape[1])
    longest = queries.new_zeros(args.seq_lens.shape[0], 2)  # key, and rotated part of one, of each sequence
    for b, keys in _keys(args):
        norms = torch.stack((keys.norm(dim=1), keys[:, plain:].norm(dim=1)), dim=1)
        longest[b] = torch.maximum(longest[b], norms.amax(0))
    if args.cu_seqlens_q is None:
        longest = longest[:, None]
    else:
        longest = longest.repeat_interleave(args.cu_seqlens_q.diff(), dim=0)
        longest = torch.nn.functional.pad(longest, (0, 0, 0, args.q.shape[0] - len(longest)))
    key, rotated = longest[..., None, :].unbind(-1)
    off = testing.sums_rounding(queries, key)
    return off + testing.OPERAND_ROUNDING * queries[..., plain:].norm(dim=-1) * rotated


def _sums_off(args: Any) -> torch.Tensor:
    """How far scores [..., heads] may be off that fp8 tensor cores sum, by the largest sum of first products."""
    queries = _scaled_queries(args)
    steps = queries.reshape(-1, queries.shape[-1] // testing.FP8_DEPTH, testing.FP8_DEPTH)
    largest = torch.zeros(len(steps), dtype=torch.float64, device=args.q.device)
    for _, keys in _keys(args):
        sums = torch.einsum("rsd,ksd->rks", steps, keys.unflatten(-1, (-1, testing.FP8_DEPTH))).cumsum(-1)
        products = steps.flatten(1).abs().amax(-1) * keys.abs().amax()
        largest = torch.stack((largest, sums.abs().amax((-2, -1)), products)).amax(0)
    return testing.FP8_SUMS * largest.view(args.q.shape[:-1])


def _scaled_queries(args: Any) -> torch.Tensor:
    queries = args.joined().q.double() * args.softmax_scale
    return queries if args.q_descale is None else queries * args.q_descale


def _keys(args: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """Each sequence's number with rows [n, head_dim] of its keys, some at a time; what is not finite there is 0."""
    fmt, page = get_kv_format(args.kv_format), args.kv_cache.shape[1]
    first, end = reference.pages_read(args)
    q_lens = args.q.shape[1] if args.cu_seqlens_q is None else args.cu_seqlens_q.diff()
    seen = reference.first_key(args.seq_lens.long(), q_lens, args.window_left) - first * page
    spans = zip(seen.tolist(), (args.seq_lens - first * page).tolist(), strict=True)
    for b, (ids, (begin, stop)) in enumerate(zip(_of_each(args, first.tolist(), end.tolist()), spans, strict=True)):
        slots = (ids[:, None] * page + torch.arange(page, device=ids.device)).flatten()[begin:stop]
        for block in slots.split(reference.BLOCK) if len(slots) else ():
            yield (
                b,
                caches.gather(fmt, args.kv_cache, block, descale=args.kv_descale).double().nan_to_num(0.0, 0.0, 0.0),
            )


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
