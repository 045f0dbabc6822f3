"""decode on an H100 or H200, shape by shape: burst and sustained time, rates, and the ratio to what the card can do.

    python benchmarks/bench_decode_sm90.py [--rows B128,B1] [--sustained [B128]] [--splits [B8]] [--json FILE]
    python benchmarks/bench_decode_sm90.py --planned [--rows B1]

Device time of a call, combine included, by replay of a CUDA graph over inputs that rotate through more memory than the
L2 holds: the median of rounds after a rest (burst), and at the end of 0.7 s of uninterrupted replay (sustained: the
power limit then holds the clock). The floor is the larger of two ceilings measured in the same run: a kernel that only
reads as many bytes, one launch included, and the FLOP at the rate of a large bf16 matrix product. Two sequences of
every shape are compared with fp64 before it is timed. `--splits` tries half and twice the cuts per sequence as well.
`--planned` times a few shapes with a plan, made beforehand, and without, in turns, and nothing else.

FlashMLA's columns were measured on another H200 in the same way (commit 9241ae3, its metadata made beforehand), with
floors of that run: compare ratios to floors, not microseconds, where a few percent matter.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import mla_suite
from mla_suite.bench import floors
from mla_suite.bench.clock import Effort, Replay, cold_bytes
from mla_suite.bench.inputs import PLAN, Call, rotation
from mla_suite.bench.noise import median
from mla_suite.core import dispatch
from mla_suite.ops.decode import DECODE, hopper
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.ops.plan.layout import Plan, Word
from mla_suite.testing import exact_decode, ulp

SUSTAINED_S = 0.7


class Row(NamedTuple):
    """Lengths all `kv`, or uniform in [q_len, 2 kv) when ragged; FlashMLA's time and its ratio to the floor."""

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


ROWS = (
    Row(128, 128, 1, 512, 42.1, 1.56),
    Row(128, 128, 1, 2048, 118.0, 1.29),
    Row(128, 128, 1, 4096, 223.2, 1.22),
    Row(128, 128, 1, 6144, 347.4, 1.27),
    Row(1, 16, 1, 1024, 11.2, 5.10),
    Row(1, 16, 1, 4096, 22.5, 7.01),
    Row(1, 16, 1, 8192, 25.6, 5.78),
    Row(1, 128, 1, 1024, 13.8, 6.00),
    Row(1, 128, 1, 8192, 25.0, 5.57),
    Row(128, 16, 1, 4096, 142.1, 1.07),
    Row(128, 16, 1, 8192, 276.3, 1.06),
    Row(128, 64, 1, 4096, 145.1, 1.07),
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
"""Shapes of ROWS, by how their names begin: one or several items of a worker, one or many pieces of a sequence."""


class Timed(NamedTuple):
    """What is printed of a shape; microseconds per call."""

    name: str
    splits: str
    us: float
    sustained_us: float
    gb_per_s: float
    tflops: float
    floor_us: float
    bound: str
    peer_us: float
    peer_over_floor: float
    others: dict[str, float]


def call(turn: Call) -> Any:
    return torch.ops.mla_suite.decode(*turn.args, **turn.kwargs)


def check(turn: Call, out: torch.Tensor, lse: torch.Tensor) -> None:
    """First and last sequence against fp64, within what rounding P to 16 bits allows, else AssertionError."""
    q, cache, lens, table, *_ = turn.args
    some = sorted({0, q.shape[0] - 1})
    pages = table[some].flatten().unique()
    renumbered = torch.zeros(cache.shape[0], dtype=torch.int32, device=q.device)
    renumbered[pages.long()] = torch.arange(len(pages), dtype=torch.int32, device=q.device)
    chosen = (q[some], cache[pages.long()], lens[some], renumbered[table[some].long()])
    exact = exact_decode(*(tensor.cpu() for tensor in chosen), **turn.kwargs)
    error = (out[some].cpu().double() - exact.out).abs()
    worst = (error / (2.0**-8 * exact.magnitude + ulp(exact.out, out.dtype))).max().item()
    off = (lse[some].cpu().double() - exact.lse).abs().max().item()
    if not (worst <= 1 and off <= 1e-3):  # a NaN compares false
        raise AssertionError(f"out is {worst:.3g} times as far from fp64 as it may be, lse off by {off:.2g}")


def burst(replay: Replay) -> float:
    return median([replay.round() for _ in range(2)])


def sustained(replay: Replay) -> float:
    """Time per call at the end of SUSTAINED_S of replay without a pause."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stop = time.perf_counter() + SUSTAINED_S
    while time.perf_counter() < stop:
        for _ in range(8):
            replay.graph.replay()
        torch.cuda.current_stream().synchronize()
    begin.record()
    for _ in range(16):
        replay.graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / (16 * replay.calls)


def unplanned_cuts(row: Row, q: torch.Tensor) -> int:
    """Cuts per sequence that decode makes where it is given no plan."""
    arch = dispatch.arch_of(q)
    assert arch is not None
    return hopper.cuts(arch, row.batch, row.heads * row.q_len, -(-max(row.lens()) // hopper.KEYS))


def with_plan(turn: Call, rows: int) -> Call:
    """The same call with the plan that a user makes for it."""
    lens = turn.args[2]
    workers = mla_suite.workers(lens, rows)
    plan = mla_suite.plan(lens, rows=rows, workers=workers, max_kv_len=turn.kwargs["max_kv_len"])
    return turn._replace(args=(*turn.args[:PLAN], plan, *turn.args[PLAN + 1 :]))


def compare_planned(row: Row) -> str:
    """A line: items, pieces and time with a plan beside cuts and time without, rounds of both in turns."""
    device = torch.device("cuda")
    sample = decode_sample(row.lens(), heads=row.heads, q_len=row.q_len)
    args, kwargs = sample.make(device)
    kwargs["max_kv_len"] = max(row.lens())
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
    turns = rotation(planned, sample.bytes, cold_bytes(device), 512)
    replays = [Replay(call, [without(turn) for turn in turns]), Replay(call, turns)]
    rounds = [[replay.round(0.05) for replay in replays] for _ in range(3)]
    us, planned_us = (median([pair[i] for pair in rounds]) for i in (0, 1))
    return (
        f"{row.name:22s} {unplanned_cuts(row, args[0]):5d} {us:9.2f} {header[Word.ITEMS_USED]:6d} "
        f"{header[Word.PARTIAL_ROWS]:7d} {planned_us:9.2f} {planned_us / us:6.2f}"
    )


def without(turn: Call) -> Call:
    return turn._replace(args=(*turn.args[:PLAN], None, *turn.args[PLAN + 1 :]))


def show_planned(names: str) -> int:
    """1 if a shape failed."""
    print("shape                   cuts        us  items  pieces   planned  ratio", flush=True)
    chosen, failed = wanted(names), 0
    for row in ROWS:
        if not row.name.startswith(PLANNED) or not chosen(row):
            continue
        try:
            print(compare_planned(row), flush=True)
        except (AssertionError, RuntimeError) as error:
            print(f"{row.name:22s} FAILED: {' '.join(str(error).split())[:300]}", flush=True)
            failed = 1
        torch.cuda.empty_cache()
    return failed


def measure(row: Row, ceilings: floors.Floors, long: bool, alternatives: bool) -> Timed:
    device = torch.device("cuda")
    sample = decode_sample(row.lens(), heads=row.heads, q_len=row.q_len)
    args, kwargs = sample.make(device)
    rows, width = row.heads * row.q_len, max(row.lens())
    kwargs["max_kv_len"] = width
    splits = unplanned_cuts(row, args[0])
    shown = str(splits)
    first = Call(args, kwargs)
    if row.ragged:
        first, shown = with_plan(first, rows), "plan"
    arch = dispatch.arch_of(args[0])
    problem = DECODE.problem(*first.args, **first.kwargs)
    choice = dispatch.choose("decode", DECODE.backends, problem, arch, "cuda")
    if choice.backend.name != "native":
        raise AssertionError(str(choice))
    check(first, *call(first))
    turns = rotation(first, sample.bytes, cold_bytes(device), 512)
    replay = Replay(call, turns)
    us, steady = burst(replay), sustained(replay) if long else math.nan
    del replay
    others: dict[str, float] = {}
    for other in sorted({max(1, splits // 2), splits * 2} - {splits}) if alternatives and not row.ragged else ():
        turns = [turn._replace(kwargs={**turn.kwargs, "num_splits": other}) for turn in turns]
        others[str(other)] = burst(Replay(call, turns))
    floor, bound = ceilings.of(sample.bytes, sample.flops)
    rates = sample.bytes / us / 1e3, sample.flops / us / 1e6
    return Timed(row.name, shown, us, steady, *rates, floor, bound, row.peer_us, row.peer_over_floor, others)


def show(timed: Timed) -> str:
    others = " ".join(f"{splits}:{us:.1f}" for splits, us in timed.others.items())
    return (
        f"{timed.name:22s} {timed.splits:>4s} {timed.us:8.2f} {timed.sustained_us:8.2f} {timed.gb_per_s:6.0f} "
        f"{timed.tflops:5.0f} {timed.floor_us:7.1f} {timed.bound[:3]} {timed.us / timed.floor_us:6.2f} "
        f"{timed.peer_us:8.1f} {timed.peer_over_floor:6.2f} {timed.us / timed.peer_us:6.2f}  {others}"
    )


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def wanted(names: str) -> Callable[[Row], bool]:
    parts = [part for part in names.split(",") if part]
    return lambda row: not parts or any(row.name.startswith(part) for part in parts)


def never(row: Row) -> bool:
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", default="", help="only shapes whose name begins with one of these, comma separated")
    parser.add_argument("--sustained", nargs="?", const="", help="also after 0.7 s of load; likewise for some shapes")
    parser.add_argument("--splits", nargs="?", const="", help="also with half and twice the cuts; likewise")
    parser.add_argument("--planned", action="store_true", help="a few shapes with a plan and without, and no others")
    parser.add_argument("--json", type=Path, help="write the numbers to this file as they come")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no shape after so many seconds")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("bench_decode_sm90: no H100 or H200 here", file=sys.stderr)
        return 2
    if options.planned:
        return show_planned(options.rows)
    began = time.perf_counter()
    ceilings = floors.measure(torch.device("cuda"), Effort(rounds=1, passes=1, rest_s=0.05))
    print(
        f"{torch.cuda.get_device_name()}: read {ceilings.gb_per_s:.0f} GB/s, bf16 product {ceilings.tflops:.0f} TFLOP/s"
    )
    print("shape                  cuts       us   sustd   GB/s    TF   floor     xfloor  FlashMLA xfloor  ratio")
    long, more = (wanted(names) if names is not None else never for names in (options.sustained, options.splits))
    found: list[Timed] = []
    failed = False
    for row in filter(wanted(options.rows), ROWS):
        if time.perf_counter() - began > options.seconds:
            print(f"{row.name:22s} not begun: {options.seconds:.0f} s are over")
            continue
        try:
            timed = measure(row, ceilings, long(row), more(row))
        except (AssertionError, RuntimeError) as error:
            print(f"{row.name:22s} FAILED: {' '.join(str(error).split())[:300]}", flush=True)
            failed = True
            continue
        found.append(timed)
        print(show(timed), flush=True)
        torch.cuda.empty_cache()
        if options.json:
            rows: list[dict[str, Any]] = [entry._asdict() for entry in found]
            options.json.write_text(json.dumps({"floors": ceilings.as_json(), "rows": rows}, indent=1) + "\n")
    grid = [timed.us / timed.peer_us for timed in found if " H32 " in timed.name and "~" not in timed.name]
    if grid:
        print(f"32 heads, 4 tokens: {len(grid)} shapes, geometric mean {geometric_mean(grid):.3f} of FlashMLA's time")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
