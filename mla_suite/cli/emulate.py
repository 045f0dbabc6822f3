"""Run an operator's sample on an emulated AMD GPU: its real machine code, executed and checked on this CPU.

  python -m mla_suite emulate                         list operators and their samples
  python -m mla_suite emulate decode                  the first sample of decode, on gfx942
  python -m mla_suite emulate decode NAME --on gfx950
  python -m mla_suite emulate decode --heads 128 --kv 1024    a problem of your own
  python -m mla_suite emulate decode --on gfx950 --heads 128 --kv 1024 --num-splits 1 --kv-format fp8
  python -m mla_suite emulate decode --heads 128 --kv 1024 --time      and what a model of time makes of it
  python -m mla_suite emulate combine --json

Prints the distance to the reference, what the sanitizer found (with source lines), the instruction counts of every
launch and, per resource, the clocks that one compute unit needs at least. A bound is a bound, never a time. With
--time every launch also has a modelled time, its range, and how far the model was from published times held out of its
fit (docs/amd_time_model.md). A modelled time is never a measured one.
The exit status is 1 when a number is wrong, when the sanitizer found something, or when no kernel of that GPU ran, and
2 when there is no such problem.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import mla_suite
from mla_suite import archs, emulator
from mla_suite.archs import ArchSpec
from mla_suite.build import ObjectError
from mla_suite.cli import problem
from mla_suite.core import check_mode, register
from mla_suite.core.explain import explain, explain_on
from mla_suite.core.op import Op, Sample
from mla_suite.emulator import Report, timing
from mla_suite.errors import UsageError
from mla_suite.launch import DriverError, LaunchError

OWN = tuple(name for name in problem.OPTIONS if name != "topk")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="?", help="an operator; without one, operators and samples are listed")
    parser.add_argument("sample", nargs="?", help="a sample's name (default: the operator's first)")
    parser.add_argument("--on", metavar="ARCH", default="gfx942", help="gfx942 or gfx950 (default gfx942)")
    problem.add_arguments(parser, "decode needs --heads and --kv; the others are optional", OWN)
    parser.add_argument("--time", action="store_true", help="model the time of every launch; nothing is measured")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.op is None:
        for op in register.registry().values():
            print(op.name, *(f"\n  {sample.name}" for sample in op.samples()), sep="")
        return 0
    try:
        op = register.get(args.op)
        record = measure(op, _sample(op, args), args.on, time=args.time)
    except ValueError as error:
        raise UsageError(str(error).removeprefix("emulate: ")) from error
    except (LaunchError, DriverError, ObjectError) as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(record, indent=2))
    else:
        _print(record)
    if not record["launches"]:
        print(f"emulate: nothing ran on an emulated {args.on}: {op.name} chose another backend", file=sys.stderr)
    if record["wrong"]:
        print(f"emulate: {record['wrong']}", file=sys.stderr)
    found = any(launch["findings"] for launch in record["launches"])
    return 1 if found or record["wrong"] or not record["launches"] else 0


def _sample(op: Op, args: argparse.Namespace) -> Sample:
    given = problem.given(args)
    if given:
        if "heads" not in given or "kv" not in given or op.name != "decode" or args.sample:
            raise UsageError("a problem of your own is one of decode, without a sample, and has --heads and --kv")
        arch = archs.get(args.on)
        positional, keywords = problem.without_values(op.name, given, arch)
        explain_on(arch, op.name, *positional, **keywords)  # refuses what no tensors need be made for
        return problem.with_values(given, arch)
    samples = {sample.name: sample for sample in op.samples()}
    name = args.sample or next(iter(samples))
    if name not in samples:
        raise UsageError(f"{op.name} has no sample {name!r}; it has {', '.join(samples)}")
    return samples[name]


def measure(op: Op, sample: Sample, arch: str, time: bool = False) -> dict[str, Any]:
    """Run one sample on the reference and in the emulator; -> what is printed."""
    device = torch.device("cpu")
    operator = getattr(torch.ops.mla_suite, op.name)

    def results(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Returns the outputs of the operator, and behind them the arguments that it writes."""
        returned = operator(*args, **kwargs)
        made = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
        return [*made, *(args[position] for position in op.functional.known.mutated)]

    expected = results(*sample.make(device))
    with mla_suite.emulate(arch) as record:
        args, kwargs = sample.make(device)  # a plan, too, is made there
        with emulator.configured(collect=True, time=time) as reports:
            explanation = explain(op.name, *args, **kwargs)
            got = results(args, kwargs)
    keys = int(args[2].sum()) if op.name == "decode" else 0
    count = len(got) - len(op.mutates)
    found = check_mode.compared(op, explanation.config, tuple(got[:count]), op.Args(*args, **kwargs))
    times = [report.modelled for report in reports if report.modelled]
    return {
        "op": op.name,
        "sample": sample.name,
        "arch": arch,
        "explanation": str(explanation),
        "largest_difference": [_difference(a, b) for a, b in zip(expected, got, strict=True)],
        "wrong": _other_bytes(op, expected[count:], got[count:]) or check_mode.first_difference(found) or "",
        "keys": keys,
        "launches": [launch_record(report, record, keys) for report in reports],
        "modelled": str(timing.total(times)) if times else None,
    }


def _other_bytes(op: Op, expected: Sequence[Any], got: Sequence[Any]) -> str:
    """Names arguments that were written and have not the bytes that the reference writes, in a sentence."""
    written = zip(op.mutates, expected, got, strict=True)
    other = [name for name, a, b in written if not torch.equal(a.view(torch.uint8), b.view(torch.uint8))]
    return f"{', '.join(other)} has other bytes than the reference writes" if other else ""


def _difference(expected: Any, got: Any) -> float:
    """Largest absolute difference; 0 where both are the same infinity or NaN."""
    a, b = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (expected, got))
    same = (a == b) | ((a != a) & (b != b))
    return float(torch.where(same, 0.0, (a.double() - b.double()).abs()).max()) if a.numel() else 0.0


def launch_record(report: Report, arch: ArchSpec, keys: int) -> dict[str, Any]:
    """One launch as plain values; per key too where `keys` says how many keys it read."""
    bound = report.bound(arch)
    clocks = {"memory": bound.memory, "matrix": bound.matrix, "vector ALU": bound.valu, "LDS": bound.lds_128}
    if arch.lds_peak_bytes_per_clock > arch.lds_bytes_per_clock:  # what is reported of it, beside what is relied on
        clocks[f"LDS at {arch.lds_peak_bytes_per_clock} B/clk"] = bound.lds_256
    return {
        "kernel": report.kernel,
        "findings": [str(finding) for finding in report.findings],
        "instructions": report.instructions(),
        "by_class": dict(report.by_class()),
        "bytes_loaded": dict(report.loaded),
        "bytes_stored": dict(report.stored),
        "bound_clocks": clocks,
        "bound": bound.limiter,
        "modelled": report.modelled.as_dict() if report.modelled else None,
        "per_key": {"instructions": report.instructions() / keys, **{k: v / keys for k, v in clocks.items()}}
        if keys
        else {},
    }


_RESOURCES = {"memory": "memory", "matrix": "matrix", "valu": "vector ALU", "lds": "LDS"}


def _print(record: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(f"{record['op']} {record['sample']}\n{record['explanation']}"))
    differences = ", ".join(f"{d:.3g}" for d in record["largest_difference"])
    console.print(f"largest difference from the reference, per output: {differences}")
    for launch in record["launches"]:
        console.print(f"\n{launch['kernel']} on an emulated {record['arch']}")
        table = Table("class", "wave instructions")
        for name, count in sorted(launch["by_class"].items(), key=lambda item: -item[1]):
            if count:
                table.add_row(name, f"{count:,}")
        table.add_row("all", f"{launch['instructions']:,}")
        console.print(table)
        console.print("clocks that one compute unit would need at least for all of it (bounds, never times)")
        clocks = Table("resource", "clocks", *(["per key"] if launch["per_key"] else []))
        for name, value in launch["bound_clocks"].items():
            mark = " <- bound" if name == _RESOURCES[launch["bound"]] else ""
            per_key = [f"{launch['per_key'][name]:.1f}"] if launch["per_key"] else []
            clocks.add_row(name + mark, f"{value:,.0f}", *per_key)
        console.print(clocks)
        if launch["modelled"]:
            console.print(launch["modelled"]["sentence"])
        for finding in launch["findings"]:
            console.print(Text(finding, "red"))  # an instruction's brackets are no markup
        console.print("sanitizer: no findings" if not launch["findings"] else "sanitizer: see above")
    if record["modelled"] and len(record["launches"]) > 1:
        console.print(f"\nall {len(record['launches'])} launches: {record['modelled']}")
