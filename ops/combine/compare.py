"""A call of combine beside the reference, whose fp32 decides which weights are zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mla_suite import testing
from mla_suite.core.op import Compared
from mla_suite.ops.combine import reference


def compare(config: Any, outputs: tuple[torch.Tensor, ...], args: Any) -> Sequence[Compared]:
    out, lse = outputs
    both = torch.cat((args.partial_out, args.partial_out.abs()), dim=-1)  # merged with the same weights
    merged = both.new_empty((*out.shape[:-1], both.shape[-1])), both.new_empty(lse.shape)
    reference.run(None, merged, replace(args, partial_out=both, skip_single=False))
    exact, magnitude = merged[0].double().split(out.shape[-1], dim=-1)
    # Kernels and the reference may each be off by the fp32 bound.
    allowed = testing.ulp(exact, out.dtype) + 2 * testing.REFERENCE_ROUNDING * magnitude
    sink = args.attn_sink
    rows = sink if sink is None else sink.repeat(lse.shape[1] // max(sink.shape[0], 1))
    allowed += testing.flushed(magnitude, merged[1], rows)
    allowed_lse = 2 * testing.REFERENCE_LSE * merged[1].double().abs().nan_to_num(0.0, 0.0, 0.0).clamp(min=1.0)
    if args.skip_single:
        counts = args.split_indptr.diff() if args.split_indptr is not None else args.num_splits
        single = torch.as_tensor(counts, device=out.device).eq(1).expand(out.shape[0])
        allowed[single], allowed_lse[single] = torch.inf, torch.inf
    return Compared("out", out, exact, allowed), Compared("lse", lse, merged[1].double(), allowed_lse)
