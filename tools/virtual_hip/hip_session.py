"""CPU tensors through AMD's HIP runtime: copied into hipMalloc's memory, run by HipDriver, copied back.

A Driver like the emulator's own, so that every operator, sample and check that runs in the emulator runs through HIP
as well. The runtime is AMD's, unchanged; the GPU it sees is the virtual one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from mla_suite.archs import ArchSpec
from mla_suite.build import params as param_structs
from mla_suite.build.manifest import KernelEntry
from mla_suite.emulator.driver import options
from mla_suite.emulator.machine import Memory, Schedule
from mla_suite.emulator.report import SanitizerError
from mla_suite.launch.driver import Buffer, Grid, Kernel, LaunchError, Start, TorchDevice
from mla_suite.launch.hip import HipDriver, open_library
from virtual_hip.hip_runtime import Handle, HipRuntime
from virtual_hip.virtual_gpu import Expectation, VirtualGpu


class Mirror:
    """Host storages and their copies in GPU memory."""

    def __init__(self, gpu: VirtualGpu, runtime: HipRuntime) -> None:
        self._gpu, self._runtime = gpu, runtime
        self._storages: dict[int, tuple[int, int]] = {}  # host address -> GPU address, bytes
        self._written: set[int] = set()
        self._kept: list[torch.Tensor] = []

    def place(self, items: Iterable[Buffer], stream: Handle) -> None:
        """Gives every storage of these buffers GPU memory and its present contents, if it has none yet."""
        for item in items:
            storage = item.tensor.untyped_storage()
            host, size = storage.data_ptr(), storage.nbytes()
            if not size:
                continue
            if host not in self._storages:
                address = self._runtime.malloc(size)
                self._gpu.add_allocation(address, size)
                self._storages[host] = address, size
                self._kept.append(item.tensor)
                self._runtime.copy_in(address, host, size, stream)
            if item.access != "r":
                self._written.add(host)

    def translate(self, address: int) -> int:
        """The GPU's address of a host address; an address outside every storage is passed on and faults there."""
        at_end = address
        for host, (gpu, size) in self._storages.items():
            if host <= address < host + size:
                return gpu + address - host
            if address == host + size:
                at_end = gpu + size
        return at_end

    def copy_out(self, stream: Handle) -> None:
        """Storages that a kernel may have written."""
        for host in self._written:
            gpu, size = self._storages[host]
            self._runtime.copy_out(host, gpu, size, stream)

    def free(self) -> None:
        for gpu, _ in self._storages.values():
            self._gpu.remove_allocation(gpu)
            self._runtime.free(gpu)
        self._storages.clear()
        self._kept.clear()


class _Thread(threading.local):
    stream: Handle = 0


class HipSession:
    """Runs an arch's kernels on CPU tensors through a HIP runtime. Every thread has a stream of its own."""

    name = "hip"
    checks_buffers = True

    def __init__(self, arch: ArchSpec, library: Path) -> None:
        self.arch = arch
        self.gpu = VirtualGpu.start(arch.name)
        opened = open_library(str(library))
        self.runtime = HipRuntime(opened)
        self._thread = _Thread()
        self.runtime.set_device(0)
        self.gpu.reserve_event_and_queue()
        self.driver = HipDriver(
            arch, 0, opened, TorchDevice(lambda: 0, lambda _: self.stream(), lambda _: nullcontext())
        )

    def stream(self) -> Handle:
        """The calling thread's stream."""
        if not self._thread.stream:
            self._thread.stream = self.runtime.stream()
        return self._thread.stream

    def load(self, entry: KernelEntry) -> Kernel:
        return self.driver.load(entry)

    def bind(self, kernel: Kernel, grid: Grid, block: int, dynamic_lds: int, overlap: bool = False) -> Start:
        """A launch waits for its end. It raises what HipDriver, HIP or the sanitizer say. `overlap` has no effect."""

        def start(params: bytes, buffers: Sequence[Buffer]) -> None:
            if not buffers:
                raise LaunchError("the HIP session needs the buffers that a kernel may touch")
            self._launch(kernel, grid, block, dynamic_lds, params, buffers)

        return start

    def _launch(
        self, kernel: Kernel, grid: Grid, block: int, dynamic_lds: int, params: bytes, items: Sequence[Buffer]
    ) -> None:
        how, stream = options.get(), self.stream()
        mirror = Mirror(self.gpu, self.runtime)
        try:
            mirror.place(items, stream)
            moved, declared = self._declare(kernel, params, items, mirror, how.schedule)
            try:
                self.driver.launch(kernel, grid, block, dynamic_lds, moved)
                mirror.copy_out(stream)
                self.runtime.synchronize(stream)
            finally:
                self.gpu.unexpect(moved)
            self.gpu.check()
        finally:
            mirror.free()
        if how.reports is not None:
            how.reports.extend(declared.reports)
        for report in declared.reports:
            if report.findings and how.reports is None:
                raise SanitizerError(report)

    def _declare(
        self, kernel: Kernel, params: bytes, items: Sequence[Buffer], mirror: Mirror, schedule: Schedule
    ) -> tuple[bytes, Expectation]:
        """The parameters with the GPU's addresses, and what their dispatches may touch."""
        layout = param_structs.load(kernel.entry.params)
        values = layout.unpack(params)
        for item in layout.fields:
            if item.is_pointer and values[item.name]:
                values[item.name] = mirror.translate(int(values[item.name]))
        moved = layout.pack(**values)
        memories = [Memory.of(item.name, item.tensor, item.access) for item in items]
        there = [memory._replace(address=mirror.translate(memory.address)) for memory in memories]
        return moved, self.gpu.expect(moved, there, schedule)
