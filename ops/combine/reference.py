"""The definition of combine, in fp32, line by line the formula.

It also finds where a value of lse lies in a tensor of any strides, so lse can be written as [batch, heads, q_len].
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch


class LseLayout(NamedTuple):
    """The element of query token t, counted through the batch, and head h: t x token + t // tokens x batch + h x head.

    An lse of [batch, q_len, heads] with any strides has such numbers, and so has one of [tokens, heads].
    """

    token: int  # elements between query tokens
    head: int  # between heads
    batch: int  # added once for every `tokens` query tokens
    tokens: int  # query tokens of a sequence; 1 where `batch` is 0

    @classmethod
    def of(cls, lse: torch.Tensor) -> LseLayout:
        """The layout of a tensor [batch, q_len, heads] or [tokens, heads]."""
        *leading, head = lse.stride()
        if len(leading) == 1:
            return cls(leading[0], head, 0, 1)
        (batch, q_len, _), (apart, token) = lse.shape, leading
        if q_len == 1:
            return cls(apart, head, 0, 1)
        if batch == 1 or q_len == 0 or apart == q_len * token:
            return cls(token, head, 0, 1)
        return cls(token, head, apart - q_len * token, q_len)

    @classmethod
    def contiguous(cls, heads: int) -> LseLayout:
        """The layout of a contiguous tensor."""
        return cls(heads, 1, 0, 1)


def empty_lse(plus_inf: bool) -> float:
    """The lse of a row that sees no key: -inf, or +inf as FlashMLA has it."""
    return math.inf if plus_inf else -math.inf


def run(config: None, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
    out, lse = outputs
    batch, rows = lse.shape
    bounds = (
        args.split_indptr.tolist() if args.split_indptr is not None else [b * args.num_splits for b in range(batch + 1)]
    )
    # A row is a query token x head; queries of no heads have no rows.
    sink = None if args.attn_sink is None else args.attn_sink.repeat(rows // max(args.attn_sink.shape[0], 1))
    for b, (first, end) in enumerate(pairwise(bounds)):
        if args.skip_single and end - first == 1:
            continue
        split_lse = args.partial_lse[first:end]
        if bool((split_lse == torch.inf).any()):  # FlashMLA's mark of a part without keys, if its partial is zero
            without_keys = (split_lse == torch.inf) & (args.partial_out[first:end] == 0).all(dim=-1)
            split_lse = split_lse.masked_fill(without_keys, -torch.inf)
        merged = torch.logsumexp(split_lse, dim=0)
        lse[b] = merged.masked_fill(merged == -torch.inf, empty_lse(args.plus_inf_lse))
        # The weights are divided by their own sum: an lse of 100 is rounded to 4e-6, and so would they be.
        shift = merged.masked_fill(merged == -torch.inf, 0.0)
        weight = torch.exp(split_lse - shift)
        total = weight.sum(dim=0) if sink is None else weight.sum(dim=0) + torch.exp(sink - shift)
        weight = torch.where(split_lse == -torch.inf, 0.0, weight / total)[:, :, None]
        out[b] = torch.where(weight == 0, 0.0, weight * args.partial_out[first:end]).sum(dim=0)
