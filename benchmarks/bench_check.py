"""The cost of check mode: host time of a decode call with check mode off, and with every n-th call checked.

    python benchmarks/bench_check.py [--emulate gfx942] [--save FILE]

On a GPU the times are of queued calls and the wait for them; on a CPU of an emulated GPU's, whose kernel takes far
longer than a GPU's own, so that a check is a smaller part of it. Each line: n (0 is off), ms per call, ratio to off.
Last comes the time by which a call that is not checked is slower than with check mode off, because it goes through
torch's dispatcher. A merge of no sequences, whose fp32 reference has nothing to do, shows it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch

import mla_suite
from mla_suite.bench import environment
from mla_suite.bench.saving import write_whole
from mla_suite.cli import emulated, positive, writable
from mla_suite.ops.decode.samples import decode_sample

ROUNDS = 5


def seconds(call: Callable[[], object], count: int) -> float:
    """Processor time per call on a CPU, of the best of some rounds; elapsed time where a GPU is waited for."""
    on_gpu = torch.cuda.is_available()
    clock = time.perf_counter if on_gpu else time.process_time
    best = float("inf")
    for _ in range(ROUNDS):
        start = clock()
        for _ in range(count):
            call()
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, (clock() - start) / count)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    emulate = "on a CPU, the GPU to emulate"
    parser.add_argument("--emulate", type=emulated, metavar="ARCH", default="gfx942", help=emulate)
    for name, default in (("batch", 1), ("heads", 16), ("kv", 1024)):
        parser.add_argument(f"--{name}", type=positive, default=default, help=f"default {default}")
    parser.add_argument(
        "--every", type=positive, nargs="+", default=(1, 100), metavar="N", help="check every N-th call (default 1 100)"
    )
    parser.add_argument("--save", type=writable, help="write the times to this JSON file")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors, options = decode_sample([args.kv] * args.batch, heads=args.heads).make(device)
    torch.set_num_threads(1)
    with mla_suite.emulate(args.emulate.name) if device.type == "cpu" else nullcontext():
        ms: dict[int, float] = {}
        for n in (0, *args.every):
            with mla_suite.check(n, on_difference="raise"):
                took = seconds(lambda: mla_suite.decode(*tensors, **options), max(n, 5))
            ms[n] = took * 1e3
            print(f"n {n:4}  {ms[n]:9.3f} ms  {ms[n] / ms[0]:6.3f}", flush=True)
    nothing = torch.empty(0, 4, 512), torch.empty(0, 4), torch.zeros(1, dtype=torch.int32)
    times = []
    for n in (0, 1 << 40):
        with mla_suite.check(n):
            times.append(seconds(lambda: mla_suite.combine(*nothing), 2000))
    unchecked_us = (times[1] - times[0]) * 1e6
    print(f"a call that is not checked: {unchecked_us:.1f} us more")
    if args.save is not None:
        facts = dict(environment=environment.describe(device), heads=args.heads, kv=args.kv, batch=args.batch)
        write_whole(args.save, json.dumps(facts | dict(ms_per_call=ms, unchecked_us=unchecked_us), indent=1) + "\n")


if __name__ == "__main__":
    main()
