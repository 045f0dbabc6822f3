"""The definition of append_kv: rotate in fp32, quantise by the kv_format's rule, write each token at its slot."""

from __future__ import annotations

from typing import Any

import torch

from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format


def run(config: None, outputs: tuple[torch.Tensor, ...], args: Any) -> None:
    tokens = written(args.slot_mapping)
    latent, rope = args.kv_c[tokens].float(), args.k_pe[tokens].float()
    if args.cos_sin is not None and args.positions is not None:
        rope = rotated(rope, args.cos_sin[args.positions[tokens].long()].float(), args.interleaved)
    rows = torch.cat([latent, rope], dim=-1)
    caches.scatter(
        get_kv_format(args.kv_format), args.kv_cache, args.slot_mapping[tokens].long(), rows, descale=args.kv_descale
    )


def written(slot_mapping: torch.Tensor) -> torch.Tensor:
    """Which tokens stay in the cache: those with a slot, and of equal slots the last."""
    slots, tokens = slot_mapping.sort(stable=True)
    last = torch.ones_like(slots, dtype=torch.bool)
    last[:-1] = slots[1:] != slots[:-1]
    return tokens[last & (slots >= 0)]


def rotated(k_pe: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Each pair (a, b) of `k_pe` `[n, rope]` as (a cos - b sin, b cos + a sin), in the places it came from."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    if interleaved:
        a, b = k_pe[:, 0::2], k_pe[:, 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    a, b = k_pe.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
