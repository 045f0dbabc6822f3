"""The definition of combine, in fp32, line for line the formula."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from mla_suite.core.dispatch import reference_backend
from mla_suite.ops.combine.lse_layout import empty_lse


def run(config: None, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
    out, lse = outputs
    batch, rows = lse.shape
    bounds = (
        args.split_indptr.tolist() if args.split_indptr is not None else [b * args.num_splits for b in range(batch + 1)]
    )
    # A row is a query token x head.
    sink = None if args.attn_sink is None else args.attn_sink.repeat(rows // args.attn_sink.shape[0])
    for b, (first, end) in enumerate(pairwise(bounds)):
        if args.skip_single and end - first == 1:
            continue
        split_lse = args.partial_lse[first:end]
        merged = torch.logsumexp(split_lse, dim=0)
        lse[b] = merged.masked_fill(merged == -torch.inf, empty_lse(args.plus_inf_lse))
        # The weights are divided by their own sum: an lse of 100 is rounded to 4e-6, and so would they be.
        shift = merged.masked_fill(merged == -torch.inf, 0.0)
        weight = torch.exp(split_lse - shift)
        total = weight.sum(dim=0) if sink is None else weight.sum(dim=0) + torch.exp(sink - shift)
        weight = torch.where(split_lse == -torch.inf, 0.0, weight / total)[:, :, None]
        out[b] = torch.where(weight == 0, 0.0, weight * args.partial_out[first:end]).sum(dim=0)


BACKEND = reference_backend(run)
