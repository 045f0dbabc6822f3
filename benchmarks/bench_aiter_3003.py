"""decode on the grid of AITER pull request 3003, beside the times that it publishes for an MI355X.

    python benchmarks/bench_aiter_3003.py --csv table.csv
    python benchmarks/bench_aiter_3003.py --batch-sizes 1,8 --ctx-lens 512,4096 --warmup 20 --iters 100
    python benchmarks/bench_aiter_3003.py --accuracy [--scale-dim 576] [--csv FILE]

fp8 queries and keys (`--bf16`: neither), 32 heads, 4 query tokens, pages of 1, a plan made beforehand; decode and merge
together, by CUDA graph replay with cold caches. Published are the medians of AITER's assembly kernel and of its
HipKittens kernel, for that problem alone. `gain_percent` is by how much less time ours takes than the assembly kernel;
it is empty on a CPU, where the reference is timed. Each result is compared with fp64 before it is timed.

`--accuracy` times nothing. Each shape, by default the four whose accuracy is published, runs with and without a plan:
on this machine's GPU, else in the emulated gfx950, where the four take half a minute of CPU time. `distance` is the
cosine distance to fp64, q and keys ~ N(0, 1) in e4m3, causal, at the softmax scale of DeepSeek's models, 1/sqrt(192),
or with `--scale-dim 576` at 1/sqrt(576), where scores are closer together; `published` is that of AITER's kernel to its
own reference, on values of its own. A distance `holds` if it is finite and, rounded to the six decimals that are
published, no larger; the exit status is 1 where one does not.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

import mla_suite
from mla_suite import testing
from mla_suite.bench import inputs, sets
from mla_suite.bench.inputs import Call
from mla_suite.bench.measure import Measured, measure
from mla_suite.bench.saving import Table
from mla_suite.bench.timer import Effort
from mla_suite.cli import positive, sizes, writable

FILE = Path(__file__).parent / "published" / "aiter-3003.csv"
PROBLEM = {"heads": 32, "q_len": 4}
"""The problem of the published times, in fp8 with pages of 1; the pull request names no others."""
DISTANCES = {(1, 512): 0.000135, (2, 2048): 0.000089, (4, 8192): 0.000041, (4, 16384): 0.000026}
"""Published cosine distances, by batch and context."""
SCALE = 192**-0.5
HEADER = ("batch", "ctx", "shape", "backend", "asm_us", "hk_us", "ours_us", "gain_percent")


class Pair(NamedTuple):
    """Published microseconds of one shape, decode and reduce: AITER's assembly kernel and its HipKittens kernel."""

    asm_us: float
    hk_us: float
    source: str


def pairs() -> dict[tuple[int, int], Pair]:
    """By batch and context."""
    with FILE.open(newline="") as file:
        return {
            (int(row["batch"]), int(row["ctx"])): Pair(float(row["asm_us"]), float(row["hk_us"]), row["source"])
            for row in csv.DictReader(file)
        }


def row_of(found: Measured) -> dict[str, object]:
    """The cells of `HEADER`; those that a shape or a device does not have are empty."""
    facts = found.case.facts
    published = pairs().get((facts["batch"], facts["kv_len"]))
    if "-p1-fp8" not in found.case.shape or any(facts[name] != value for name, value in PROBLEM.items()):
        published = None
    asm_us, hk_us, _ = published or ("", "", "")
    gain: object = ""
    if published and found.us and found.backend != "reference":
        gain = 100 * (1 - found.us / published.asm_us)
    ours = found.us or found.failure
    return dict(zip(HEADER, (facts["batch"], facts["kv_len"], found.case.shape, found.backend, asm_us, hk_us, ours,
                             gain), strict=True))  # fmt: skip


class Accuracy(NamedTuple):
    """A distance of ours, and AITER's to six decimals, infinite for a shape that it does not publish."""

    batch: int
    ctx: int
    plan: bool
    distance: float
    published: float

    @property
    def holds(self) -> bool:
        return math.isfinite(self.distance) and round(self.distance, 6) <= self.published


def cosine_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return float(1 - (a * b).sum() / (a.norm() * b.norm()))


def problem(batch: int, ctx: int, device: torch.device, scale: float = SCALE) -> tuple[sets.Case, Call]:
    """The case, with a plan, and its call without one: every value of q and of the keys ~ N(0, 1)."""
    case = sets.decode(batch, 32, ctx, 4, page=1, planned=True, kv_format="fp8", dtype=torch.float8_e4m3fn)
    args, kwargs = case.sample.make(device)
    keys = torch.randn(args[1].shape, generator=torch.Generator(device).manual_seed(ctx), device=device)
    cache, one = keys.to(torch.float8_e4m3fn).view(torch.uint8), torch.ones((), device=device)
    call = Call((args[0], cache, *args[2:8], one, *args[9:]), kwargs | {"softmax_scale": scale})
    return case, call


def accuracy(batch: int, ctx: int, device: torch.device, scale: float = SCALE) -> Iterator[Accuracy]:
    """Without a plan, and with one."""
    case, call = problem(batch, ctx, device, scale)
    exact = testing.exact_decode(*call.args, **call.kwargs).out
    with nullcontext() if device.type == "cuda" else mla_suite.emulate("gfx950"):
        for planned, own in ((False, call), (True, inputs.with_plan(case, call))):
            out, _ = torch.ops.mla_suite.decode(*own.args, **own.kwargs)
            yield Accuracy(batch, ctx, planned, cosine_distance(out, exact), DISTANCES.get((batch, ctx), math.inf))


def print_accuracy(given: argparse.Namespace, device: torch.device) -> int:
    shapes = list(product(given.batch_sizes, given.ctx_lens)) if given.batch_sizes else DISTANCES
    print("on", torch.cuda.get_device_name() if device.type == "cuda" else "an emulated gfx950")
    table, holds = Table(given.csv, shown=(*Accuracy._fields, "holds")), True
    for batch, ctx in shapes:
        for row in accuracy(batch, ctx, device, given.scale_dim**-0.5):
            table.add(row._asdict() | {"holds": row.holds})
            holds &= row.holds
    return 0 if holds else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=sizes, metavar="N,N", help="sequences (default as published)")
    parser.add_argument("--ctx-lens", type=sizes, metavar="N,N", help="cached keys of a sequence")
    parser.add_argument("--nhead", type=positive, metavar="N", help="heads of the queries (default 32)")
    parser.add_argument("--decode-qlen", type=positive, metavar="N", help="query tokens of a sequence (default 4)")
    parser.add_argument("--page-sizes", type=sizes, metavar="N,N", help="tokens of a page (default 1)")
    parser.add_argument("--bf16", action="store_true", help="bf16 queries and keys")
    parser.add_argument("--warmup", type=positive, default=0, metavar="N", help="calls before each round, at least")
    parser.add_argument("--iters", type=positive, default=0, metavar="N", help="calls timed in each round, at least")
    parser.add_argument("--rounds", type=positive, default=6, help="rounds of a shape (default 6)")
    parser.add_argument("--accuracy", action="store_true", help="compare with fp64 and time nothing")
    parser.add_argument("--scale-dim", type=positive, default=192, metavar="N", help="its softmax scale is 1/sqrt(N)")
    parser.add_argument("--csv", type=writable, metavar="FILE", help="write the rows to this file as they come")
    given = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if given.accuracy:
        if bool(given.batch_sizes) != bool(given.ctx_lens):
            parser.error("--accuracy takes --batch-sizes and --ctx-lens together, or neither")
        return print_accuracy(given, device)
    grid: dict[str, Any] = dict(batches=given.batch_sizes, contexts=given.ctx_lens, heads=given.nhead,
                                q_len=given.decode_qlen, pages=given.page_sizes)  # fmt: skip
    name = "aiter-3003-bf16" if given.bf16 else "aiter-3003"
    cases = sets.named(name, **{key: value for key, value in grid.items() if value})
    print("on", torch.cuda.get_device_name() if device.type == "cuda" else "a CPU: times of the reference")
    table, wrong = Table(given.csv, shown=HEADER), False
    effort = Effort(given.rounds, warmup=given.warmup, iters=given.iters)
    for case in cases:
        for found in measure(case, device, effort):
            table.add(row_of(found))
            wrong |= found.wrong
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
