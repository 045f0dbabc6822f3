"""Selected rows as sm_90's sparse_decode makes them: what csrc/sm_90/dequantise.hpp computes, rounding by rounding."""

from __future__ import annotations

import torch

from mla_suite.core.layouts import cache as caches
from mla_suite.core.layouts import layout


def nearest_bf16(values: torch.Tensor) -> torch.Tensor:
    """fp64 values rounded once to bf16, ties to even, denormals included; as fp64."""
    _, exponent = torch.frexp(values)
    unit = torch.ldexp(torch.ones_like(values), exponent.clamp(min=-125) - 8)
    return torch.where(values.isfinite(), (values / unit).round() * unit, values)


def multiplied(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """e4m3 values [n, tiles, tile] times fp32 scales [n, tiles]: as high + low, both bf16, each product rounded.

    A scale from 2^7 on is split as it is, others times 2^120, which the values as bf16 lack.
    """
    large = ~(scales.abs() < 2.0**7)
    raised = torch.where(large, scales, scales * 2.0**120)
    high = raised.bfloat16().float()
    low = (raised - high).bfloat16()
    values = codes.double() * torch.where(large, 1.0, 2.0**-120).double()[..., None]
    part = nearest_bf16(values * low.double()[..., None])
    return nearest_bf16(values * high.double()[..., None] + part)


def hopper_rows(name: str, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """fp32 rows [n, head_dim] at `slots`."""
    if not name.startswith("v32"):
        kind = layout(name)
        return caches.gather(kind.sized(cache.shape[2], 0) if kind.dense else kind, cache, slots).bfloat16().float()
    page = cache.shape[1]
    stored = cache.view(torch.uint8)[slots // page, slots % page]
    codes = stored[:, :512].contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (4, 128))
    scales = stored[:, 512:528].contiguous().view(torch.float32)
    rope = stored[:, 528:].contiguous().view(torch.bfloat16).float()
    return torch.cat([multiplied(codes, scales).flatten(1).float(), rope], dim=1)
