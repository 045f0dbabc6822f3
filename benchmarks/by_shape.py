"""Times of an operator's native kernel, shape by shape, beside what the card can do: the sm_90 benchmarks' common part.

A benchmark names rows and says how the calls of one are made; here they are timed and printed, a line for each.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from mla_suite.bench import floors, saving
from mla_suite.bench.clock import SUSTAINED_S, Effort, Replay
from mla_suite.bench.floors import Floors
from mla_suite.bench.inputs import Call
from mla_suite.bench.noise import median
from mla_suite.core import dispatch
from mla_suite.core.op import Op
from mla_suite.testing import Exact, ulp


class Named(Protocol):
    @property
    def name(self) -> str: ...


class Shape(Named, Protocol):
    """A row of a benchmark: its name, FlashMLA's microseconds and their ratio to the floor (NaN: not measured)."""

    @property
    def peer_us(self) -> float: ...
    @property
    def peer_over_floor(self) -> float: ...


ShapeT = TypeVar("ShapeT", bound=Shape)


class Work(NamedTuple):
    """The timed calls of a shape.

    turns   calls to rotate through, together too large for the L2
    splits  KV splits per sequence that the operator makes of itself; None with a plan
    bytes   and flops of one call
    """

    turns: Sequence[Call]
    splits: int | None
    bytes: int
    flops: int


class Timed(NamedTuple):
    """The printed line of a shape; microseconds per call."""

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


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks of this kind have."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--rows", default="", help="only shapes whose name begins with one of these, comma separated")
    parser.add_argument(
        "--sustained", nargs="?", const="", help=f"also after {SUSTAINED_S} s of load; likewise for some shapes"
    )
    parser.add_argument("--splits", nargs="?", const="", help="also with half and twice the splits; likewise")
    parser.add_argument("--json", type=Path, help="write the numbers to this file as they come")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no shape after this time")
    return parser


def wanted(names: str | None) -> Callable[[Named], bool]:
    """Whether a shape's name begins with one of `names`: all do with "", none with None."""
    if names is None:
        return lambda row: False
    parts = tuple(part for part in names.split(",") if part)
    return lambda row: not parts or row.name.startswith(parts)


def on_its_card(program: str) -> bool:
    """Whether this is a card that the benchmark is about; says so on stderr if not."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return True
    print(f"{program}: no H100 or H200 here", file=sys.stderr)
    return False


def run(
    rows: Sequence[ShapeT], op: Op, prepare: Callable[[ShapeT], Work], options: argparse.Namespace
) -> tuple[list[Timed], bool]:
    """Times the rows that `options` (of `arguments`) ask for, prints them, writes them; what was timed, and whether all
    rows that were begun are right.
    """
    deadline = time.perf_counter() + options.seconds
    ceilings = floors.measure(torch.device("cuda"), Effort(rounds=1, passes=1, rest_s=0.05))
    print(
        f"{torch.cuda.get_device_name()}: read {ceilings.gb_per_s:.0f} GB/s, bf16 product {ceilings.tflops:.0f} TFLOP/s"
    )
    width = name_width(rows)
    print(header(width))
    long, more = wanted(options.sustained), wanted(options.splits)
    found: list[Timed] = []

    def line(row: ShapeT) -> str:
        found.append(measure(row, op, prepare(row), ceilings, long(row), more(row)))
        if options.json:
            kept = [{name: None if value != value else value for name, value in e._asdict().items()} for e in found]
            saving.write_whole(options.json, json.dumps({"floors": ceilings.as_json(), "rows": kept}, indent=1) + "\n")
        return shown(found[-1], width)

    right = print_each(filter(wanted(options.rows), rows), line, width, deadline)
    return found, right


def print_each(rows: Iterable[ShapeT], line: Callable[[ShapeT], str], width: int, deadline: float = math.inf) -> bool:
    """A line for each row: its own, why it failed, or that it was not begun after `deadline`; whether none failed."""
    right = True
    for row in rows:
        if time.perf_counter() > deadline:
            print(f"{row.name:{width}s} not begun: the time given is over", flush=True)
            continue
        try:
            print(line(row), flush=True)
        except (AssertionError, RuntimeError) as error:
            print(f"{row.name:{width}s} FAILED: {' '.join(str(error).split())[:300]}", flush=True)
            right = False
        torch.cuda.empty_cache()
    return right


def measure(row: Shape, op: Op, work: Work, ceilings: Floors, long: bool, alternatives: bool) -> Timed:
    """The times of a shape: sustained if `long`, with other split counts where `alternatives` are asked for."""

    def call(turn: Call) -> object:
        return operator_call(op, turn)

    replay = Replay(call, work.turns)
    us, steady = burst(replay), replay.sustained() if long else math.nan
    del replay
    others: dict[str, float] = {}
    if alternatives and work.splits is not None:
        for other in sorted({max(1, work.splits // 2), work.splits * 2} - {work.splits}):
            turns = [turn._replace(kwargs={**turn.kwargs, "num_splits": other}) for turn in work.turns]
            others[str(other)] = burst(Replay(call, turns))
    floor, bound = ceilings.of(work.bytes, work.flops)
    splits = "plan" if work.splits is None else str(work.splits)
    rates = work.bytes / us / 1e3, work.flops / us / 1e6
    return Timed(row.name, splits, us, steady, *rates, floor, bound, row.peer_us, row.peer_over_floor, others)


def operator_call(op: Op, turn: Call) -> Any:
    return getattr(torch.ops.mla_suite, op.name)(*turn.args, **turn.kwargs)


def assert_native(op: Op, turn: Call) -> None:
    """AssertionError where dispatch would give the call to anything but our own kernel."""
    first = dispatch.first_tensor(turn.args)
    problem = op.problem(*turn.args, **turn.kwargs)
    choice = dispatch.choose(op.name, op.backends, problem, dispatch.arch_of(first), first.device.type)
    if choice.backend.name != "native":
        raise AssertionError(str(choice))


def assert_right(out: torch.Tensor, lse: torch.Tensor, exact: Exact) -> None:
    """Within what rounding P to 16 bits allows, else AssertionError."""
    error = (out.cpu().double() - exact.out).abs()
    worst = (error / (2.0**-8 * exact.magnitude + ulp(exact.out, out.dtype))).max().item()
    off = (lse.cpu().double() - exact.lse).abs().max().item()
    if not (worst <= 1 and off <= 1e-3):  # a NaN compares false
        raise AssertionError(f"out is {worst:.3g} times as far from fp64 as it may be, lse off by {off:.2g}")


def burst(replay: Replay) -> float:
    return median([replay.round() for _ in range(2)])


def name_width(rows: Iterable[Shape]) -> int:
    return max(len(row.name) for row in rows) + 2


def header(width: int) -> str:
    return f"{'shape':{width}s}splits       us   sustd   GB/s    TF   floor     xfloor  FlashMLA xfloor  ratio"


def shown(timed: Timed, width: int) -> str:
    others = " ".join(f"{splits}:{us:.1f}" for splits, us in timed.others.items())
    return (
        f"{timed.name:{width}s} {timed.splits:>5s} {timed.us:8.2f} {timed.sustained_us:8.2f} {timed.gb_per_s:6.0f} "
        f"{timed.tflops:5.0f} {timed.floor_us:7.1f} {timed.bound[:3]} {timed.us / timed.floor_us:6.2f} "
        f"{timed.peer_us:8.1f} {timed.peer_over_floor:6.2f} {timed.us / timed.peer_us:6.2f}  {others}"
    )
