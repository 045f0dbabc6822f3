"""Rotary positions: the cos|sin table of a config, and the rotation in both pairings."""

from __future__ import annotations

import math

import torch

from mla_suite.models.config import MLAConfig, Yarn


def inverse_frequencies(config: MLAConfig) -> torch.Tensor:
    """Angle per position of every pair, fp32 [ROPE / 2]; YaRN blends kept and stretched frequencies."""
    dim = config.qk_rope_head_dim
    periods = config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if config.yarn is None:
        return 1.0 / periods
    kept = _kept_share(config.yarn, config.rope_theta, dim)
    return kept / periods + (1.0 - kept) / (config.yarn.factor * periods)


def _kept_share(yarn: Yarn, theta: float, dim: int) -> torch.Tensor:
    """Share of each frequency that is left as trained: 1 for fast pairs, 0 for slow ones, a ramp between."""

    def pair_turning(turns: float) -> float:
        return dim * math.log(yarn.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    last = min(math.ceil(pair_turning(yarn.beta_slow)), dim - 1)
    width = max(last - first, 0.001)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / width
    return 1.0 - ramp.clamp(0, 1)


def cos_sin_table(
    config: MLAConfig,
    max_len: int | None = None,
    device: torch.device | str | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """fp32 [max_len, ROPE]: row p holds the cosines of position p, then its sines.

    `max_len` defaults to the config's max_position. Under YaRN the rows carry `Yarn.table_factor`.

    `dtype` is the precision of every step: with torch.bfloat16 frequencies, positions, angles, cosines and sines are
    rounded to bf16, as in GPU MODE's decode layer, and positions from 256 on are no longer all distinct. The table
    is fp32 all the same. ValueError for such a table under YaRN.
    """
    length = config.max_position if max_len is None else max_len
    if dtype == torch.float32:
        frequencies = inverse_frequencies(config)
    elif config.yarn is None:
        half = config.qk_rope_head_dim // 2
        frequencies = config.rope_theta ** -(torch.arange(half, dtype=dtype) / half)
    else:
        raise ValueError(f"cos_sin_table: dtype {dtype} under YaRN; leave dtype out, or give a config without yarn")
    angles = torch.arange(length).to(dtype)[:, None] * frequencies
    factor = config.yarn.table_factor if config.yarn else 1.0
    return (torch.cat((angles.cos(), angles.sin()), dim=-1).float() * factor).to(device)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """x [..., ROPE] rotated by cos_sin [..., ROPE] (broadcast), computed in fp32, rerotated in x's dtype.

    interleaved pairs elements 2i and 2i + 1 (GPT-J, DeepSeek); otherwise i and i + ROPE / 2 (NeoX). Elements stay in
    their places, so a rotated query must meet a key rotated in the same style.
    """
    cos, sin = cos_sin.float().chunk(2, dim=-1)
    values = x.float()
    if interleaved:
        even, odd = values[..., 0::2], values[..., 1::2]
        rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    else:
        low, high = values.chunk(2, dim=-1)
        rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    return rotated.to(x.dtype)
