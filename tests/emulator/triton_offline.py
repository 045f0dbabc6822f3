"""Triton's kernels for an AMD GPU on a machine without one: compiled by Triton, executed by the emulator.

`launches(arch)` takes the place of Triton's launcher: inside the block a `kernel[grid](...)` on CPU tensors is compiled
for the arch as a launch on a GPU would be, specialisations included, and its machine code is run.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from mla_suite.emulator import Emulator, Finding, Memory, Report

FORMATS = {"i1": "B", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"}


class Launch(NamedTuple):
    """One launch: the kernel's name, its code for the arch, and what the emulator counted."""

    name: str
    compiled: CompiledKernel
    report: Report


@contextmanager
def launches(arch: str, read_only: Sequence[torch.Tensor] = ()) -> Iterator[list[Launch]]:
    """Triton launches inside the block are compiled for `arch` and executed; yields the list they are added to."""
    done: list[Launch] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled, arguments = compile_for(self, arch, args, kwargs)
        done.append(Launch(self.__name__, compiled, emulate(arch, compiled, grid, arguments, read_only)))

    with patch.object(JITFunction, "run", run):
        yield done


def compile_for(
    kernel: JITFunction, arch: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[CompiledKernel, list[tuple[str, Any]]]:
    """The kernel compiled for a call's arguments, and (type, value) of those it takes at run time."""
    target = GPUTarget("hip", arch, 64)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {"debug": False, **kwargs}
    bound, specialization, options = binder(*args, **given)
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, options)
    source = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as source
    compiled = triton.compile(source(kernel, signature, constants, attributes), target=target, options=vars(options))
    return compiled, flat(signature.values(), bound.values())


def flat(kinds: Any, values: Any) -> list[tuple[str, Any]]:
    """(type, value) of each run-time argument, members of tuples included, constants left out."""
    found: list[tuple[str, Any]] = []
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            found += flat(kind, value)
        elif kind != "constexpr":
            found.append((kind, value))
    return found


def emulate(
    arch: str, compiled: CompiledKernel, grid: Any, arguments: list[tuple[str, Any]], read_only: Sequence[torch.Tensor]
) -> Report:
    """Runs a compiled kernel on CPU tensors, writing into them; AssertionError with the findings, if there are any."""
    text = compiled.asm["amdgcn"]
    offsets = [int(at) for at in re.findall(r"^\s+(?:- )?\.offset:\s+(\d+)", text, re.M)]
    params = bytearray(max(offsets) + 8)
    buffers = []
    for offset, (kind, value) in zip(offsets, arguments, strict=False):  # Triton's own scratch pointers follow, null
        if isinstance(value, torch.Tensor):
            struct.pack_into("<Q", params, offset, value.data_ptr())
            access = "r" if any(value is each for each in read_only) else "rw"
            buffers.append(Memory.of(f"argument at {offset}", value, access))
        else:
            struct.pack_into("<" + FORMATS[kind], params, offset, value)
    machine = Emulator(arch)
    program = machine.load_text(text, compiled.metadata.name)
    threads = compiled.metadata.num_warps * 64
    blocks = (*grid, 1, 1)[:3]
    report = machine.launch(program, blocks, threads, compiled.metadata.shared, bytes(params), buffers)
    findings = [str(finding) for finding in report.findings if not replicated(finding)]
    assert not findings, "\n".join(findings)
    return report


def replicated(finding: Finding) -> bool:
    """Where several waves hold a value, Triton lets each of them write it to the same LDS bytes."""
    return finding.kind == "lds_race" and finding.instruction.startswith("ds_write")
