"""Run a call again that check mode saved, and compare it with the reference once more.

  MLA_SUITE_CHECK=100 python serve.py                 a wrong result is reported with the name of a file
  python -m mla_suite replay FILE                     run it again, on the GPU that is here or the emulated one it had
  python -m mla_suite replay FILE --emulate gfx942    as that GPU's machine code, executed and checked on this CPU
  python -m mla_suite replay FILE --backend triton    by another implementation: is it the kernel or its arguments?

Prints the report that was saved, which backend runs the call here, and the first value that is further from the exact
result than the stated bounds allow. The file holds queries and latents of the call, so treat it like the requests that
they came from. Pages of a cache that the call did not read are not in it, and are zero here.
The exit status is 0 when the result is right here, 1 when it is wrong or the kernel cannot be launched, and 2 when
nothing ran: the file is no saved call, its caches do not fit the GPU's memory, or only the reference takes it here.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

import mla_suite
from mla_suite.core import check_mode, dispatch, register, saved_call
from mla_suite.core.saved_call import Saved
from mla_suite.errors import UsageError, usage
from mla_suite.launch import DriverError, LaunchError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the file that a report of check mode names")
    parser.add_argument(
        "--backend",
        choices=("native", "triton", "reference"),
        help="run this one (default: what dispatch chooses here)",
    )
    parser.add_argument(
        "--emulate",
        metavar="ARCH",
        help="run the machine code of gfx942 or gfx950 on this CPU (default: the arch that was emulated, if one was)",
    )


def run(args: argparse.Namespace) -> int:
    try:
        saved = saved_call.load(args.file)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    print(f"saved: {saved.sentence}")
    arch = args.emulate or saved.emulated
    with usage():
        emulated = nullcontext() if arch is None else mla_suite.emulate(arch)
        with emulated:
            return _replay(saved, args.backend, on_cpu=arch is not None)


def _replay(saved: Saved, backend: str | None, *, on_cpu: bool) -> int:
    op = register.get(saved.op)
    device = torch.device("cuda" if saved.device == "cuda" and not on_cpu and torch.cuda.is_available() else "cpu")
    try:
        tensors = tuple(saved_call.tensor(one, device) for one in saved.tensors)
        outputs = tuple(saved_call.tensor(one, device) for one in saved.outputs)
    except (OSError, torch.OutOfMemoryError) as error:
        where = "this machine" if device.type == "cpu" else "the GPU; --emulate ARCH takes none of it"
        raise UsageError(f"the call's tensors do not fit the memory of {where}: {error}") from error
    for output in outputs:  # so that what a kernel leaves out is seen
        output.fill_(torch.nan if output.is_floating_point() else -1)
    call = check_mode.Call(op, outputs, tensors, saved.options)
    usable = [each for each in op.backends if backend in (None, each.name)]
    seen = op.seen(call.record)  # as the call was: with its exact bounds it may have other splits
    try:
        choice = dispatch.ask(op.name, usable, op.describe(seen), dispatch.arch_of(tensors[0]), device.type)
    except RuntimeError as error:
        raise UsageError(
            f"{error}; `--emulate ARCH` or a GPU runs its kernels, and `--backend` names another"
        ) from error
    if backend is None and choice.backend.name == "reference":
        raise UsageError(
            f"only the reference takes this call here ({choice}); add --emulate ARCH, or --backend reference"
        )
    print(f"here: {op.name} runs as {check_mode.served_by(call, choice)}", flush=True)
    try:
        choice.backend.prepare(choice.supported.config, outputs, seen)(outputs, tensors)
    except (LaunchError, DriverError) as error:
        print(error, file=sys.stderr)
        return 1
    found = check_mode.difference(call, choice.supported.config)
    print(f"wrong: {found}" if found else "right: every value is within the stated bounds of the exact result")
    return 1 if found else 0
