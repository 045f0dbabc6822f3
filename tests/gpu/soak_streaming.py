"""Soak of decode and the combine that runs beside it: captured calls over two caches of opposite values.

    python tests/gpu/soak_streaming.py [--calls 10000000] [--cases a,b] [--no-busy-stream] [--no-second-process]

Each case captures 64 calls that alternate between two caches. The latent part of one is the other's, negated, and the
latent part of queries is zero, so that scores come from the rope parts alone, which differ as well: a word of the
call before that is taken for one of this call is a wrong number of the right size. The result of each call is compared
bit for bit with that of the same call by itself. Meanwhile a second stream of this process and a second process keep
the GPU busy. Between them the cases use every instance of the streaming combine; the last one, with a plan, does not
stream. The exit status is 1 where anything differs, with the cases that did.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import mla_suite
from mla_suite.ops.decode.samples import decode_sample

PLAN = 11  # among decode's tensors
CALLS = 64  # of a graph
BUSY = (
    "import torch; x = torch.randn(2048, 2048, device='cuda', dtype=torch.bfloat16)\nwhile True: x = (x @ x).sigmoid()"
)

CASES: dict[str, dict[str, Any]] = {
    "16 heads": dict(lens=(1500,), heads=16),
    "16 heads, long": dict(lens=(8192,), heads=16),
    "64 heads": dict(lens=(4096,), heads=64),
    "128 heads": dict(lens=(4096,), heads=128),
    "128 heads, long": dict(lens=(16384,), heads=128),
    "four sequences": dict(lens=(4096, 4000, 100, 3), heads=16),
    "ragged queries": dict(lens=(1700, 900), heads=5, q_len=3, varlen=True),
    "few splits": dict(lens=(700, 90, 5), heads=64, num_splits=4),
    "odd splits": dict(lens=(4096,), heads=64, num_splits=5),
    "odd splits, 128 heads": dict(lens=(4096, 4000, 1000), heads=128, num_splits=3),
    "empty splits": dict(lens=(65,), heads=16, num_splits=40),
    "rows of 512": dict(lens=(4096,), heads=16, rope=0),
    "fp16": dict(lens=(4096,), heads=16, kv_format="fp16", dtype=torch.float16),
    "fp16, 128 heads": dict(lens=(8192,), heads=128, kv_format="fp16", dtype=torch.float16),
    "sinks": dict(lens=(3000,), heads=16, sink=True),
    "planned": dict(lens=(4096, 1000), heads=16, planned=True),
    "planned, 128 heads": dict(lens=(4096, 3000, 100, 2000), heads=128, planned=True),
}
QUICK = ("16 heads", "128 heads", "four sequences", "empty splits", "fp16", "planned, 128 heads")


def opposites(options: dict[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Two calls whose values are opposite."""
    args, kwargs = decode_sample(**{**options, "planned": False}).make(torch.device("cuda"))
    q, cache, lens, *others = args
    if options.get("planned"):
        others[PLAN - 3] = mla_suite.plan(lens, num_heads=options["heads"])
    if q.shape[-1] > 512:
        q.view(torch.uint8)[..., : 512 * q.element_size()] = 0
    other = cache.clone()
    values, negated = other.view(torch.uint8), -cache.float()
    values[..., : 512 * cache.element_size()] = negated[..., :512].to(cache.dtype).view(torch.uint8)
    values[..., 512 * cache.element_size() :] = values[..., 512 * cache.element_size() :].roll(1, 0)
    return [((q, cache, lens, *others), kwargs), ((q, other, lens, *others), kwargs)]


class Soak:
    """A graph of CALLS alternating calls of one case, and what they give one by one."""

    def __init__(self, options: dict[str, Any]) -> None:
        calls = opposites(options)
        alone = []
        for args, kwargs in calls:
            alone.append(torch.ops.mla_suite.decode(*args, **kwargs))
            torch.cuda.synchronize()
        self.different = torch.zeros((), dtype=torch.int64, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            results = [torch.ops.mla_suite.decode(*args, **kwargs) for args, kwargs in calls * (CALLS // 2)]
            for which, expected in enumerate(alone):
                for part, right in enumerate(expected):
                    found = torch.stack([result[part] for result in results[which::2]])
                    same = found.view(torch.uint8) == right.unsqueeze(0).view(torch.uint8)
                    self.different += (~same).sum()

    def run(self, calls: int, step: Callable[[int], None]) -> int:
        """Replays until so many calls were made; `step` hears of each 4096 or so. Returns how many bytes differed."""
        done = 0
        self.different.zero_()
        while done < calls:
            for _ in range(64):
                self.graph.replay()
            torch.cuda.synchronize()
            done += 64 * CALLS
            step(64 * CALLS)
        return int(self.different.item())


@contextmanager
def second_process():
    """Another process that keeps the GPU busy, so that both get time slices."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


class BusyStream:
    """Products on a stream of their own, enqueued again whenever few are left."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._x = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)

    def refill(self) -> None:
        if self._stream.query():
            with torch.cuda.stream(self._stream):
                for _ in range(400):
                    torch.mm(self._x, self._x)


def soak(names: list[str], calls: int, busy: bool, process: bool, step: Callable[[str, int], None]) -> dict[str, int]:
    """Bytes that differed, by case; `calls` are shared out among the cases."""
    wrong = {}
    with ExitStack() as stack:
        if process:
            stack.enter_context(second_process())
        beside = BusyStream() if busy else None

        for name in names:

            def report(count: int, name: str = name) -> None:
                if beside is not None:
                    beside.refill()
                step(name, count)

            report(0)
            wrong[name] = Soak(CASES[name]).run(calls // len(names), report)
    return wrong


def main() -> int:
    from rich.progress import Progress

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000_000, help="captured calls, of all cases together")
    parser.add_argument("--cases", default="all", help=f"comma-separated: all, quick, {', '.join(CASES)}")
    parser.add_argument("--no-busy-stream", action="store_true", help="nothing else runs in this process")
    parser.add_argument("--no-second-process", action="store_true", help="no other process uses the GPU")
    given = parser.parse_args()
    every = {"all": list(CASES), "quick": list(QUICK)}
    names = every.get(given.cases) or [name.strip() for name in given.cases.split(",")]
    unknown = [name for name in names if name not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    began = time.monotonic()
    with Progress() as progress:
        bar = progress.add_task("calls", total=given.calls)
        wrong = soak(
            names,
            given.calls,
            not given.no_busy_stream,
            not given.no_second_process,
            lambda name, count: progress.update(bar, advance=count, description=name),
        )
    for name, count in wrong.items():
        print(f"{name}: {count} bytes differ")
    print(f"{given.calls} calls in {time.monotonic() - began:.0f} s")
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
