"""What the parts of bench_served.py share: a line's two calls, and inputs that rotate through more than the L2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mla_suite.bench.timer import cold_turns
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format

DEVICE = "cuda"
MAX_TURNS = 512
TOKENS = 262_144  # of each pool


class Row(NamedTuple):
    """A call, what it is compared with, and the inputs that each rotates through."""

    name: str
    call: Callable[[Any], object]
    other: Callable[[Any], object]
    turns: list[Any]
    other_turns: list[Any]


def turns_for(size: int) -> int:
    return min(MAX_TURNS, cold_turns(size, torch.device(DEVICE), 2))


def queries(count: int, batch: int, q_len: int, heads: int, width: int) -> list[torch.Tensor]:
    return [torch.randn(batch, q_len, heads, width, device=DEVICE).bfloat16() for _ in range(count)]


def descale_of(kv_format: str) -> torch.Tensor | None:
    return torch.tensor(0.02, device=DEVICE) if get_kv_format(kv_format).per_tensor_descale else None


def pool(kv_format: str, page: int, pages: int, head_dim: int = 0) -> torch.Tensor:
    """A few pages of random rows, again and again; dense rows may have another head_dim than their format's own."""
    kind = get_kv_format(kv_format)
    kind = kind.sized(head_dim, 0) if kind.dense and head_dim else kind
    made = caches.pack(kind, torch.randn(16, page, kind.head_dim, device=DEVICE), descale=descale_of(kv_format))
    stride = made.stride(0)
    blocks = made.as_strided((16, stride), (stride, 1)).repeat(-(-pages // 16), 1)
    return blocks.as_strided((pages, page, made.shape[2]), (stride, made.shape[2], 1))
