"""The interface that the CUDA, HIP and emulator drivers implement: load a code object, launch it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from mla_suite.archs import ArchSpec
from mla_suite.build.manifest import KernelEntry

Grid = tuple[int, int, int]


class DriverError(RuntimeError):
    """A driver library is absent, ambiguous, or refused a call; the text is its own explanation."""


class LaunchError(RuntimeError):
    """A kernel could not be launched: names operator, kernel, arch, shape and the driver's explanation."""


class Buffer(NamedTuple):
    """A tensor that a kernel touches.

    access is 'r', 'w' (it starts uninitialised), 'rw', or 'all' (as 'w', and every element must be written).
    """

    name: str
    tensor: torch.Tensor
    access: str


Start = Callable[[bytes, Sequence[Buffer]], None]  # (params, buffers) -> a launch


class Kernel:
    """A loaded kernel of one device. `handle` is the driver's own; the limits are in threads and bytes."""

    __slots__ = ("entry", "handle", "max_dynamic_lds", "params_size", "threads")

    def __init__(self, entry: KernelEntry, handle: Any, arch: ArchSpec) -> None:
        self.entry = entry
        self.handle = handle
        self.params_size = entry.params_size
        self.threads = entry.threads  # MLA_KERNEL states the exact size, and the compiler builds on it
        self.max_dynamic_lds = arch.lds_bytes - entry.lds

    def check(self, block: int, dynamic_lds: int, params: bytes) -> None:
        """LaunchError when the launch does not fit the kernel. Drivers call it when one of three comparisons failed."""
        if len(params) != self.params_size:
            raise LaunchError(f"{len(params)} bytes of parameters, the kernel takes {self.params_size}")
        if block != self.threads:
            raise LaunchError(f"{block} threads per workgroup, the kernel was compiled for {self.threads}")
        if dynamic_lds > self.max_dynamic_lds:
            raise LaunchError(
                f"{dynamic_lds} bytes of dynamic LDS, {self.entry.arch} leaves {self.max_dynamic_lds} beside the static"
            )


def fits_hip_grid(grid: Grid, block: int) -> bool:
    """Whether HIP launches this grid as given. HIP refuses none: it takes the threads along x modulo 2^32."""
    return min(grid) > 0 and grid[0] * block < 1 << 32 and max(grid[1:]) < 1 << 16


def check_hip_grid(grid: Grid, block: int) -> None:
    """LaunchError for a grid that does not fit. The limit of y and z is that of hipDeviceProp, less one."""
    if not fits_hip_grid(grid, block):
        raise LaunchError(
            f"grid {tuple(grid)} x {block} threads; a GPU takes at least one workgroup, fewer than 2^32 threads "
            "along x and at most 65535 workgroups along y and z"
        )


class Driver(Protocol):
    """One device that runs code objects. Every method may be called from several threads."""

    arch: ArchSpec
    name: str
    checks_buffers: bool
    """Whether a launch is given the buffers that the kernel may touch."""

    def load(self, entry: KernelEntry) -> Kernel:
        """The kernel of one manifest entry, loaded at the first call and kept."""
        ...

    def bind(self, kernel: Kernel, grid: Grid, block: int, dynamic_lds: int, overlap: bool = False) -> Start:
        """Prepares a launch: start(params, buffers) enqueues the kernel on torch's current stream of this device.

        Only a driver that `checks_buffers` looks at them. `overlap` lets the kernel begin before the one ahead of it on
        the stream ends, where the device can; the kernel waits itself before it reads that one's results.
        """
        ...


class TorchDevice(NamedTuple):
    """The functions of torch that a driver calls; tests bring their own."""

    current_device: Callable[[], int]
    raw_stream: Callable[[int], int]
    guard: Callable[[int], AbstractContextManager[Any]]

    @classmethod
    def from_torch(cls) -> TorchDevice:
        """torch's own functions. Its public stream objects cost 1 us per launch; Inductor uses the same raw calls."""
        torch.cuda.init()
        return cls(torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream, torch.cuda.device)


class KernelCache:
    """Kernels by id. The first thread that asks loads a kernel, and others wait for it."""

    def __init__(self, make: Callable[[KernelEntry], Kernel]) -> None:
        self._make = make
        self._kernels: dict[str, Kernel] = {}
        self._lock = threading.Lock()

    def get(self, entry: KernelEntry) -> Kernel:
        kernel = self._kernels.get(entry.id)
        if kernel is None:
            with self._lock:
                kernel = self._kernels.get(entry.id)
                if kernel is None:
                    kernel = self._kernels[entry.id] = self._make(entry)
        return kernel
