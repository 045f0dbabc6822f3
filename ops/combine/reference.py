"""The definition of combine, in fp32, line for line the formula."""

from __future__ import annotations

from itertools import pairwise

import torch

from mla_suite.core.dispatch import Backend, Offer


def run(
    config: None,
    outputs: tuple[torch.Tensor, ...],
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    split_indptr: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    *,
    num_splits: int = 0,
    out_dtype: torch.dtype | None = None,
    skip_single: bool = False,
) -> None:
    out, lse = outputs
    batch, rows = lse.shape
    bounds = split_indptr.tolist() if split_indptr is not None else [b * num_splits for b in range(batch + 1)]
    sink = None if attn_sink is None else attn_sink.repeat(rows // attn_sink.shape[0])  # row = query token x head
    for b, (first, end) in enumerate(pairwise(bounds)):
        if skip_single and end - first == 1:
            continue
        split_lse = partial_lse[first:end]
        lse[b] = torch.logsumexp(split_lse, dim=0)
        # The weights are divided by their own sum: an lse of 100 is rounded to 4e-6, and so would they be.
        shift = lse[b].masked_fill(lse[b] == -torch.inf, 0.0)
        weight = torch.exp(split_lse - shift)
        total = weight.sum(dim=0) if sink is None else weight.sum(dim=0) + torch.exp(sink - shift)
        weight = torch.where(split_lse == -torch.inf, 0.0, weight / total)[:, :, None]
        out[b] = torch.where(weight == 0, 0.0, weight * partial_out[first:end]).sum(dim=0)


BACKEND = Backend("reference", lambda problem, arch: Offer(None, "the fp32 definition takes every problem"), run)
