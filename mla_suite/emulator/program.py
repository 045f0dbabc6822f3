"""Assembly text -> a program the core executes, decoded once per kernel and process."""

from __future__ import annotations

import ctypes as c
import functools
import hashlib
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mla_suite.emulator import assembly, core, operands
from mla_suite.emulator.assembly import AssemblyError, KernelText, Line


class Program:
    """A decoded kernel: `names`, `lines` and `classes` per instruction, and `passes` of the matrix unit."""

    def __init__(self, arch: str, kernel: KernelText) -> None:
        self.core = core.load()
        self.arch = arch
        self.kernel = kernel
        self.lines: Sequence[Line] = kernel.lines
        if not kernel.lines:
            raise AssemblyError(f"{kernel.name} has no instructions")
        self.constants = {name: np.frombuffer(data, np.uint8).copy() for name, data in kernel.constants.items()}
        # s_getpc gives 0 in the core, so a relative address is the host address of the constant itself.
        symbols = {name: array.ctypes.data for name, array in self.constants.items()}
        symbols.update(_lds_symbols(kernel))
        decoded = [self._decoded(line, symbols) for line in kernel.lines]
        self.names = [item.name for item in decoded]
        self.classes = [item.group for item in decoded]
        records = np.frombuffer(b"".join([item.record for item in decoded]), np.int64)
        bad, reason = c.c_int(), c.c_char_p()
        self.handle = self.core.library.emulator_program(
            records.ctypes.data, len(decoded), core.ARCHS[arch], c.byref(bad), c.byref(reason)
        )
        if not self.handle:
            raise self._error(kernel.lines[bad.value], (reason.value or b"").decode())
        self.passes = [
            self.core.library.emulator_passes(self.handle, pc) if group == "matrix" else 0
            for pc, group in enumerate(self.classes)
        ]

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.core.library.emulator_program_free(self.handle)

    def _error(self, line: Line, reason: str) -> AssemblyError:
        source = f" ({line.source})" if line.source else ""
        return AssemblyError(f"{self.kernel.name}, line {line.number}{source}: `{line.text}`: {reason} ({self.arch})")

    def _decoded(self, line: Line, symbols: dict[str, int]) -> Decoded:
        try:
            if "@" in line.text or line.text.startswith(("s_branch", "s_cbranch")):
                found = _decode(line.text, self.kernel.labels, symbols)
            else:
                found = _decode_alone(line.text)
        except AssemblyError as error:
            raise AssemblyError(f"{self.kernel.name}, line {line.number}: {error}") from None
        if found is None:
            name = operands.parse_instruction(line.text, self.kernel.labels, symbols).name
            raise self._error(line, f"the emulator does not know the instruction {name}")
        return found


class Decoded(NamedTuple):
    """An instruction as the core takes it: `record` has the bytes of `Record` in csrc/emulator/program.hpp."""

    name: str
    group: str
    record: bytes


def _decode(text: str, labels: dict[str, int], symbols: dict[str, int]) -> Decoded | None:
    """None for an instruction that the core does not know."""
    item = operands.parse_instruction(text, labels, symbols)
    machine = core.load()
    code = machine.library.emulator_opcode(item.name.encode())
    if code < 0:
        return None
    words = [0] * machine.record_words
    words[0] = code | len(item.operands) << 32
    for i, operand in enumerate(item.operands):
        at = 1 + 4 * i  # four words of an `Operand`; the library derives the third from the last
        words[at] = operand.kind | operand.first << 32
        words[at + 1] = operand.registers | operand.flags << 32
        words[at + 3] = operand.value - (1 << 64) if operand.value >> 63 else operand.value
    for name, value in item.modifiers.items():
        words[1 + 4 * core.MAX_OPERANDS + machine.modifiers.index(name)] = value
    group = core.CLASSES[machine.library.emulator_opcode_class(code)]
    return Decoded(item.name, group, struct.pack(f"<{len(words)}q", *words))


# A kernel from which one line is deleted, as tests do, has its other lines again, and kernels share lines: of 960,000
# in this repository's 200,000 differ. Those that are kept take 45 MB.
@functools.lru_cache(maxsize=1 << 16)
def _decode_alone(text: str) -> Decoded | None:
    """An instruction that names neither a label nor a symbol."""
    return _decode(text, {}, {})


def _lds_symbols(kernel: KernelText) -> dict[str, int]:
    """Dynamic LDS begins after the static part; static variables have become numbers before this text was written."""
    static = kernel.descriptor.get("group_segment_fixed_size", 0)
    names: set[str] = set()
    for line in kernel.lines:
        if "@abs32@lo" in line.text:
            names.update(part.partition("@")[0] for part in line.text.split() if "@abs32@lo" in part)
    return dict.fromkeys(names, (static + 15) & ~15)


_cache: dict[tuple[str, str, bytes], Program] = {}
_lock = threading.Lock()


def decode(arch: str, text: str, kernel: str) -> Program:
    """The program of one kernel of an assembly text, from the cache if it was decoded before.

    AssemblyError: no such kernel, or the first line that cannot be executed, before anything runs.
    """
    if arch not in core.ARCHS:
        raise AssemblyError(f"the emulator executes {' and '.join(core.ARCHS)}, not {arch}")
    written_for = assembly.target(text)
    if written_for is not None and written_for != arch:
        raise AssemblyError(f"this assembly is for {written_for}, the emulator was asked for {arch}")
    key = (arch, kernel, hashlib.sha256(text.encode()).digest())
    with _lock:
        program = _cache.get(key)
        if program is None:
            program = _cache[key] = Program(arch, assembly.parse_kernel(text, kernel))
        return program
