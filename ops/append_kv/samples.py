"""Named append_kv problems: a decode step, a speculative step, a prompt, for every kind of kv_format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mla_suite.core.op import Sample
from mla_suite.kv_formats import KVFormat, get_kv_format
from mla_suite.kv_formats import cache as caches


def stored(fmt: KVFormat, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A cache of these rows and its descale."""
    descale = torch.tensor([0.05], device=rows.device) if fmt.per_tensor_descale else None
    return caches.as_bytes(caches.pack(fmt, rows, descale=descale)), descale


def sample(
    tokens: int,
    kv_format: str,
    *,
    page: int = 64,
    rope: bool = False,
    interleaved: bool = True,
    skip: bool = False,
    widths: tuple[int, int] | None = None,
) -> Sample:
    """`tokens` random rows to distinct slots in random order; `skip` gives every third token a negative slot.

    `widths` are the values of a dense row's latent and rope part; None: 512 and 64.
    """
    declared = get_kv_format(kv_format)
    fmt = declared if widths is None else declared.sized(*widths)
    pages = -(-tokens // page) + 1

    def make(device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(0)
        kv_c = torch.randn(tokens, fmt.latent, generator=generator).bfloat16().to(device)
        k_pe = torch.randn(tokens, fmt.rope, generator=generator).bfloat16().to(device)
        empty = torch.zeros(pages, page, fmt.head_dim, device=device)
        cache, descale = stored(fmt, empty)
        slots = torch.randperm(pages * page, generator=generator)[:tokens]
        if skip:
            slots[::3] = -1
        cos_sin = torch.rand(256, fmt.rope, generator=generator).to(device) if rope else None
        positions = torch.arange(tokens, device=device) % 256 if rope else None
        args = (kv_c, k_pe, cache, slots.to(device), descale, cos_sin, positions)
        return args, {"kv_format": kv_format, "interleaved": interleaved}

    pairing = ("-interleaved" if interleaved else "-half") if rope else ""
    width = "" if widths is None else f"-{widths[0]}+{widths[1]}"
    name = f"{kv_format}-t{tokens}-p{page}{width}{pairing}" + ("-skip" if skip else "")
    table = fmt.rope * 4 + 8 if rope else 0
    bytes_moved = tokens * (fmt.head_dim * 2 + 8 + table + fmt.token_bytes)
    return Sample(name, make, bytes_moved, tokens * fmt.head_dim * 4)


def samples() -> Sequence[Sample]:
    return (
        sample(5, "bf16"),
        sample(7, "bf16", page=3, rope=True, skip=True),
        sample(4, "fp8", rope=True, interleaved=False),
        sample(5, "bf16", page=3, rope=True, widths=(128, 32)),
        sample(5, "fp8", widths=(256, 32)),
        sample(5, "bf16", widths=(512, 0)),
        sample(3, "fp8_fnuz", page=16),
        sample(6, "v32", page=2),
        sample(6, "dsv4", page=2, rope=True, skip=True),
        sample(3, "dsv4_fnuz"),
        sample(3, "v32_nope", page=3),
        sample(4, "v41", page=2, rope=True),
        sample(4, "v41_fp4", page=3, rope=True, interleaved=False),
    )
