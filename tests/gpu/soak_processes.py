"""Soak of long calls of decode in several processes of one GPU, which interrupts their kernels in turns.

    python tests/gpu/soak_processes.py [--processes 4] [--seconds 10] [--kinds extend,batch] [--no-early-launch]

Each process repeats the calls of a prompt's layers, append_kv and then decode, and compares every result with the first
one bit for bit. Kinds are dealt out to the processes:

extend  one sequence of --tokens query tokens of 128 heads over bf16 rows, whose row tiles share keys in pairs
short   the same, of a quarter of the tokens, so that row tiles begin and end more often
fp8     the same over e4m3 rows, where no tiles share keys
batch   as many sequences of one token each over bf16 rows, with a plan
splits  8 sequences of one token of 16 heads and 32,768 keys, whose splits merge in clusters
sparse  --tokens tokens of 128 heads that select 2,048 V3.2 records each, whose row tiles share keys in pairs

The exit status is 1 where a process ended early or a result differed. Calls whose row tiles share keys failed so within
some hundred until 2026-11-30 (D79 in csrc/sm_90/decode/PERF.md).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import mla_suite

HEADS, WIDTH, PAGE, SCALE = 128, 576, 64, 192**-0.5
KINDS = ("extend", "short", "fp8", "batch", "splits", "sparse")
TOPK = 2048


def call_of(kind: str, tokens: int, device: str) -> Callable[[], torch.Tensor]:
    """A layer's calls: new rows go into the cache, and their queries attend."""
    if kind == "sparse":
        return sparse_call(tokens, device)
    if kind == "splits":
        return splits_call(device)
    if kind == "short":
        tokens //= 4
    dtype, kv_format = (torch.float8_e4m3fn, "fp8") if kind == "fp8" else (torch.bfloat16, "bf16")
    pages = -(-tokens // PAGE)
    cache = torch.zeros(pages, PAGE, WIDTH, device=device, dtype=dtype)
    rows = torch.randn(tokens, WIDTH, device=device).bfloat16()
    slots = torch.arange(tokens, device=device)
    table = torch.randperm(pages, device=device).int()
    slots = table.long()[slots // PAGE] * PAGE + slots % PAGE
    q = torch.randn(tokens, HEADS, WIDTH, device=device).bfloat16()
    descale = torch.ones(1, device=device) if kind == "fp8" else None
    options: dict[str, Any] = dict(kv_descale=descale, softmax_scale=SCALE, kv_format=kv_format)
    if kind == "batch":
        lens = torch.arange(1, tokens + 1, device=device, dtype=torch.int32)
        plan = mla_suite.plan(lens, num_heads=HEADS)
        given = q[:, None], cache, lens, table.expand(tokens, -1).contiguous()
        options["plan"] = plan
    else:
        given = q[None], cache, torch.full((1,), tokens, device=device, dtype=torch.int32), table[None]

    def call() -> torch.Tensor:
        mla_suite.append_kv(rows[:, :512], rows[:, 512:], cache, slots, descale, kv_format=kv_format)
        return mla_suite.decode(*given, **options)[0]

    return call


def splits_call(device: str) -> Callable[[], torch.Tensor]:
    keys = 32768
    pages = keys // PAGE
    cache = torch.randn(8 * pages, PAGE, WIDTH, device=device).bfloat16()
    table = torch.randperm(8 * pages, device=device).int().view(8, pages)
    lens = torch.full((8,), keys, device=device, dtype=torch.int32)
    q = torch.randn(8, 1, 16, WIDTH, device=device).bfloat16()
    return lambda: mla_suite.decode(q, cache, lens, table, softmax_scale=SCALE)[0]


def sparse_call(tokens: int, device: str) -> Callable[[], torch.Tensor]:
    rows = torch.randn(4 * TOPK, WIDTH, device=device).bfloat16()
    cache = mla_suite.kv_formats.pack("v32", rows.view(-1, PAGE, WIDTH))
    indices = torch.randint(0, len(rows), (tokens, TOPK), device=device, dtype=torch.int32)
    q = torch.randn(tokens, HEADS, WIDTH, device=device).bfloat16()
    return lambda: mla_suite.sparse_decode(q, [cache], [indices], kv_formats=["v32"], softmax_scale=SCALE)[0]


def work(kind: str, given: argparse.Namespace) -> int:
    """One process."""
    torch.manual_seed(0)
    call = call_of(kind, given.tokens, given.device)
    with mla_suite.early_launch(not given.no_early_launch):
        expected, calls, different = call(), 0, 0
        end = time.monotonic() + given.seconds
        while time.monotonic() < end:
            results = [call() for _ in range(2)]  # the second may begin before the first has ended
            calls += len(results)
            different += sum(not bool((result == expected).all()) for result in results)
    print(f"{kind}: {calls} calls, {different} differ", flush=True)
    return int(different > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4, help="that use the GPU at once (default: 4)")
    parser.add_argument("--seconds", type=float, default=10, help="for which each calls (default: 10)")
    parser.add_argument("--kinds", default="extend,batch", help=f"comma-separated: {', '.join(KINDS)}")
    parser.add_argument("--tokens", type=int, default=4096, help="query tokens of a call (default: 4096)")
    parser.add_argument("--no-early-launch", action="store_true", help="kernels begin when the one ahead has ended")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--alone", metavar="KIND", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        return work(given.alone, given)
    kinds = [kind.strip() for kind in given.kinds.split(",")]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"no kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    processes = [
        subprocess.Popen([sys.executable, *sys.argv, "--alone", kinds[number % len(kinds)]])
        for number in range(given.processes)
    ]
    ended = [process.wait() for process in processes]
    print(f"{sum(map(bool, ended))} of {len(ended)} processes failed")
    return int(any(ended))


if __name__ == "__main__":
    raise SystemExit(main())
