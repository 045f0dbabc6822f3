"""Is decode as accurate on fp8 queries and keys, 32 heads and 4 query tokens, as AITER's kernel is published to be?

    python benchmarks/check_h32_q4.py [--shapes 1x512,2x2048,4x8192,4x16384] [--scale-dim 192] [--csv FILE]

A shape is batch x context. Each runs with and without a plan: on this machine's GPU, else in the emulated gfx950, where
the four shapes take half a minute of CPU time. What is printed is the cosine distance to fp64, q and keys ~ N(0, 1) in
e4m3, causal, at the softmax scale of DeepSeek's models, 1/sqrt(192), or with `--scale-dim 576` at 1/sqrt(576), where
scores are closer together; and the published distance of AITER's kernel to its own reference, on values of its own
(pull request 3003). A distance `holds` if it is finite and, rounded to the six decimals that are published, no larger;
the exit status is 1 where one does not.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

import mla_suite
from mla_suite import testing
from mla_suite.bench import inputs, sets
from mla_suite.bench.inputs import Call
from mla_suite.bench.saving import Table
from mla_suite.cli import positive

PUBLISHED = {(1, 512): 0.000135, (2, 2048): 0.000089, (4, 8192): 0.000041, (4, 16384): 0.000026}
SCALE = 192**-0.5


class Row(NamedTuple):
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


def rows(batch: int, ctx: int, device: torch.device, scale: float = SCALE) -> Iterator[Row]:
    """Without a plan, and with one."""
    case, call = problem(batch, ctx, device, scale)
    exact = testing.exact_decode(*call.args, **call.kwargs).out
    with nullcontext() if device.type == "cuda" else mla_suite.emulate("gfx950"):
        for planned, own in ((False, call), (True, inputs.with_plan(case, call))):
            out, _ = torch.ops.mla_suite.decode(*own.args, **own.kwargs)
            yield Row(batch, ctx, planned, cosine_distance(out, exact), PUBLISHED.get((batch, ctx), math.inf))


def batch_and_context(text: str) -> tuple[int, int]:
    batch, times, ctx = text.partition("x")
    if not times:
        raise argparse.ArgumentTypeError(f"{text!r}; a shape is batch x context, 1x512 for example")
    return positive(batch), positive(ctx)


def shapes(text: str) -> list[tuple[int, int]]:
    return [batch_and_context(shape) for shape in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes",
        type=shapes,
        default=",".join(f"{batch}x{ctx}" for batch, ctx in PUBLISHED),
        help="default %(default)s",
    )
    parser.add_argument(
        "--scale-dim", type=positive, default=192, metavar="N", help="softmax scale 1/sqrt(N) (default 192)"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows to this file as they come")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print("on", torch.cuda.get_device_name() if device.type == "cuda" else "an emulated gfx950")
    table, holds = Table(given.csv, shown=(*Row._fields, "holds")), True
    for batch, ctx in given.shapes:
        for row in rows(batch, ctx, device, given.scale_dim**-0.5):
            table.add(row._asdict() | {"holds": row.holds})
            holds &= row.holds
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
