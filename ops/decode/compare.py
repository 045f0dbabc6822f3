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
    results = testing.attention_within(outputs, exact, _scores_off(args))
    if getattr(config, "fp8_weights", False):
        options = {entry.name: getattr(args, entry.name) for entry in fields(args) if entry.kw_only}
        tensors = [getattr(args, name) for name in args.__match_args__]
        allowed = testing.fp8_weights_bound(*tensors, **options) + testing.ulp(exact.out, out.dtype)
        results = results[0]._replace(allowed=allowed), results[1]
    if args.cu_seqlens_q is not None:  # no sequence has the tokens behind the last
        for result in results:
            result.allowed[int(args.cu_seqlens_q[-1]) :] = torch.inf  # type: ignore[index]  # tensors here
    return results


def _scores_off(args: Any) -> torch.Tensor | float:
    """How far scores [..., heads] may be off: a kernel may round rotated keys to 16 bits."""
    if args.rope_cos_sin is None:
        return 0.0
    rounded = slice(-args.rope_cos_sin.shape[1], None)
    kind, longest = get_kv_format(args.kv_format), torch.zeros(1, dtype=torch.float64, device=args.q.device)
    page = torch.arange(args.kv_cache.shape[1], device=args.q.device)
    for ids in pages(args)["kv_cache"][0].split(max(1, reference.BLOCK // len(page))):
        slots = (ids[:, None] * len(page) + page).flatten()
        keys = caches.gather(kind, args.kv_cache, slots, descale=args.kv_descale)[:, rounded].double()
        # Rows of a last page that belong to no sequence may hold anything.
        longest = torch.cat((longest, keys.norm(dim=-1).nan_to_num(0.0, 0.0, 0.0))).amax(0, keepdim=True)
    queries = args.q[..., rounded].double() * args.softmax_scale
    if args.q_descale is not None:
        queries = queries * args.q_descale
    return testing.OPERAND_ROUNDING * queries.norm(dim=-1) * longest


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
