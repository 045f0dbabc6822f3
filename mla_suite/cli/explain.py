"""Say which backend would run an operator's samples here, and why the preferred ones would not.

  python -m mla_suite explain                       every operator, its first sample
  python -m mla_suite explain decode                every sample of decode
  python -m mla_suite explain decode --on gfx942    as if that AMD GPU were here (its kernels run in the emulator)

For a call of your own use `print(mla_suite.explain("decode", q, kv_cache, ...))`, or set MLA_SUITE_LOG=dispatch.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

from mla_suite.cli import torch_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="?", help="an operator: plan, decode, sparse_decode, combine or append_kv")
    parser.add_argument("--on", metavar="ARCH", help="an AMD arch to emulate: gfx942 or gfx950")
    parser.add_argument(
        "--device", type=torch_device, help="torch device of the tensors (default: cuda where torch has one, else cpu)"
    )


def run(args: argparse.Namespace) -> int:
    import torch

    import mla_suite
    from mla_suite.core import register
    from mla_suite.launch import emulate

    device = args.device or torch.device("cuda" if torch.cuda.is_available() and not args.on else "cpu")
    ops = [register.get(args.op)] if args.op else list(register.registry().values())
    with emulate(args.on) if args.on else nullcontext():
        for op in ops:
            for sample in op.samples() if args.op else list(op.samples())[:1]:
                positional, keywords = sample.make(device)
                print(f"{sample.name}\n{mla_suite.explain(op.name, *positional, **keywords)}\n")
    return 0
