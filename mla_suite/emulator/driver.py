"""The emulator as a driver: the manifest's assembly text, executed at once on CPU tensors."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from functools import partial
from typing import Any

from mla_suite.archs import ArchSpec
from mla_suite.build.manifest import KernelEntry
from mla_suite.emulator.assembly import AssemblyError
from mla_suite.emulator.machine import THREADS, Emulator, Memory
from mla_suite.emulator.report import Report, SanitizerError
from mla_suite.launch.driver import Buffers, Grid, Kernel, KernelCache, LaunchError, Naming, Start, check_hip_grid

_log = logging.getLogger("mla_suite.emulator")


class Options:
    """The options of launches in this context, and the place for their reports.

    checks, threads, order: as in Emulator.launch. reports: filled with each launch's Report when a list is given;
    findings then stay in the reports and do not raise.
    """

    def __init__(
        self,
        *,
        checks: bool = True,
        threads: int = THREADS,
        order: str = "forward",
        reports: list[Report] | None = None,
    ) -> None:
        self.checks, self.threads, self.order, self.reports = checks, threads, order, reports


options: ContextVar[Options] = ContextVar("mla_suite_emulator_options", default=Options())  # noqa: B039  # never mutated
"""Set by `with emulator.configured(...)`."""


class EmulatorDriver:
    """Runs an AMD arch's kernels on CPU tensors. A kernel that breaks a rule raises SanitizerError after the launch."""

    name = "emulator"

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

    def bind(
        self, kernel: Kernel, grid: Grid, block: int, dynamic_lds: int, naming: Naming | None, overlap: bool = False
    ) -> Start:
        def start(params: bytes, given: tuple[Any, ...]) -> None:
            self.launch(kernel, grid, block, dynamic_lds, params, naming and partial(naming, *given), overlap)

        return start

    def launch(
        self,
        kernel: Kernel,
        grid: Grid,
        block: int,
        dynamic_lds: int,
        params: bytes,
        buffers: Buffers | None,
        overlap: bool = False,
    ) -> None:
        """Executes the kernel to its end, so `overlap` has no effect here.

        LaunchError when the launch does not fit the kernel or no buffers were declared; SanitizerError (one of them)
        with every finding.
        """
        kernel.check(block, dynamic_lds, params)
        check_hip_grid(grid, block)
        if buffers is None:
            raise LaunchError("the emulator needs the buffers a kernel may touch; pass `buffers` to launch")
        memories = []
        keep = list(buffers())
        for item in keep:
            if item.tensor.device.type != "cpu":
                raise LaunchError(f"buffer {item.name} is on {item.tensor.device}; the emulator runs on CPU tensors")
            memories.append(Memory.of(item.name, item.tensor, item.access))
        how = options.get()
        report = self._machine.launch(
            kernel.handle,
            grid,
            block,
            dynamic_lds,
            params,
            memories,
            checks=how.checks,
            threads=how.threads,
            order=how.order,
        )
        _log.debug("%s: %d wave instructions", kernel.entry.id, report.instructions())
        if how.reports is not None:
            how.reports.append(report)
        elif report.findings:
            raise SanitizerError(report)
