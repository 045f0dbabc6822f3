"""decode on an H100 or H200, shape by shape: burst and sustained time, rates, and the ratio to what the card can do.

    python benchmarks/bench_decode_sm90.py [--rows B128,B1] [--sustained [B128]] [--splits [B8]] [--json FILE]
    python benchmarks/bench_decode_sm90.py --planned [--rows B1]

Device time of a call, combine included, by replay of a CUDA graph over inputs that rotate through more memory than the
L2 holds: the median of rounds after a rest (burst), and at the end of 0.7 s of uninterrupted replay (sustained: the
power limit then holds the clock). The floor is the larger of two ceilings measured in the same run: a kernel that only
reads as many bytes, one launch included, and the FLOP at the rate of a large bf16 matrix product. Two sequences of
every shape are compared with fp64 before it is timed. `--splits` tries half and twice the splits per sequence as well.
`--planned` times a few shapes with a plan, made beforehand, and without, in turns, and nothing else.

FlashMLA's columns were measured on another H200 in the same way (commit 9241ae3, its metadata made beforehand), with
floors of that run: compare ratios to floors, not microseconds, where a few percent matter.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import by_shape
import torch
from by_shape import Work, assert_native, assert_right, operator_call, print_each, wanted

import mla_suite
from mla_suite.archs.sm_90.costs import best_splits
from mla_suite.archs.sm_90.tile import BLOCK_N
from mla_suite.bench.clock import Replay, cold_bytes
from mla_suite.bench.inputs import PLAN, Call, rotation
from mla_suite.bench.noise import median
from mla_suite.core import dispatch
from mla_suite.ops.decode import DECODE
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.ops.plan.metadata import Plan, Word
from mla_suite.testing import exact_decode

CUDA = torch.device("cuda")


class Row(NamedTuple):
    """Lengths all `kv`, or uniform in [q_len, 2 kv) when ragged; FlashMLA's time and its ratio to the floor, or nan."""

    batch: int
    heads: int
    q_len: int
    kv: int
    peer_us: float
    peer_over_floor: float
    ragged: bool = False

    @property
    def name(self) -> str:
        return f"B{self.batch} H{self.heads} kv{'~' if self.ragged else ''}{self.kv} q{self.q_len}"

    def lens(self) -> list[int]:
        if not self.ragged:
            return [self.kv] * self.batch
        return random.Random(self.kv).choices(range(self.q_len, 2 * self.kv), k=self.batch)


SHAPES = (
    Row(128, 128, 1, 512, 42.1, 1.56),
    Row(128, 128, 1, 2048, 118.0, 1.29),
    Row(128, 128, 1, 4096, 223.2, 1.22),
    Row(128, 128, 1, 6144, 347.4, 1.27),
    Row(1, 16, 1, 1024, 11.2, 5.10),
    Row(1, 16, 1, 4096, 22.5, 7.01),
    Row(1, 16, 1, 8192, 25.6, 5.78),
    Row(1, 128, 1, 1024, 13.8, 6.00),
    Row(1, 128, 1, 4096, math.nan, math.nan),
    Row(1, 128, 1, 8192, 25.0, 5.57),
    Row(128, 16, 1, 4096, 142.1, 1.07),
    Row(128, 16, 1, 8192, 276.3, 1.06),
    Row(128, 64, 1, 4096, 145.1, 1.07),
    Row(128, 64, 1, 8192, math.nan, math.nan),
    Row(1, 32, 4, 256, 10.6, 5.35),
    Row(1, 32, 4, 512, 11.7, 5.58),
    Row(1, 32, 4, 1200, 14.9, 6.24),
    Row(1, 32, 4, 3200, 22.8, 7.49),
    Row(1, 32, 4, 8192, 25.3, 5.63),
    Row(8, 32, 4, 256, 13.4, 4.21),
    Row(8, 32, 4, 512, 14.9, 3.89),
    Row(8, 32, 4, 1200, 21.4, 3.98),
    Row(8, 32, 4, 3200, 32.3, 3.49),
    Row(8, 32, 4, 8192, 47.8, 2.10),
    Row(32, 32, 4, 256, 13.6, 2.10),
    Row(32, 32, 4, 512, 26.3, 3.11),
    Row(32, 32, 4, 1200, 33.2, 2.37),
    Row(32, 32, 4, 3200, 58.2, 1.63),
    Row(32, 32, 4, 8192, 119.6, 1.31),
    Row(128, 32, 4, 256, 29.6, 1.59),
    Row(128, 32, 4, 512, 42.2, 1.57),
    Row(128, 32, 4, 1200, 77.4, 1.45),
    Row(128, 32, 4, 3200, 177.3, 1.24),
    Row(128, 32, 4, 8192, 452.3, 1.24),
    Row(128, 128, 1, 4096, 243.0, 1.35, ragged=True),
    Row(128, 16, 1, 4096, 148.4, 1.13, ragged=True),
    Row(32, 32, 4, 3200, 58.3, 1.76, ragged=True),
    Row(8, 16, 1, 8192, 30.4, 1.85, ragged=True),
    Row(32, 16, 1, 1024, 20.4, 1.92),
    Row(32, 16, 1, 4096, 45.4, 1.28),
    Row(32, 16, 1, 8192, 79.2, 1.17),
    Row(128, 16, 1, 1024, 41.8, 1.15),
    Row(8, 128, 1, 4096, 32.8, 2.88),
    Row(8, 64, 1, 4096, 26.5, 2.49),
    Row(32, 64, 1, 4096, 51.9, 1.43),
    Row(64, 128, 1, 16384, 443.9, 1.22),
    Row(64, 64, 1, 8192, 162.1, 1.21),
    Row(128, 128, 2, 4096, 429.9, 1.18),
)


PLANNED = (
    "B1 H16 kv1024", "B1 H16 kv8192", "B1 H128 kv1024", "B1 H128 kv8192", "B8 H16 kv~8192", "B32 H32 kv3200",
    "B128 H128 kv512", "B128 H128 kv4096 q1", "B128 H128 kv~4096", "B128 H16 kv4096",
)  # fmt: skip
"""Names of SHAPES, by how their names begin: one or several items of an SM part, one or many splits of a sequence."""


def call(turn: Call) -> tuple[torch.Tensor, torch.Tensor]:
    return operator_call(DECODE, turn)


def check(turn: Call, out: torch.Tensor, lse: torch.Tensor) -> None:
    """First and last sequence against fp64, else AssertionError."""
    q, cache, lens, table, *_ = turn.args
    some = sorted({0, q.shape[0] - 1})
    pages = table[some].flatten().unique()
    renumbered = torch.zeros(cache.shape[0], dtype=torch.int32, device=q.device)
    renumbered[pages.long()] = torch.arange(len(pages), dtype=torch.int32, device=q.device)
    chosen = (q[some], cache[pages.long()], lens[some], renumbered[table[some].long()])
    exact = exact_decode(*(tensor.cpu() for tensor in chosen), **turn.kwargs)
    assert_right(out[some], lse[some], exact)


def unplanned_splits(row: Row, q: torch.Tensor) -> int:
    """Splits per sequence that decode makes where it is given no plan."""
    arch = dispatch.arch_of(q)
    assert arch is not None
    return best_splits(arch, "tma", row.batch, row.heads * row.q_len, -(-max(row.lens()) // BLOCK_N))


def with_plan(turn: Call, rows: int) -> Call:
    """The same call with the plan that a user makes for it."""
    lens = turn.args[2]
    plan = mla_suite.plan(lens, num_heads=rows, max_seqlen_kv=turn.kwargs["max_seqlen_kv"])
    return turn._replace(args=(*turn.args[:PLAN], plan, *turn.args[PLAN + 1 :]))


def without_plan(turn: Call) -> Call:
    return turn._replace(args=(*turn.args[:PLAN], None, *turn.args[PLAN + 1 :]))


def compare_planned(row: Row, width: int) -> str:
    """A line: items, partials and time with a plan beside splits and time without, rounds of both in turns."""
    sample = decode_sample(row.lens(), heads=row.heads, q_len=row.q_len)
    args, kwargs = sample.make(CUDA)
    kwargs["max_seqlen_kv"] = max(row.lens())
    bare = Call(args, kwargs)
    planned = with_plan(bare, row.heads * row.q_len)
    header = Plan.read(planned.args[PLAN]).header
    results = [call(turn) for turn in (bare, planned)]
    for turn, (out, lse) in zip((bare, planned), results, strict=True):
        check(turn, out, lse)
    (out, lse), (other, other_lse) = results
    apart = ((out.double() - other).norm() / out.double().norm()).item()
    if not (apart <= 5e-3 and (lse - other_lse).abs().max().item() <= 1e-3):  # a NaN compares false
        raise AssertionError(f"with a plan the result is off by {apart:.2g} from the one without")
    turns = rotation(planned, sample.bytes, cold_bytes(CUDA), 512)
    replays = [Replay(call, [without_plan(turn) for turn in turns]), Replay(call, turns)]
    rounds = [[replay.round(0.05) for replay in replays] for _ in range(3)]
    us, planned_us = (median([pair[i] for pair in rounds]) for i in (0, 1))
    return (
        f"{row.name:{width}s} {unplanned_splits(row, args[0]):5d} {us:9.2f} {header[Word.WORK_TILES_USED]:6d} "
        f"{header[Word.PARTIAL_ROWS]:7d} {planned_us:9.2f} {planned_us / us:6.2f}"
    )


def show_planned(names: str, deadline: float) -> bool:
    """Whether no shape failed."""
    width = by_shape.name_width(SHAPES)
    print(f"{'shape':{width}s}splits        us  items partial   planned  ratio", flush=True)
    rows = filter(wanted(names), (row for row in SHAPES if row.name.startswith(PLANNED)))
    return print_each(rows, lambda row: compare_planned(row, width), width, deadline)


def prepare(row: Row) -> Work:
    """The calls of a shape, with a plan where it is ragged; the first one's result is right."""
    sample = decode_sample(row.lens(), heads=row.heads, q_len=row.q_len)
    args, kwargs = sample.make(CUDA)
    kwargs["max_seqlen_kv"] = max(row.lens())
    splits = None if row.ragged else unplanned_splits(row, args[0])
    first = Call(args, kwargs)
    if row.ragged:
        first = with_plan(first, row.heads * row.q_len)
    assert_native(DECODE, first)
    check(first, *call(first))
    return Work(rotation(first, sample.bytes, cold_bytes(CUDA), 512), splits, sample.bytes, sample.flops)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def main(argv: Sequence[str] | None = None) -> int:
    parser = by_shape.arguments(__doc__)
    parser.add_argument("--planned", action="store_true", help="a few shapes with a plan and without, and no others")
    options = parser.parse_args(argv)
    if not by_shape.on_its_card("bench_decode_sm90"):
        return 2
    if options.planned:
        return int(not show_planned(options.rows, time.perf_counter() + options.seconds))
    found, right = by_shape.run(SHAPES, DECODE, prepare, options)
    grid = [timed.us / timed.peer_us for timed in found if " H32 " in timed.name and "~" not in timed.name]
    if grid:
        print(f"32 heads, 4 tokens: {len(grid)} shapes, geometric mean {geometric_mean(grid):.3f} of FlashMLA's time")
    return int(not right)


if __name__ == "__main__":
    raise SystemExit(main())
