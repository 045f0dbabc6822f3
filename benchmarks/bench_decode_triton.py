"""decode in Triton on an H200, beside the times of two others: it must not be slower than another Triton kernel.

    python benchmarks/bench_decode_triton.py [--only B1,B8] [--plan] [--alternatives]

bf16, 576/512, pages of 64 in random order, cold caches, graph replay after a rest. `SGLang` is SGLang 0.5.23's Triton
kernel with the number of splits that was best for it, `FlashMLA` its kernel at commit 9241ae3; both were measured on an
H200 (driver 580.159.04, torch 2.11, Triton 3.6) in November 2026, and are no part of this run. Every result is compared
with the reference first. `--alternatives` times other tiles and splits too: what the rules in ops/decode/triton.py are
held against.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from bench_decode_sm90 import SHAPES as NATIVE_SHAPES
from by_shape import wanted

from mla_suite.bench import clock, inputs, noise, runners, sets
from mla_suite.bench.clock import Effort
from mla_suite.bench.inputs import Call
from mla_suite.core import dispatch, register
from mla_suite.core.dispatch import Backend, Supported
from mla_suite.ops.decode.triton_blocks import Tile

EFFORT = Effort(rounds=3, passes=1)
BRIEF = Effort(rounds=1, passes=1, rest_s=0.02)


FLASH_MLA = {(row.batch, row.heads, row.kv, row.q_len): row.peer_us for row in NATIVE_SHAPES if not row.ragged}
"""Microseconds by shape."""
FLASH_MLA[64, 16, 16384, 1] = 280.1  # not a shape of the native kernel's benchmark


class Row(NamedTuple):
    """A shape, and microseconds of SGLang's kernel on it; 0 where it does not take it."""

    batch: int
    heads: int
    kv_len: int
    q_len: int
    sglang: float

    @property
    def name(self) -> str:
        return f"B{self.batch} H{self.heads} kv{self.kv_len}" + (f" q{self.q_len}" if self.q_len > 1 else "")

    @property
    def flash_mla(self) -> float:
        return FLASH_MLA[self.batch, self.heads, self.kv_len, self.q_len]


SHAPES = (
    Row(128, 128, 512, 1, 307.6),
    Row(128, 128, 2048, 1, 1122.5),
    Row(128, 128, 4096, 1, 2148.0),
    Row(128, 128, 6144, 1, 3207.5),
    Row(1, 16, 1024, 1, 15.8),
    Row(1, 16, 4096, 1, 26.7),
    Row(1, 16, 8192, 1, 34.8),
    Row(32, 16, 1024, 1, 30.7),
    Row(32, 16, 4096, 1, 88.3),
    Row(32, 16, 8192, 1, 160.1),
    Row(128, 16, 1024, 1, 88.5),
    Row(128, 16, 4096, 1, 301.7),
    Row(128, 16, 8192, 1, 581.8),
    Row(1, 128, 1024, 1, 15.9),
    Row(1, 128, 8192, 1, 47.5),
    Row(8, 128, 4096, 1, 137.7),
    Row(8, 64, 4096, 1, 77.5),
    Row(32, 64, 4096, 1, 267.8),
    Row(64, 128, 16384, 1, 4099.9),
    Row(64, 16, 16384, 1, 582.3),
    Row(64, 64, 8192, 1, 1032.9),
    Row(128, 64, 4096, 1, 1090.3),
    Row(1, 32, 1200, 4, 0.0),
    Row(8, 32, 1200, 4, 0.0),
    Row(32, 32, 1200, 4, 0.0),
    Row(128, 32, 1200, 4, 0.0),
)


def measure(row: Row, planned: bool, others: bool) -> str:
    case = sets.decode(row.batch, row.heads, row.kv_len, row.q_len, planned=planned)
    op, device = register.get("decode"), torch.device("cuda")
    call = inputs.make(case, device)
    backend = next(each for each in op.backends if each.name == "triton")
    problem = op.problem(*call.args, **call.kwargs)
    answer = backend.supports(problem, dispatch.arch_of(call.args[0]))
    if not isinstance(answer, Supported):
        return f"{row.name:18} {answer.reason}"
    runner = runners.configured(op, backend, answer.config, answer.reason)
    assert runner.run is not None
    runner.error(call, inputs.expected(case, call))
    turns = inputs.rotation(call, case.sample.bytes, clock.cold_bytes(device), clock.MAX_CALLS)
    us = noise.median(clock.device_rounds(runner.run, turns, EFFORT))
    beside = f"{row.sglang:8.1f} {us / row.sglang:5.2f}" if row.sglang else f"{'':14}"
    line = f"{row.name:18} {us:8.1f} {case.sample.bytes / us / 1e3:6.0f} {beside} {row.flash_mla:9.1f} "
    line += f"{us / row.flash_mla:5.2f}  {tuple(answer.config)}"
    if others and row.batch <= 32:  # larger batches fill the chip whatever the tile
        line += "  " + " ".join(f"{name}:{time:.1f}" for name, time in sorted(alternatives(row, backend, turns)))
    return line


def alternatives(row: Row, backend: Backend, turns: list[Call]) -> Iterator[tuple[str, float]]:
    """Tile rows / splits, and microseconds, fastest five first by name of the tile."""
    op, rows = register.get("decode"), row.heads * row.q_len
    found: list[tuple[float, str]] = []
    for tile in (Tile(16, 64, 8, 5), Tile(32, 64, 8, 5), Tile(64, 64, 8, 2)):
        if tile.rows > 16 and tile.rows >= 2 * rows:
            continue
        tiles = -(-rows // tile.rows)
        for splits in (1, 2, 4, 8, 16, 32):
            blocks = row.batch * tiles * splits
            if row.kv_len // splits < 64 or blocks > 2 * 132 > row.batch * tiles:
                continue
            varied = [turn._replace(kwargs={**turn.kwargs, "num_splits": splits}) for turn in turns]
            run = runners.configured(op, backend, tile, "alternative").run
            assert run is not None
            try:
                us = noise.median(clock.device_rounds(run, varied, BRIEF))
            except Exception as error:  # a tile that does not fit is no alternative, and says so
                found.append((math.inf, f"{tile.rows}/{splits} {type(error).__name__}"))
            else:
                found.append((us, f"{tile.rows}/{splits}"))
    return iter([(name, us) for us, name in sorted(found)[:5]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated beginnings of rows' names")
    parser.add_argument("--plan", action="store_true", help="with a plan for all compute units")
    parser.add_argument("--alternatives", action="store_true")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("decode in Triton is timed on a GPU; tests/triton runs it on a CPU")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(f"{'shape':18} {'us':>8} {'GB/s':>6} {'SGLang':>8} {'x':>5} {'FlashMLA':>9} {'x':>5}  tile")
    chosen = filter(wanted(given.only), SHAPES)
    for row in sorted(chosen, key=lambda row: row.batch * row.kv_len):  # the short ones first
        print(measure(row, given.plan, given.alternatives), flush=True)


if __name__ == "__main__":
    main()
