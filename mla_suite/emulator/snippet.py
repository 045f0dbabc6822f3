"""Runs a few lines of assembly on one wave with given registers, for tests of single instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mla_suite.emulator import assembly, core
from mla_suite.emulator.machine import INSTRUCTION_LIMIT, SPIN_LIMIT, Memory, run
from mla_suite.emulator.operands import read_operand
from mla_suite.emulator.program import Program
from mla_suite.emulator.report import Finding, Report

DENORMALS = 0xF0
"""MODE with f32, f16 and f64 denormals allowed; 0 flushes them all."""


@dataclass
class State:
    """A wave after a snippet: `v` [512, 64] uint32 (v0.., a0.. from 256), `s` [128], `scc`, `lds` bytes, report."""

    v: np.ndarray
    s: np.ndarray
    scc: bool
    lds: np.ndarray
    report: Report

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.report.findings

    def s64(self, index: int) -> int:
        """Scalars index and index + 1 as one number."""
        return int(self.s[index]) | int(self.s[index + 1]) << 32


def register_index(name: int | str) -> int:
    """3, 'v3' -> 3; 'a3' -> 259; 's3' -> 3; 'vcc', 'exec', 'm0' -> their scalar index."""
    operand = None if isinstance(name, int) else read_operand(name)
    return int(name) if operand is None else operand.first


def _words(value: object, lanes: int) -> np.ndarray:
    """Rows of `lanes` uint32: a 32-bit array is one row; 64-bit elements become a low and a high row."""
    array = np.asarray(value)
    if array.dtype == np.float64 and array.ndim == 0:
        array = array.astype(np.float32)  # a Python float is an f32 register
    if array.dtype.kind in "iu" and array.dtype.itemsize == 8 and array.ndim == 0:
        array = np.asarray(int(array) & 0xFFFFFFFF, np.uint32)
    array = np.ascontiguousarray(np.broadcast_to(array, (lanes,)) if array.ndim == 0 else array)
    if array.dtype.itemsize == 8:
        return np.ascontiguousarray(array.view(np.uint32).reshape(-1, 2).T)
    if array.dtype.itemsize != 4:
        raise ValueError(f"registers hold 32 or 64 bits per lane, not {array.dtype}; pack the values first")
    return array.view(np.uint32).reshape(-1, lanes)


def run_snippet(
    arch: str,
    asm_lines: str | Sequence[str],
    vgpr: Mapping[int | str, object] | None = None,
    sgpr: Mapping[int | str, int] | None = None,
    *,
    exec_mask: int = (1 << 64) - 1,
    scc: bool = False,
    lds: np.ndarray | int = 0,
    scratch: int = 0,
    buffers: Sequence[Memory] = (),
    mode: int = DENORMALS,
    checks: bool = True,
) -> State:
    """Executes `asm_lines` on one wave of 64 lanes and returns its state.

    vgpr    register -> 64 values of 32 bits (or 64 bits for a pair, or rows [n, 64] for consecutive registers), or
            one value for all lanes; a Python float is an f32
    sgpr    register -> integer; more than 32 bits fill the following registers ('s[0:1]' is given as 's0')
    lds     bytes of LDS as uint8, taken as written before, or a size of uninitialised LDS
    scratch bytes of private memory per lane, uninitialised
    buffers memory the snippet may touch (`Memory.of(name, array, access)`); addresses are array.ctypes.data
    mode    the MODE register

    Unnamed registers are zero and count as written. AssemblyError for text that cannot be executed.
    """
    lines = asm_lines.strip("\n").split("\n") if isinstance(asm_lines, str) else list(asm_lines)
    text = "\n".join([*(["s_cmp_eq_u32 0, 0"] if scc else []), *lines, "s_endpgm"])
    program = Program(arch, assembly.parse_body(text, 0, "snippet"))
    vectors = np.zeros((core.VECTORS, core.LANES), np.uint32)
    for name, value in (vgpr or {}).items():
        rows = _words(value, core.LANES)
        first = register_index(name)
        vectors[first : first + len(rows)] = rows
    scalars = np.zeros(core.SCALARS, np.uint32)
    scalars[126:128] = exec_mask & 0xFFFFFFFF, exec_mask >> 32
    for name, number in (sgpr or {}).items():
        first, rest = register_index(name), int(number) if number >= 0 else int(number) & 0xFFFFFFFF
        for word in range(max(1, -(-rest.bit_length() // 32))):
            scalars[first + word] = rest >> 32 * word & 0xFFFFFFFF
    written = np.zeros(0, np.uint8) if isinstance(lds, int) else np.ascontiguousarray(lds).view(np.uint8).ravel()
    lds_bytes = lds if isinstance(lds, int) else written.size
    out_v, out_s = np.zeros_like(vectors), np.zeros(core.SCALARS + 1, np.uint32)
    out_lds = np.zeros(max(lds_bytes, 1), np.uint8)
    request = core.LaunchRequest()
    request.mode, request.checks, request.threads = mode, checks, 1
    request.scratch_bytes = scratch
    request.spin_limit, request.instruction_limit = SPIN_LIMIT, INSTRUCTION_LIMIT
    request.initial_vectors, request.initial_scalars = vectors.ctypes.data, scalars.ctypes.data
    request.final_vectors, request.final_scalars = out_v.ctypes.data, out_s.ctypes.data
    request.final_lds = out_lds.ctypes.data
    if written.size:
        request.initial_lds = written.ctypes.data
    report = run(program, request, (1, 1, 1), (64, 1, 1), lds_bytes, buffers)
    return State(out_v, out_s[:-1], bool(out_s[-1]), out_lds[:lds_bytes], report)
