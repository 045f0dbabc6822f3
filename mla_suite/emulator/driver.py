"""The emulator as a driver: the manifest's assembly text, executed at once on CPU tensors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar
from typing import NamedTuple

from mla_suite.archs import ArchSpec
from mla_suite.build.manifest import KernelEntry
from mla_suite.emulator import timing
from mla_suite.emulator.assembly import AssemblyError
from mla_suite.emulator.machine import Emulator, Memory, Schedule
from mla_suite.emulator.report import Report, SanitizerError
from mla_suite.launch.driver import Buffer, Grid, Kernel, KernelCache, LaunchError, Start, check_hip_grid

_log = logging.getLogger("mla_suite.emulator")

KEYS = ("kv_cache", "cache_0", "cache_1", "cache_2", "cache_3")
"""Buffers of which workgroups along y read the same, each for query rows of its own."""


class Options(NamedTuple):
    """How launches in this context are run; with a list, their reports go there and findings do not raise."""

    schedule: Schedule = Schedule()
    reports: list[Report] | None = None


options: ContextVar[Options] = ContextVar("mla_suite_emulator_options", default=Options())  # noqa: B039  # never mutated
"""Set by `with emulator.configured(...)`."""


class EmulatorDriver:
    """Runs an AMD arch's kernels on CPU tensors. A kernel that breaks a rule raises SanitizerError after the launch."""

    name = "emulator"
    checks_buffers = True

    def __init__(self, arch: ArchSpec) -> None:
        self.arch = arch
        self._machine = Emulator(arch.name)
        self._kernels = KernelCache(self._load)

    def load(self, entry: KernelEntry) -> Kernel:
        """Decodes the kernel's text; LaunchError names the first line that cannot be executed."""
        return self._kernels.get(entry)

    def _load(self, entry: KernelEntry) -> Kernel:
        try:
            program = self._machine.load_text(entry.read_text(), entry.symbol)
        except AssemblyError as error:
            raise LaunchError(str(error)) from error
        return Kernel(entry, program, self.arch)

    def bind(self, kernel: Kernel, grid: Grid, block: int, dynamic_lds: int, overlap: bool = False) -> Start:
        """`overlap` has no effect, because a launch runs to its end.

        A launch raises LaunchError when it does not fit the kernel or has no buffers declared, and SanitizerError (a
        LaunchError) with every finding.
        """

        def start(params: bytes, buffers: Sequence[Buffer]) -> None:
            kernel.check(block, dynamic_lds, params)
            check_hip_grid(grid, block)
            if not buffers:
                raise LaunchError("the emulator needs the buffers that a kernel may touch")
            for name, tensor, _ in buffers:
                if tensor.device.type != "cpu":
                    raise LaunchError(f"buffer {name} is on {tensor.device}; the emulator runs on CPU tensors")
            how = options.get()
            shared = timing.fetched(grid[1])
            memories = [Memory.of(*buffer, shared if buffer.name in KEYS else 1.0) for buffer in buffers]
            report = self._machine.launch(kernel.handle, grid, block, dynamic_lds, params, memories, how.schedule)
            _log.debug("%s: %d wave instructions", kernel.entry.id, report.instructions())
            if how.reports is not None:
                how.reports.append(report)
            elif report.findings:
                raise SanitizerError(report)

        return start
