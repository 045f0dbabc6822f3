"""sparse_decode on an H100 or H200, shape by shape: burst and sustained time, rates, the ratio to what the card can do.

    python benchmarks/bench_sparse_sm90.py [--rows "v32 B128,dsv4"] [--sustained [NAMES]] [--splits [NAMES]] [--json F]

As bench_decode_sm90.py measures decode: replay of a CUDA graph over inputs that rotate through more memory than the L2
holds. Every turn has queries and selections of its own from pools that all turns share. Bytes are those of the selected
tokens once per query token, their indices, queries and results. Two query tokens of every shape are compared with fp64
before it is timed.

v32 selects 2048 of each request's 32768 tokens; dsv4 128 of a window's pool and 512 or 1024 of another, each of 16384
tokens a request, with a sink. FlashMLA's columns were measured on another H200 in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import by_shape
import torch
from by_shape import Work, assert_native, assert_right, operator_call

from mla_suite.archs.sm_90 import sparse_decode as sm_90
from mla_suite.bench.clock import cold_bytes
from mla_suite.bench.inputs import Call
from mla_suite.core import dispatch
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.sparse_decode import SPARSE_DECODE
from mla_suite.testing import attention

CUDA = torch.device("cuda")
MADE_PAGES = 64  # of a pool; the others repeat them


class Pool(NamedTuple):
    """`topk` selected of each request's `tokens`."""

    page: int
    tokens: int
    topk: int


class Row(NamedTuple):
    """FlashMLA's time and its ratio to the floor."""

    kv_format: str
    batch: int
    heads: int
    pools: tuple[Pool, ...]
    sink: bool
    peer_us: float
    peer_over_floor: float

    @property
    def name(self) -> str:
        return f"{self.kv_format} B{self.batch} H{self.heads} k{'+'.join(str(pool.topk) for pool in self.pools)}"

    @property
    def keys(self) -> int:
        return sum(pool.topk for pool in self.pools)

    @property
    def bytes(self) -> int:
        width = get_kv_format(self.kv_format).head_dim
        return self.batch * (
            self.keys * (get_kv_format(self.kv_format).token_bytes + 4) + self.heads * ((width + 512) * 2 + 4)
        )

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.keys * self.heads * (get_kv_format(self.kv_format).head_dim + 512)


def v32(batch: int, heads: int, peer_us: float, peer_over_floor: float) -> Row:
    return Row("v32", batch, heads, (Pool(64, 32768, 2048),), False, peer_us, peer_over_floor)


def dsv4(batch: int, heads: int, extra: int, peer_us: float, peer_over_floor: float) -> Row:
    pools = (Pool(256, 16384, 128), Pool(64, 16384, extra))
    return Row("dsv4", batch, heads, pools, True, peer_us, peer_over_floor)


SHAPES = (
    v32(128, 128, 183.7, 2.01),
    dsv4(128, 128, 1024, 103.7, 2.15),
    v32(128, 64, 113.0, 2.48),
    dsv4(128, 64, 512, 45.9, 2.76),
    v32(128, 16, math.nan, math.nan),
    v32(32, 128, 63.1, 2.76),
    v32(32, 64, 47.3, 3.73),
    dsv4(32, 128, 1024, 45.8, 3.79),
    dsv4(32, 64, 512, 25.2, 4.19),
    v32(8, 128, 26.3, 4.61),
    v32(8, 64, 21.6, 4.28),
    dsv4(8, 128, 1024, 20.1, 4.59),
    dsv4(8, 64, 512, 15.3, 4.91),
    v32(1, 128, 17.7, 7.47),
    v32(1, 64, 17.7, 7.63),
    v32(1, 16, math.nan, math.nan),
    dsv4(1, 128, 1024, 14.8, 6.97),
    dsv4(1, 64, 512, 13.6, 7.16),
)


def filled(name: str, tokens: int, page: int) -> torch.Tensor:
    """A pool of at least `tokens`: random rows, the same ones again every MADE_PAGES pages."""
    kind = get_kv_format(name)
    made = caches.pack(kind, torch.randn(MADE_PAGES, page, kind.head_dim, device=CUDA))
    times = -(-tokens // (MADE_PAGES * page))
    stride = made.stride(0)
    blocks = made.as_strided((MADE_PAGES, stride), (stride, 1)).repeat(times, 1)
    return blocks.as_strided((MADE_PAGES * times, page, made.shape[2]), (stride, made.shape[2], 1))


def turns_of(row: Row, count: int) -> list[Call]:
    """Calls with queries and selections of their own; request b of turn i selects from its own stretch of each pool."""
    width = get_kv_format(row.kv_format).head_dim
    kv_caches, stretches = [], []
    for pool in row.pools:
        stretch = max(row.batch, -(-(1 << 19) // pool.tokens))
        kv_caches.append(filled(row.kv_format, stretch * pool.tokens, pool.page))
        stretches.append(stretch)
    kwargs = {"kv_formats": [row.kv_format] * len(row.pools), "softmax_scale": width**-0.5}
    none = [None] * len(row.pools)
    calls = []
    for turn in range(count):
        q = torch.randn(row.batch, 1, row.heads, width, device=CUDA).bfloat16()
        indices = []
        for pool, stretch in zip(row.pools, stretches, strict=True):
            chosen = torch.rand(row.batch, pool.tokens, device=CUDA).argsort(dim=1)[:, : pool.topk]
            first = (torch.arange(row.batch, device=CUDA) + turn * row.batch) % stretch * pool.tokens
            indices.append((chosen + first[:, None]).int().view(row.batch, 1, pool.topk))
        sink = torch.randn(row.heads, device=CUDA) if row.sink else None
        calls.append(Call((q, kv_caches, indices, none, none, sink), kwargs))
    return calls


def check(turn: Call, out: torch.Tensor, lse: torch.Tensor) -> None:
    """First and last query token against fp64, else AssertionError."""
    q, kv_caches, indices, _, _, sink = turn.args
    heads = q.shape[2]
    sinks = torch.full((heads,), -torch.inf) if sink is None else sink.cpu()
    for b in sorted({0, q.shape[0] - 1}):
        pools = zip(turn.kwargs["kv_formats"], kv_caches, indices, strict=True)
        rows = [caches.gather(get_kv_format(name), cache, index[b, 0].long()) for name, cache, index in pools]
        keys = torch.cat(rows).bfloat16().cpu()
        seen = torch.full((heads,), len(keys))
        exact = attention(q[b, 0].cpu(), keys, seen, turn.kwargs["softmax_scale"], 512, sinks)
        assert_right(out[b, 0], lse[b, 0], exact)


def prepare(row: Row) -> Work:
    """The calls of a shape; the first one's result is right."""
    turns = turns_of(row, min(max(2, -(-cold_bytes(CUDA) // row.bytes)), 256))
    first = turns[0]
    assert_native(SPARSE_DECODE, first)
    check(first, *operator_call(SPARSE_DECODE, first))
    arch = dispatch.arch_of(first.args[0])
    assert arch is not None
    config = sm_90.config_for(SPARSE_DECODE.problem(*first.args, **first.kwargs), arch)
    return Work(turns, sm_90.best_splits(config, row.batch, row.heads, row.keys), row.bytes, row.flops)


def main(argv: Sequence[str] | None = None) -> int:
    options = by_shape.arguments(__doc__).parse_args(argv)
    if not by_shape.on_its_card("bench_sparse_sm90"):
        return 2
    _, right = by_shape.run(SHAPES, SPARSE_DECODE, prepare, options)
    return int(not right)


if __name__ == "__main__":
    raise SystemExit(main())
