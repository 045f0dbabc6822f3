"""Say which backend would run a problem, and why the preferred ones would not.

  python -m mla_suite explain                       every operator, its first sample
  python -m mla_suite explain decode                every sample of decode
  python -m mla_suite explain decode --on gfx942    as if that GPU were here; no GPU is needed for it
  python -m mla_suite explain decode --on sm_90 --batch 32 --heads 128 --kv 4096 --kv-format fp8 --plan
  python -m mla_suite explain sparse_decode --on gfx950 --heads 16 --topk 2048 --kv-format dsv4
  python -m mla_suite explain decode --on sm_90 --batch 32 --heads 128 --kv 4096 --launches
  python -m mla_suite explain decode --on gfx942 --heads 128 --kv 1024 --time     and a modelled time, never measured

For a call of your own use `print(mla_suite.explain("decode", q, kv_cache, ...))`, or set MLA_SUITE_LOG=dispatch.
"""

from __future__ import annotations

import argparse

import torch

import mla_suite
from mla_suite import archs, emulator
from mla_suite.archs import ArchSpec
from mla_suite.cli import problem
from mla_suite.core import register
from mla_suite.core.explain import Explanation, explain_on
from mla_suite.core.op import Op, Sample
from mla_suite.errors import UsageError, usage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "op", nargs="?", help="an operator: plan, decode, sparse_decode, combine, append_kv or convert_kv"
    )
    parser.add_argument("--on", metavar="ARCH", help="an arch: gfx942, gfx950 or sm_90")
    device = "torch device of the tensors (default: cuda where torch has one, else cpu)"
    parser.add_argument("--device", type=problem.torch_device, help=device)
    parser.add_argument(
        "--launches",
        action="store_true",
        help="print every launch of a native kernel: grid, and each parameter with the comment of its header",
    )
    parser.add_argument(
        "--time", action="store_true", help="run it in the emulator of an AMD arch, and print a modelled time"
    )
    about = "decode needs --heads and --kv, sparse_decode --heads and --topk; the others are optional"
    problem.add_arguments(parser, about, tuple(problem.OPTIONS))


def run(args: argparse.Namespace) -> int:
    arch = archs.get(args.on) if args.on else None
    options = problem.given(args)
    if args.time and arch is None:
        raise UsageError("--time models samples, and problems of decode, on an AMD arch: add --on gfx942 for example")
    if args.time and options and args.op != "decode":
        raise UsageError(
            f"--time models problems of decode alone; leave out --time, or --{next(iter(options))} and the like"
        )
    if options:
        if arch is None:
            raise UsageError("a problem of your own is explained for an arch: add --on ARCH, sm_90 for example")
        if args.op is None:
            raise UsageError("a problem of your own needs an operator: decode or sparse_decode")
        with usage():
            positional, keywords = problem.without_values(register.get(args.op).name, options, arch)
            _show(explain_on(arch, args.op, *positional, **keywords), args.launches)
            if args.time:
                print(_modelled(register.get(args.op), problem.with_values(options, arch), arch))
        return 0
    device = args.device or torch.device("cuda" if torch.cuda.is_available() and arch is None else "cpu")
    for record in [register.get(args.op)] if args.op else list(register.registry().values()):
        for sample in record.samples() if args.op else list(record.samples())[:1]:
            positional, keywords = sample.make(device)
            if arch is None:
                answer = mla_suite.explain(record.name, *positional, **keywords)
            else:
                answer = explain_on(arch, record.name, *positional, **keywords)
            print(f"sample {sample.name}")
            _show(answer, args.launches)
            if args.time and arch is not None:
                print(_modelled(record, sample, arch))
            print()
    return 0


def _show(answer: Explanation, launches: bool) -> None:
    print(answer)
    if launches and answer.spec is None:
        print(f"  no launches to show: {answer.backend} serves it, and --launches shows those of native kernels")
    elif launches:
        op = register.get(answer.op)
        print("\n".join(answer.spec.lines(op.Args.__match_args__, op.outputs)))


def _modelled(op: Op, sample: Sample, arch: ArchSpec) -> str:
    """What the model of time makes of a sample on an emulated arch, with its class and the error of that."""
    with usage(), mla_suite.emulate(arch.name):
        args, kwargs = sample.make(torch.device("cpu"))
        _, time = emulator.modelled(lambda: getattr(torch.ops.mla_suite, op.name)(*args, **kwargs))
    return f"  {time or 'no time is modelled: no kernel of this arch runs it'}"
