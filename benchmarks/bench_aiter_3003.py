"""decode on the grid of AITER pull request 3003, beside the times that it publishes for an MI355X.

    python benchmarks/bench_aiter_3003.py --csv table.csv
    python benchmarks/bench_aiter_3003.py --batch-sizes 1,8 --ctx-lens 512,4096 --warmup 20 --iters 100

fp8 queries and keys (`--bf16`: neither), 32 heads, 4 query tokens, pages of 1, a plan made beforehand; decode and merge
together, by CUDA graph replay with cold caches. Published are the medians of AITER's assembly kernel and of its
HipKittens kernel, for that problem alone. `gain_percent` is by how much less time ours takes than the assembly kernel;
it is empty on a CPU, where the reference is timed. Each result is compared with fp64 before it is timed.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mla_suite.bench import sets
from mla_suite.bench.measure import Measured, measure
from mla_suite.bench.saving import Table
from mla_suite.bench.timer import Effort
from mla_suite.cli import positive, sizes

FILE = Path(__file__).parent / "published" / "aiter-3003.csv"
PROBLEM = {"heads": 32, "q_len": 4}
"""The problem of the published times, in fp8 with pages of 1; the pull request names no others."""
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
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows to this file as they come")
    given = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
