"""The definition of append_kv: rotate in fp32, quantise by the kv_format's rule, write each token at its slot."""

from __future__ import annotations

from typing import Any

import torch

from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format


def run(config: None, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
    fmt, tokens = get_kv_format(args.kv_format), written(args.slot_mapping)
    latent, rope = args.kv_c[tokens].float(), args.k_pe[tokens].float()
    if args.cos_sin is not None and args.positions is not None:
        angles = args.cos_sin[args.positions[tokens].long()].float()
        rounds = fmt.sized(latent.shape[1], rope.shape[1]).rounds_rotated
        rope = rotated(rope, angles, args.interleaved, fused=rounds)
        if rounds:
            rope = rope.to(args.k_pe.dtype).float()
    rows = torch.cat([latent, rope], dim=-1)
    caches.scatter(fmt, args.kv_cache, args.slot_mapping[tokens].long(), rows, descale=args.kv_descale)


def written(slot_mapping: torch.Tensor) -> torch.Tensor:
    """Which tokens stay in the cache: those with a slot, and of equal slots the last."""
    slots, tokens = slot_mapping.sort(stable=True)
    last = torch.ones_like(slots, dtype=torch.bool)
    last[:-1] = slots[1:] != slots[:-1]
    return tokens[last & (slots >= 0)]


def rotated(k_pe: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool, fused: bool = False) -> torch.Tensor:
    """Each pair (a, b) of `k_pe` `[n, rope]` as (a cos - b sin, b cos + a sin), in the places it came from.

    fused  a cos and a sin are not rounded: the sums are fused multiply-adds, for which fp64 holds every product
    """
    cos, sin = cos_sin.chunk(2, dim=-1)
    a, b = (k_pe[:, 0::2], k_pe[:, 1::2]) if interleaved else k_pe.chunk(2, dim=-1)
    b_cos, b_sin = b * cos, b * sin
    if fused:
        a, cos, sin = a.double(), cos.double(), sin.double()
    pair = (a * cos - b_sin).float(), (a * sin + b_cos).float()
    return torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
