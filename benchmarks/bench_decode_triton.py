"""decode in Triton on an H200, beside the times of two others: it must not be slower than another Triton kernel.

    python benchmarks/bench_decode_triton.py [--only B1,B8] [--plan] [--alternatives] [--csv FILE]

bf16, 576/512, pages of 64 in random order, cold caches, graph replay after a rest. `SGLang` is SGLang 0.5.23's Triton
kernel with the number of splits that was best for it, `FlashMLA` its kernel at commit 9241ae3; both were measured on an
H200 (driver 580.159.04, torch 2.11, Triton 3.6) in November 2026, are no part of this run, and are in published/. Every
result is compared with the reference first. `--alternatives` times other tiles and splits too: what the rules in
ops/decode/triton.py are held against.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path
from typing import NamedTuple

import torch

from mla_suite.bench import inputs, runners, sets, timer
from mla_suite.bench.inputs import Call
from mla_suite.bench.saving import Table
from mla_suite.bench.timer import Effort
from mla_suite.core import dispatch, register
from mla_suite.core.dispatch import Backend, Supported
from mla_suite.ops.decode.triton_blocks import Tile

FILE = Path(__file__).parent / "published" / "decode-h200.csv"
EFFORT = Effort(rounds=3)
BRIEF = Effort(rounds=1, rest_s=0.02)


class Shape(NamedTuple):
    """A shape, and microseconds of the others' kernels on it; NaN where one does not take it."""

    batch: int
    heads: int
    kv_len: int
    q_len: int
    sglang_us: float
    flashmla_us: float

    @property
    def name(self) -> str:
        return f"B{self.batch} H{self.heads} kv{self.kv_len}" + (f" q{self.q_len}" if self.q_len > 1 else "")


def shapes() -> list[Shape]:
    """The short ones first."""
    with FILE.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    found = [Shape(*map(int, row[:4]), *(float(us or "nan") for us in row[4:])) for row in rows]
    return sorted(found, key=lambda shape: shape.batch * shape.kv_len)


def measure(shape: Shape, planned: bool, others: bool) -> dict[str, object]:
    """The row of a shape; a wrong result is a ValueError."""
    case = sets.decode(shape.batch, shape.heads, shape.kv_len, shape.q_len, planned=planned)
    op, device = register.get("decode"), torch.device("cuda")
    call = inputs.make(case, device)
    backend = next(each for each in op.backends if each.name == "triton")
    answer = backend.supports(op.problem(*call.args, **call.kwargs), dispatch.arch_of(call.args[0]))
    if not isinstance(answer, Supported):
        return {"shape": shape.name, "tile": answer.reason}
    runner = runners.configured(op, backend, answer.config, answer.reason)
    assert runner.run is not None
    runner.error(call, inputs.expected(case, call))
    turns = inputs.rotation(call, case.sample.bytes, timer.cold_bytes(device), timer.MAX_CALLS)
    us = timer.median(timer.device_rounds(runner.run, turns, EFFORT))
    return {
        "shape": shape.name,
        "us": us,
        "gb_per_s": case.sample.bytes / us / 1e3,
        "sglang_us": shape.sglang_us,
        "of_sglang": us / shape.sglang_us,
        "flashmla_us": shape.flashmla_us,
        "of_flashmla": us / shape.flashmla_us,
        "tile": " x ".join(map(str, answer.config)),
        # larger batches fill the chip whatever the tile
        "others": " ".join(alternatives(shape, backend, turns)) if others and shape.batch <= 32 else "",
    }


def alternatives(shape: Shape, backend: Backend, turns: list[Call]) -> list[str]:
    """Tile rows / splits : microseconds, of the fastest five, by name of the tile."""
    op, rows = register.get("decode"), shape.heads * shape.q_len
    found: list[tuple[float, str]] = []
    for tile in (Tile(16, 64, 8, 5), Tile(32, 64, 8, 5), Tile(64, 64, 8, 2)):
        if tile.rows > 16 and tile.rows >= 2 * rows:
            continue
        tiles = -(-rows // tile.rows)
        for splits in (1, 2, 4, 8, 16, 32):
            blocks = shape.batch * tiles * splits
            if shape.kv_len // splits < 64 or blocks > 2 * 132 > shape.batch * tiles:
                continue
            varied = [turn._replace(kwargs={**turn.kwargs, "num_splits": splits}) for turn in turns]
            run = runners.configured(op, backend, tile, "alternative").run
            assert run is not None
            try:
                us = timer.median(timer.device_rounds(run, varied, BRIEF))
            except Exception as error:  # a tile that does not fit is no alternative, and says so
                found.append((math.inf, f"{tile.rows}/{splits} {type(error).__name__}"))
            else:
                found.append((us, f"{tile.rows}/{splits}"))
    return sorted(f"{name}:{us:.1f}" for us, name in sorted(found)[:5])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated beginnings of shapes' names")
    parser.add_argument("--plan", action="store_true", help="with a plan for all compute units")
    parser.add_argument("--alternatives", action="store_true")
    parser.add_argument("--csv", type=Path, help="write the rows to this file as they come")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("decode in Triton is timed on a GPU; tests/triton runs it on a CPU")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    table = Table(given.csv)
    for shape in shapes():
        if shape.name.startswith(tuple(given.only.split(","))):
            row = measure(shape, given.plan, given.alternatives)
            table.add(row)
            print("  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{value}"
                            for name, value in row.items()), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
