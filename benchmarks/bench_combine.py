"""combine on a GPU: latency, achieved bandwidth and partial tiles of each formulation, per shape.

    python benchmarks/bench_combine.py [--cold] [--shapes 1x128x66,128x128x2] [--csv FILE]

A shape is batch x heads x splits. `chosen` is what dispatch picks, `general` the kernel that any batch may use (fixed
merge order), `torch` softmax over the splits and a weighted sum, eager and compiled, `stream` a kernel that reads and
writes the same bytes and computes nothing. Warm calls find their partials in the cache, as after decode; cold ones
rotate through more memory than it holds. Every time is a graph node's, launch included; every result is compared with
fp64 first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from bench_reduce import HEAD_DIM_V, Turn, check, moved, run_ours, turn_of, uniform_maps

import mla_suite
from mla_suite.archs import combine as config
from mla_suite.bench.saving import Table
from mla_suite.bench.timer import Effort, cold_turns, device_rounds, median
from mla_suite.core import dispatch
from mla_suite.ops.combine import COMBINE, CombineArgs
from mla_suite.ops.combine import triton as triton_kernel

SHAPES = "1x128x66,1x16x132,1x16x16,2x16x66,8x16x17,2x128x33,4x128x17,8x128x9,32x128x3,64x128x2,128x128x2"


@triton.jit
def stream_kernel(partial_out, out, splits, per_sequence, BLOCK: tl.constexpr):
    """Reads what combine reads of partial_out and writes what it writes of out."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = at // per_sequence * splits * per_sequence + at % per_sequence
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(partial_out + first + split * per_sequence)
    tl.store(out + at, total.to(tl.bfloat16))


def stream(turn: Turn, splits: int) -> None:
    values = turn.out.numel()
    stream_kernel[(values // 1024,)](turn.partial_out, turn.out, splits, values // turn.out.shape[0], BLOCK=1024)


def in_torch(partial_out: torch.Tensor, partial_lse: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    lse = partial_lse.unflatten(0, (-1, splits))
    weights = torch.softmax(lse, dim=1)
    out = (weights.unsqueeze(-1) * partial_out.unflatten(0, (-1, splits))).sum(1)
    return out.bfloat16(), torch.logsumexp(lse, dim=1)


def runners(rows: int, splits: int) -> Iterator[tuple[str, Callable[[Turn], Any], bool]]:
    """Name, call, and whether its result is combine's and left in the turn's outputs."""
    yield "chosen", lambda turn: run_ours(turn, splits), True
    arch = dispatch.arch_of(torch.empty(0, device="cuda"))
    if arch is not None:
        fixed = config.invariant(arch, HEAD_DIM_V, rows)
        yield (
            "general",
            lambda turn: COMBINE.backends[0].run(
                fixed, (turn.out, turn.lse), CombineArgs(turn.partial_out, turn.partial_lse, num_splits=splits)
            ),
            True,
        )
    yield (
        "triton",
        lambda turn: triton_kernel.run(
            None, (turn.out, turn.lse), CombineArgs(turn.partial_out, turn.partial_lse, num_splits=splits)
        ),
        True,
    )
    yield "torch", lambda turn: in_torch(turn.partial_out, turn.partial_lse, splits), False
    compiled = torch.compile(in_torch, dynamic=False)
    yield "torch compiled", lambda turn: compiled(turn.partial_out, turn.partial_lse, splits), False
    yield "stream", lambda turn: stream(turn, splits), False


def turns(batch: int, heads: int, splits: int, cold: bool) -> list[Turn]:
    touched = moved(batch * splits, batch, heads)
    device = torch.device("cuda")
    count = cold_turns(touched, device) if cold or touched > 40_000_000 else 1
    return [turn_of(batch * splits, batch, heads, device) for _ in range(min(count, 64))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="batch x heads x splits, between commas (default %(default)s)")
    parser.add_argument("--cold", action="store_true", help="partials from device memory")
    parser.add_argument("--only", default="", help="comma-separated runners")
    parser.add_argument("--rounds", type=int, default=3, help="of each shape (default 3)")
    parser.add_argument("--csv", type=Path, help="write the rows to this file as they come")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("combine's benchmark needs a GPU; the emulator counts but has no times")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "cold" if given.cold else "warm")
    table = Table(given.csv, {"device": torch.cuda.get_device_name(), "cold": given.cold})
    print(f"{'shape':>14} {'runner':>14} {'us':>8} {'GB/s':>7} {'tiles':>7} {'to stream':>9}")
    for shape in given.shapes.split(","):
        batch, heads, splits = map(int, shape.split("x"))
        sets = turns(batch, heads, splits, given.cold)
        tiles = batch * heads * splits
        size = moved(batch * splits, batch, heads)
        times: dict[str, float] = {}
        for name, call, result in runners(batch * heads, splits):
            if given.only and name not in given.only.split(","):
                continue
            if result:
                for output in sets[0][2:]:
                    output.fill_(torch.nan)
                call(sets[0])
                check(sets[0], uniform_maps(batch, splits, torch.device("cuda")))
            times[name] = median(device_rounds(call, sets, Effort(rounds=given.rounds)))
        for name, us in times.items():
            ratio = f"{us / times['stream']:9.2f}" if "stream" in times else ""
            row = dict(shape=shape, runner=name, us=us, gb_per_s=size / us / 1e3, partial_tiles=tiles)
            table.add(row | {"of_stream": ratio.strip()})
            print(f"{shape:>14} {name:>14} {us:8.2f} {size / us / 1e3:7.0f} {tiles:7} {ratio}", flush=True)
        args, options = sets[0][:2], dict(num_splits=splits, out_dtype=torch.bfloat16)
        problem = COMBINE.problem(*args, **options)
        print(" " * 14, dispatch.choose("combine", COMBINE.backends, problem, dispatch.arch_of(args[0]), "cuda"))


if __name__ == "__main__":
    print("mla_suite", mla_suite.__version__)
    main()
