"""Where a sliding window begins in each sequence.

A plan and a work tile count keys from the window's origin, so that what lies before it costs nothing, and a plan that
was made with another window, or with none, is slower but never wrong.
"""

from __future__ import annotations

import torch

from mla_suite.ops.plan.scheduler import SPLIT_ALIGNMENT


def first_key(seq_lens: torch.Tensor, q_lens: torch.Tensor | int, window_left: int) -> torch.Tensor:
    """First key that the first of each sequence's query tokens may see; no earlier one is read.

    seq_lens     [batch], cached keys of each sequence
    q_lens       [batch] or one number, query tokens of each sequence, the newest of its keys
    window_left  keys left of a query token, without its own, that it sees; negative: all of them

    -> [batch] in seq_lens' dtype.
    """
    if window_left < 0:
        return torch.zeros_like(seq_lens)
    return ((seq_lens - q_lens).clamp(min=0) - window_left).clamp(min=0)  # no sum leaves 32 bits


def most_keys(keys: int, q_len: int, window_left: int) -> int:
    """The most keys that a sequence of up to `keys` has from the origin of its window on, with q_len query tokens."""
    return keys if window_left < 0 else min(keys, window_left + q_len + SPLIT_ALIGNMENT)  # the origin is rounded down


def origin(first: torch.Tensor) -> torch.Tensor:
    """The key from which work tiles count: the first, rounded down so that blocks of keys keep their alignment."""
    return first // SPLIT_ALIGNMENT * SPLIT_ALIGNMENT
