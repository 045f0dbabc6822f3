"""Launches a decoded program: addresses as views, registers as the hardware presets them, findings as sentences."""

from __future__ import annotations

import ctypes as c
import itertools
import os
import random
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mla_suite import archs
from mla_suite.emulator import core, timing
from mla_suite.emulator.program import Program, decode
from mla_suite.emulator.report import Finding, Report, explain
from mla_suite.launch.driver import LaunchError

_ACCESS = {"r": 1, "w": 2, "rw": 3, "all": 6}
_COMPLETE = 4
SPIN_LIMIT = 4096
INSTRUCTION_LIMIT = 50_000_000
THREADS = min(2, os.cpu_count() or 1)


class Memory(NamedTuple):
    """A range of host memory a kernel may touch. `shape` and `strides` (in elements, none negative) say which bytes of
    it are elements; access is 'r', 'w' (starts uninitialised), 'rw', or 'all' ('w', and every element must be
    written). `shift` is its host address less `address`, for memory that a kernel addresses otherwise than the host.
    `fetched` is what a byte that a workgroup reads of it takes of the chip's memory, in the model of time."""

    name: str
    address: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    access: str
    shift: int = 0
    fetched: float = 1.0

    @classmethod
    def of(cls, name: str, array: Any, access: str, fetched: float = 1.0) -> Memory:
        """The memory of a numpy array or a CPU tensor."""
        if isinstance(array, np.ndarray):
            strides = tuple(step // max(array.itemsize, 1) for step in array.strides)
            return cls(name, array.ctypes.data, array.itemsize, array.shape, strides, access, fetched=fetched)
        shape, strides = tuple(array.shape), tuple(array.stride())
        return cls(name, array.data_ptr(), array.element_size(), shape, strides, access, fetched=fetched)


def _view(memory: Memory) -> core.View | None:
    """The core's description of a memory; None if it has no bytes."""
    if memory.access not in _ACCESS:
        raise LaunchError(f"buffer {memory.name}: access {memory.access!r}; possible are 'r', 'w', 'rw' and 'all'")
    if 0 in memory.shape:
        return None
    pairs = zip(memory.shape, memory.strides, strict=True)
    steps = sorted(((step, size) for size, step in pairs if size > 1 and step != 0), reverse=True)
    if any(step < 0 for step, _ in steps):
        raise LaunchError(f"buffer {memory.name}: negative strides {memory.strides}; pass a tensor without them")
    span = (1 + sum(step * (size - 1) for step, size in steps)) * memory.itemsize
    view = core.View(memory.address, span, memory.shift, _ACCESS[memory.access], 0)
    view.fetched = memory.fetched
    # Dimensions without a gap between them count as one; a memory without gaps owns every byte of its span.
    merged: list[list[int]] = []
    for step, size in [*((step * memory.itemsize, size) for step, size in steps), (1, memory.itemsize)]:
        if merged and merged[-1][0] == step * size:
            merged[-1] = [step, merged[-1][1] * size]
        else:
            merged.append([step, size])
    overlap = any(outer[0] < inner[0] * inner[1] for outer, inner in itertools.pairwise(merged))
    if len(merged) > 1 and not overlap and len(merged) <= core.MAX_DIMENSIONS:
        view.dimensions = len(merged)
        for i, (step, size) in enumerate(merged):
            view.size[i], view.stride[i] = size, step
    elif len(merged) > 1:
        view.access &= ~_COMPLETE  # elements that overlap, or too many dimensions: the span has holes
    return view


class Schedule(NamedTuple):
    """How a launch is run.

    checks       whether the sanitizer looks
    threads      host threads over workgroups; 1 makes the order of global atomics part of the result
    order        of the workgroups: 'forward', 'reverse' (and the waves of each), 'shuffle:<seed>', or a permutation of
                 linear indices
    spin_limit   equal values read in a row, after which a wave spins
    time         whether the report has a modelled time
    """

    checks: bool = True
    threads: int = THREADS
    order: str | Sequence[int] = "forward"
    spin_limit: int = SPIN_LIMIT
    instruction_limit: int = INSTRUCTION_LIMIT
    time: bool = False


class Emulator:
    """A gfx942 or gfx950 compute unit for machine code of any origin.

    >>> machine = Emulator("gfx942")
    >>> program = machine.load_text(text, "vadd")
    >>> report = machine.launch(program, (4, 1, 1), 256, 0, params, [Memory.of("x", x, "r"), Memory.of("y", y, "w")])
    """

    def __init__(self, arch: str) -> None:
        if arch not in core.ARCHS:
            raise ValueError(f"emulator: unknown arch {arch!r}; possible are {', '.join(core.ARCHS)}")
        self.arch = arch

    def load_text(self, text: str, kernel: str) -> Program:
        """The kernel of an assembly text, decoded once. AssemblyError names the first line it cannot execute."""
        return decode(self.arch, text, kernel)

    def launch(
        self,
        program: Program,
        grid: tuple[int, int, int],
        block: int | tuple[int, int, int],
        dynamic_lds: int,
        params: bytes,
        buffers: Sequence[Memory],
        how: Schedule = Schedule(),  # noqa: B008  # a tuple
    ) -> Report:
        """Runs the whole grid and returns its report; findings do not raise here.

        params       the explicit kernel arguments as packed bytes; pointers are host addresses inside `buffers`
        dynamic_lds  bytes beside the static LDS
        """
        size = (block, 1, 1) if isinstance(block, int) else block
        arguments = _kernel_arguments(program, params, grid, size)
        lds = program.kernel.descriptor.get("group_segment_fixed_size", 0)
        lds = ((lds + 15) & ~15) + dynamic_lds if dynamic_lds else lds
        if lds > archs.get(self.arch).lds_bytes:
            raise LaunchError(f"{lds} bytes of LDS; {self.arch} has {archs.get(self.arch).lds_bytes}")
        packet = _dispatch_packet(grid, size)
        own = [Memory.of("kernel arguments", arguments, "r"), Memory.of("dispatch packet", packet, "r")]
        where = (arguments.ctypes.data, packet.ctypes.data)
        return self.execute(program, grid, size, lds, arguments, where, [*buffers, *own], how)

    def execute(
        self,
        program: Program,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        lds_bytes: int,
        arguments: np.ndarray,
        addresses: tuple[int, int],
        memories: Sequence[Memory],
        how: Schedule,
    ) -> Report:
        """Runs a grid whose kernel arguments and dispatch packet lie in `memories`, at the two `addresses` given.

        arguments  the bytes at the first address; lds_bytes: static and dynamic LDS together
        """
        constants = [Memory.of(f"constant {name}", data, "r") for name, data in program.constants.items() if data.size]
        scalars, ids = _preset_scalars(program, arguments, *addresses)
        request = core.LaunchRequest()
        request.mode = _mode(program.kernel.descriptor)
        request.user_scalars, request.ids = len(scalars), ids
        request.scratch_bytes = program.kernel.descriptor.get("private_segment_fixed_size", 0)
        request.user_scalar = scalars.ctypes.data
        request.checks, request.threads = how.checks, how.threads
        request.spin_limit, request.instruction_limit = how.spin_limit, how.instruction_limit
        request.reverse_waves = how.order == "reverse"
        permutation = _order(how.order, grid[0] * grid[1] * grid[2])
        if permutation is not None:
            request.order = permutation.ctypes.data
        buffers = [*memories, *constants]
        workgroups = grid[0] * grid[1] * grid[2]
        if not how.time or not workgroups:
            return run(program, request, grid, block, lds_bytes, buffers)
        arch, registers = archs.get(self.arch), program.kernel.descriptor.get("next_free_vgpr", 1)
        models = timing.models(arch, registers, lds_bytes, block[0] * block[1] * block[2], workgroups)
        played = (core.TimeModel * len(models))(*models)
        times = np.zeros((len(models), workgroups), np.dtype(core.GroupTime))
        request.model, request.models, request.times = c.addressof(played), len(models), times.ctypes.data
        report = run(program, request, grid, block, lds_bytes, buffers)
        return replace(report, modelled=timing.launch(arch, models[0].copies, times), groups=times)


def run(
    program: Program,
    request: core.LaunchRequest,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    lds_bytes: int,
    memories: Sequence[Memory],
) -> Report:
    """Completes the request with views and results, executes it, and reads the results back."""
    threads = block[0] * block[1] * block[2]
    if not 0 < threads <= 1024 or min(grid) < 0:
        raise LaunchError(f"grid {grid} x block {block}; a workgroup has 1 to 1024 threads")
    seen = [(memory, view) for memory in memories if (view := _view(memory)) is not None]
    views = (core.View * max(len(seen), 1))(*(view for _, view in seen))
    findings = (core.RawFinding * program.core.max_findings)()
    counts = np.zeros((max(len(program.lines), 1), 6), np.uint64)
    loaded, stored = np.zeros(len(seen) or 1, np.uint64), np.zeros(len(seen) or 1, np.uint64)
    request.program = program.handle
    request.grid[:], request.block[:], request.lds_bytes = grid, block, lds_bytes
    request.views, request.view = len(seen), c.addressof(views)
    request.finding, request.counts = c.addressof(findings), counts.ctypes.data
    request.loaded, request.stored = loaded.ctypes.data, stored.ctypes.data
    if grid[0] * grid[1] * grid[2]:
        program.core.library.emulator_launch(c.byref(request))
    names = [memory for memory, _ in seen]
    found = tuple(_finding(program, findings[i], names) for i in range(request.findings))
    columns: dict[str, Any] = {
        name: counts[: len(program.lines), i].astype(np.int64) for i, (name, *_) in enumerate(core.PcCounts._fields_)
    }
    moved = [{memory.name: 0 for memory in names} for _ in range(2)]
    for table, amounts in zip(moved, (loaded, stored), strict=True):
        for memory, amount in zip(names, amounts, strict=False):
            table[memory.name] += int(amount)
    return Report(
        kernel=program.kernel.name,
        arch=program.arch,
        findings=found,
        names=program.names,
        classes=program.classes,
        passes=program.passes,
        loaded=moved[0],
        stored=moved[1],
        **columns,
    )


def _finding(program: Program, raw: core.RawFinding, memories: Sequence[Memory]) -> Finding:
    kind = program.core.findings[raw.kind]
    launched = raw.pc < 0  # about the launch as a whole, at no instruction
    line = program.lines[0 if launched else raw.pc]
    address = _locate(raw.address, memories) if kind.startswith(("global", "spin", "bad")) else hex(raw.address)
    return Finding(
        kind=kind,
        kernel=program.kernel.name,
        instruction="" if launched else line.text,
        source="" if launched else line.source,
        workgroup=raw.workgroup,
        wave=raw.wave,
        lanes=raw.lanes,
        address=address,
        count=raw.count,
        explanation=explain(kind, address, raw.detail),
    )


def _locate(address: int, memories: Sequence[Memory]) -> str:
    """`buffer + offset` of the nearest buffer at or below an address."""
    below = [memory for memory in memories if memory.address <= address]
    if not below:
        return hex(address)
    nearest = max(below, key=lambda memory: memory.address)
    return f"{nearest.name} + {address - nearest.address:#x}" if address - nearest.address < 1 << 32 else hex(address)


def _order(order: str | Sequence[int], count: int) -> np.ndarray | None:
    if order == "forward":
        return None
    if order == "reverse":
        indices = list(range(count))[::-1]
    elif isinstance(order, str) and order.startswith("shuffle:"):
        indices = list(range(count))
        random.Random(int(order[8:])).shuffle(indices)
    elif isinstance(order, str) or sorted(order) != list(range(count)):
        raise LaunchError(
            f"order {order!r}; possible are 'forward', 'reverse', 'shuffle:<seed>' or a permutation of {count}"
        )
    else:
        indices = list(order)
    return np.array(indices or [0], np.uint32)


def _mode(descriptor: dict[str, int]) -> int:
    """The MODE register a wave starts with."""
    get = descriptor.get
    if get("float_round_mode_32", 0) or get("float_round_mode_16_64", 0):
        raise LaunchError("the kernel was compiled for another rounding than to nearest even, which is not modelled")
    return (
        get("float_denorm_mode_32", 0) << 4
        | get("float_denorm_mode_16_64", 3) << 6
        | get("dx10_clamp", 1) << 8
        | get("ieee_mode", 1) << 9
        | get("fp16_overflow", 0) << 23
    )


def _kernel_arguments(
    program: Program, params: bytes, grid: tuple[int, int, int], block: tuple[int, int, int]
) -> np.ndarray:
    """Explicit arguments, then the hidden ones the metadata asks for, padded to the segment's size."""
    size = max(program.kernel.descriptor.get("kernarg_size", 0), len(params), 4)
    data = bytearray(params + bytes(-(-size // 64) * 64 - len(params)))
    for kind, offset in program.kernel.hidden.items():
        axis = "xyz".find(kind[-1])
        if kind.startswith("hidden_block_count_"):
            struct.pack_into("<I", data, offset, grid[axis])
        elif kind.startswith("hidden_group_size_"):
            struct.pack_into("<H", data, offset, block[axis])
        elif kind == "hidden_grid_dims":
            struct.pack_into("<H", data, offset, 3)
    return np.frombuffer(bytes(data), np.uint8).copy()


def _dispatch_packet(grid: tuple[int, int, int], block: tuple[int, int, int]) -> np.ndarray:
    """The launch as hsa_kernel_dispatch_packet_t, for kernels that ask for it."""
    work = [g * b for g, b in zip(grid, block, strict=True)]
    return np.frombuffer(struct.pack("<HHHHHHIII", 2, 3, *block, 0, *work).ljust(64, b"\0"), np.uint8).copy()


def _preset_scalars(
    program: Program, arguments: np.ndarray, arguments_address: int, packet_address: int
) -> tuple[np.ndarray, int]:
    """User scalars in the order of the kernel descriptor, and which workgroup ids follow them (bit per axis)."""
    get = program.kernel.descriptor.get
    words: list[int] = []

    def pointer(value: int) -> None:
        words.extend((value & 0xFFFFFFFF, value >> 32))

    for name, width in (
        ("private_segment_buffer", 4),
        ("dispatch_ptr", 2),
        ("queue_ptr", 2),
        ("kernarg_segment_ptr", 2),
        ("dispatch_id", 2),
        ("flat_scratch_init", 2),
        ("private_segment_size", 1),
    ):
        if not get(f"user_sgpr_{name}", 0):
            continue
        if name == "kernarg_segment_ptr":
            pointer(arguments_address)
        elif name == "dispatch_ptr":
            pointer(packet_address)
        else:
            words.extend([0] * width)
    preload, first = get("user_sgpr_kernarg_preload_length", 0), get("user_sgpr_kernarg_preload_offset", 0)
    if preload:
        dwords = np.resize(arguments, -(-arguments.size // 4) * 4).view(np.uint32)
        words.extend([0] * (get("user_sgpr_count", len(words) + preload) - preload - len(words)))
        words.extend(int(dwords[first + i]) if first + i < dwords.size else 0 for i in range(preload))
    words.extend([0] * (get("user_sgpr_count", len(words)) - len(words)))
    ids = sum(get(f"system_sgpr_workgroup_id_{axis}", axis == "x") << i for i, axis in enumerate("xyz"))
    return np.array(words or [0], np.uint32)[: len(words)] if words else np.zeros(0, np.uint32), ids
