"""Named convert_kv problems: another order of a block, another record, another page size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mla_suite.core.op import Sample
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.append_kv.samples import stored


def sample(
    tokens: int, source: str, destination: str, pages: tuple[int, int] = (64, 64), *, skip: bool = False
) -> Sample:
    """`tokens` tokens at random slots of both caches, in pages of these sizes; `skip` leaves every third one out."""
    formats = [get_kv_format(name) for name in (source, destination)]
    head_dim = next((fmt.head_dim for fmt in formats if not fmt.dense), formats[0].head_dim)

    def make(device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(0)
        made: list[list[Any]] = []
        for fmt, page, fill in zip(formats, pages, (1.0, 0.0), strict=True):
            count = -(-tokens // page) + 1
            cache, descale = stored(fmt, torch.randn(count, page, head_dim, generator=generator).to(device) * fill)
            slots = torch.randperm(count * page, generator=generator)[:tokens]
            made.append([cache, slots.to(device), descale])
        if skip:
            made[1][1][::3] = -1
        return tuple(part for parts in zip(*made, strict=True) for part in parts), {
            "source_format": source,
            "destination_format": destination,
        }

    name = f"{source}.p{pages[0]}-{destination}.p{pages[1]}-t{tokens}" + ("-skip" if skip else "")
    sizes = [head_dim * fmt.element_bytes if fmt.dense else fmt.token_bytes for fmt in formats]
    return Sample(name, make, tokens * (sum(sizes) + 16), tokens * head_dim * 2)


def samples() -> Sequence[Sample]:
    return (
        sample(7, "v41", "v41_vllm", (2, 3)),
        sample(6, "dsv4", "v41_fp4", (4, 16), skip=True),
        sample(5, "v32", "bf16", (3, 2)),
        sample(4, "fp8", "bf16"),
    )
