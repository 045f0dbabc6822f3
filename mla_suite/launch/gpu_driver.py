"""The common part of GPU drivers: kernels are loaded once, and every call is checked.

A subclass knows its library: how a module is loaded, how a launch is packed, and what its error codes mean.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_int
from typing import Any, ClassVar

from mla_suite.archs import ArchSpec
from mla_suite.build.manifest import KernelEntry
from mla_suite.launch.driver import DriverError, Grid, Kernel, KernelCache, Start, TorchDevice

_CAPTURE_ERRORS = range(900, 909)
CAPTURE_MODE_RELAXED = 2  # of cuda.h and hip_runtime_api.h alike
_WARM_UP = (
    "the stream is being captured and the kernel was never loaded: warm up first (call the operator once eagerly)"
)


class GpuDriver(ABC):
    """One GPU, driven through a C library that ctypes has opened."""

    __slots__ = ("_cache", "_current", "_launch", "_library", "_stream", "_torch", "arch", "ordinal")

    name: str
    checks_buffers = False
    launch_function: ClassVar[str]
    exchange_capture_mode: ClassVar[str]
    """The library's functions that enqueue a kernel, and that exchange a thread's capture mode."""

    def __init__(
        self, arch: ArchSpec, ordinal: int, library: ctypes.CDLL, torch_device: TorchDevice | None = None
    ) -> None:
        self.arch = arch
        self.ordinal = ordinal
        self._torch = torch_device or TorchDevice.from_torch()
        self._library = library
        self._launch = getattr(library, self.launch_function)
        self._current = self._torch.current_device
        self._stream = self._torch.raw_stream
        self._cache = KernelCache(self._load)

    def load(self, entry: KernelEntry) -> Kernel:
        return self._cache.get(entry)

    def launch(self, kernel: Kernel, grid: Grid, block: int, dynamic_lds: int, params: bytes) -> None:
        """Enqueues one launch that is not repeated."""
        self.bind(kernel, grid, block, dynamic_lds)(params, ())

    @abstractmethod
    def bind(self, kernel: Kernel, grid: Grid, block: int, dynamic_lds: int, overlap: bool = False) -> Start:
        """Prepares a launch; see `Driver.bind`."""

    @abstractmethod
    def explain(self, code: int) -> str:
        """The library's words for one of its error codes."""

    @abstractmethod
    def _load(self, entry: KernelEntry) -> Kernel:
        """Loads a code object; called once for each entry."""

    def _advice(self, code: int) -> str:
        """Advice about an error code, which follows its explanation; empty where there is none."""
        return ""

    def _call(self, function: str, *arguments: Any) -> None:
        """Calls a function of the library. DriverError names it and explains its error code."""
        code = getattr(self._library, function)(*arguments)
        if code in _CAPTURE_ERRORS:
            raise DriverError(f"{_WARM_UP}; {function} said {self.explain(code)}")
        if code:
            raise DriverError(f"{function}: {self.explain(code)}{self._advice(code)}")

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        """Allows this thread to load modules, and to allocate, while a stream captures in torch's default mode."""
        mode = c_int(CAPTURE_MODE_RELAXED)
        self._call(self.exchange_capture_mode, byref(mode))
        try:
            yield
        finally:
            self._call(self.exchange_capture_mode, byref(mode))
