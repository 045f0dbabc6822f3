"""`python -m mla_suite <command>`, one file per command.

A command module has `add_arguments(parser)` and `run(args) -> int`, and its docstring is its `--help`. What it raises
as a ValueError is a sentence about its arguments: it is printed, and the exit status is 2; after Ctrl-C it is 130.
`torch_device`, `positive` and `sizes` are types of arguments that several commands take; each refuses in a sentence.
Modules are imported only when their command is asked for, so `build` works where torch is not installed.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

INTERRUPTED = 130

COMMANDS = {
    "demo": "decode a small DeepSeek-style model through torch.compile and compare it with the eager reference",
    "build": "compile the kernels for AMD and NVIDIA GPUs; needs no GPU",
    "kernels": "show what was built: registers, LDS, spills, occupancy, instruction counts",
    "hazards": "check AMD machine code for missing wait states: what was built, or any disassembly",
    "formats": "print the byte map of every KV cache format",
    "bench": "measure the operators on named shapes, compare runs, write a page of plots",
    "emulate": "run an operator on an emulated AMD GPU: numbers, sanitizer findings, counters and bounds",
    "tune": "search configurations on this GPU and store the best with their provenance",
    "explain": "say which backend would run a problem, and why",
    "support": "print which implementation serves each operator on each arch",
}


def torch_device(text: str) -> torch.device:
    import torch

    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ArgumentTypeError(f"{text!r} is no torch device; cpu, cuda and cuda:1 are some") from error
    there = torch.cuda.device_count()
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= there):
        raise ArgumentTypeError(f"{text!r} is not here; this machine has cpu and {there} GPUs that torch can use")
    return device


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}; it is a number, 1 at least")
    return int(text)


def sizes(text: str) -> tuple[int, ...]:
    """Numbers between commas."""
    return tuple(positive(part.strip()) for part in text.split(","))
