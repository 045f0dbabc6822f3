"""Named combine problems: the shapes that decode's splits leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mla_suite.core.op import Sample


def sample(
    batch: int, rows: int, splits: int, *, head_dim_v: int = 512, ragged: bool = False, sink: bool = False
) -> Sample:
    """`splits` per sequence, or 1..splits in turn when ragged; random partials."""
    counts = [b % splits + 1 if ragged else splits for b in range(batch)]
    total = sum(counts)

    def make(device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        draw: dict[str, Any] = dict(generator=torch.Generator(device).manual_seed(0), device=device)
        partial_out = torch.randn(total, rows, head_dim_v, **draw)
        partial_lse = torch.randn(total, rows, **draw) * 3
        bounds = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        attn_sink = torch.randn(rows, **draw) if sink else None
        split = dict(num_splits=0) if ragged else dict(num_splits=splits)
        return (partial_out, partial_lse, bounds if ragged else None, attn_sink), dict(
            **split, out_dtype=torch.bfloat16
        )

    name = f"b{batch}-r{rows}-s{'1to' if ragged else ''}{splits}-v{head_dim_v}" + ("-sink" if sink else "")
    bytes_moved = total * rows * (head_dim_v + 1) * 4 + batch * rows * (head_dim_v * 2 + 4)
    return Sample(name, make, bytes_moved, 2 * total * rows * head_dim_v)


def samples() -> Sequence[Sample]:
    return (sample(3, 16, 4), sample(5, 24, 7, ragged=True, sink=True), sample(2, 8, 3, head_dim_v=128))
