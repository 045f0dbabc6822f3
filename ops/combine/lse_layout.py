"""Where a caller's lse lies: strides of any kind, so that [batch, heads, q_len] is written as it is."""

from __future__ import annotations

import math
from typing import NamedTuple

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
