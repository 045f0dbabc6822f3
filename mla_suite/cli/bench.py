"""Measure the operators' backends on named shapes, each checked first; a line for each as it comes.

  python -m mla_suite bench                                    this machine's usual set
  python -m mla_suite bench --list                             the sets of shapes
  python -m mla_suite bench --set flashmla --csv new.csv       keep the numbers, also of a run that Ctrl-C ends
  python -m mla_suite bench --set v4 --shapes b1- --sustained 0
  python -m mla_suite bench --on gfx942                        modelled times of an emulated AMD GPU, nothing measured

On a GPU it measures the device time of a call by CUDA graph replay with cold caches, after a rest (`us`) and at the end
of 0.7 s without one (`sustd`); the host time of an eager call; and the ceilings of the card in the same
run, so that a time can be read beside its floor. Without a GPU it measures the reference on the CPU. With --on the
kernels of an AMD arch run in the emulator, and each line has what a model makes of the time, its class, and how far
that model was from published times (docs/amd_time_model.md). The exit status is 1 when a result is wrong or nothing
was timed.

pytest-benchmark stores and compares runs of the same shapes: `pytest benchmarks --set flashmla`, in a clone.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

import mla_suite
from mla_suite.bench import environment, floors, saving, sets
from mla_suite.bench.floors import Floors
from mla_suite.bench.measure import Measured, measure
from mla_suite.bench.sets import Case
from mla_suite.bench.timer import Effort
from mla_suite.cli import bar, positive
from mla_suite.cli.problem import torch_device
from mla_suite.errors import UsageError, usage

HEADER = f"{'us':>8} {'+-%':>5} {'sustd':>8} {'host':>7} {'GB/s':>7} {'TFLOP/s':>8} {'floor':>8} {'x':>5} error"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sets_of = "shapes to measure, repeatable (default: flashmla on a GPU, else quick)"
    parser.add_argument("--set", action="append", metavar="NAME", help=sets_of)
    parser.add_argument("--list", action="store_true", help="list the sets and stop")
    parser.add_argument("--op", help="only this operator's shapes")
    parser.add_argument("--shapes", nargs="+", metavar="PART", help="only shapes whose names contain one of these")
    parser.add_argument(
        "--backend", action="append", choices=("native", "triton", "reference"), help="only this one; repeatable"
    )
    parser.add_argument("--plan", choices=("with", "without", "both"), help="decode with a plan, without, or both")
    parser.add_argument("--device", type=torch_device, help="torch device (default: the first GPU, else the CPU)")
    parser.add_argument("--on", metavar="ARCH", help="emulate gfx942 or gfx950 and model its times; measures nothing")
    parser.add_argument("--rounds", type=positive, default=6, help="rounds of a shape (default 6)")
    parser.add_argument("--warmup", type=positive, default=0, metavar="N", help="calls before each round, at least")
    parser.add_argument("--iters", type=positive, default=0, metavar="N", help="calls timed in each round, at least")
    parser.add_argument(
        "--sustained", type=float, default=0.7, metavar="S", help="seconds without a pause, on a GPU; 0: burst only"
    )
    parser.add_argument("--no-floors", action="store_true", help="leave out the ceilings of the GPU, which take 20 s")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="write the rows to this file as they come")


def run(args: argparse.Namespace) -> int:
    if args.list:
        for name, entry in sets.SETS.items():
            print(f"{name}: {len(entry.cases())} shapes. {entry.source}")
        return 0
    if not 0 <= args.sustained <= 60:
        raise UsageError(f"--sustained {args.sustained}: it takes 0 to 60 seconds")
    if args.on and (args.device or torch.device("cpu")).type == "cuda":
        raise UsageError(f"--on {args.on} emulates a GPU on the CPU: leave out --device")
    device: torch.device = (
        torch.device("cpu") if args.on else args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )
    on_gpu = device.type == "cuda"
    if on_gpu and device.index is not None:
        torch.cuda.set_device(device)  # streams and graphs are those of the current device
    cases = _cases(args, args.set or ["flashmla" if on_gpu else "quick"])
    facts = environment.describe(device) | ({"emulated": args.on} if args.on else {})
    ceilings: Floors | None = None
    rows = saving.Table(args.csv, facts)
    print(", ".join(f"{name} {value}" for name, value in facts.items() if value != ""), flush=True)
    stack = ExitStack()
    if args.on:
        with usage():
            stack.enter_context(mla_suite.emulate(args.on))
        print(f"Modelled times of an emulated {args.on}: nothing is measured.")
    elif not on_gpu:
        print("No GPU: these are times of the reference on the CPU.")
    with stack, bar("ceilings of this card" if on_gpu else "", len(cases)) as update:
        if on_gpu and not args.no_floors:
            ceilings = floors.measure(device)
            print(f"ceilings of this run: {ceilings}")
        width = max(len(case.id) for case in cases) + 11
        if not args.on:
            print(f"{'shape, backend':{width}} {HEADER}", flush=True)
        if ceilings is not None:
            rows.about["ceilings"] = str(ceilings)
        wrong, timed, refused = 0, 0, dict[str, list[str]]()
        effort = Effort(args.rounds, sustained_s=args.sustained, warmup=args.warmup, iters=args.iters)
        for case in cases:
            update(description=case.id[:60])
            for found in measure(case, device, effort, backends=args.backend or (), floors=ceilings):
                rows.add(found.facts())
                wrong += found.wrong
                if found.failure and not found.wrong:
                    refused.setdefault(f"{found.backend}: {found.failure}", []).append(case.id)
                else:
                    timed += not found.wrong
                    print(f"{case.id + ' ' + found.backend:{width}} {_shown(found)}", flush=True)
            update(advance=1)
    for why, shapes in refused.items():
        more = f" and {len(shapes) - 1} more" if len(shapes) > 1 else ""
        print(f"not timed, {shapes[0]}{more}: {why}")
    if wrong:
        print(f"bench: {wrong} results are wrong, see above", file=sys.stderr)
    elif not timed:
        print("bench: nothing was timed, see above", file=sys.stderr)
    return 1 if wrong or not timed else 0


def _cases(args: argparse.Namespace, names: list[str]) -> list[Case]:
    found: dict[str, Case] = {}
    for name in names:
        for case in sets.named(name, args.op):
            plans = {"with": (True,), "without": (False,), "both": (True, False), None: (case.planned,)}[args.plan]
            for planned in plans if case.op == "decode" else (False,):
                chosen = replace(case, planned=planned)
                found.setdefault(chosen.id, chosen)
    return sets.matching(found, args.shapes)


def _shown(found: Measured) -> str:
    if found.failure:
        return f"WRONG: {found.failure}"
    if found.modelled:
        return f"{found.modelled}; error {found.error:.0e}"
    facts = found.facts()

    def number(name: str, width: int, digits: int) -> str:
        value = facts[name]
        return f"{value:{width}.{digits}f}" if value else " " * width

    columns = (("us", 8, 2), ("spread_percent", 5, 1), ("sustained_us", 8, 2), ("host_us", 7, 1), ("gb_per_s", 7, 0),
               ("tflops", 8, 2), ("floor_us", 8, 2), ("over_floor", 5, 2))  # fmt: skip
    return " ".join([*(number(*column) for column in columns), f"{found.error:.0e}"])
