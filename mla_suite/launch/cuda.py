"""The CUDA driver: libcuda through ctypes.

Objects of nvcc 13, which the PyPI wheels bring, need the NVIDIA driver 580 (CUDA 13.0) or newer; objects of an nvcc 12,
named when they were built, need 525 (CUDA 12.0). An older driver is refused in a sentence.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_void_p
from functools import cache
from pathlib import Path

from mla_suite.archs import ArchSpec
from mla_suite.build.manifest import KernelEntry
from mla_suite.launch.driver import Buffer, DriverError, Grid, Kernel, Start, TorchDevice
from mla_suite.launch.early_launch import allowed as early_launch_allowed
from mla_suite.launch.gpu_driver import GpuDriver

# CUlaunchConfig: grid, block, shared bytes, padding, stream, attributes, their number.
CONFIG = struct.Struct("<7I4xQQI4x")
# CUlaunchAttribute: id, padding to 8, a 64-byte union. 6 is programmatic stream serialization: the kernel may begin
# while the one before it on the stream still runs, and waits for that one at its griddepcontrol.wait.
_OVERLAP = struct.pack("<I4xi60x", 6, 1)
_MAX_STREAMS = 64  # a prepared launch keeps a configuration for each; torch's stream pools have 32 each
_INVALID_CONTEXT = 201  # CUresult
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
# The first driver of each CUDA release. A driver loads the objects of every nvcc of its own release and of older ones
# (NVIDIA's minor version compatibility); CUDA 13 gave cubins a new ELF ABI, 8, which older drivers do not read.
_FIRST_DRIVERS = {12: 525, 13: 580}


def module_version() -> str:
    """The version of the kernel module that is loaded, e.g. 580.159.04; an empty string without one."""
    stated = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", stated.read_text()) if stated.is_file() else None
    return found[0] if found else ""


@cache
def open_library(name: str = "libcuda.so.1") -> ctypes.CDLL:
    """libcuda. DriverError when this machine has none or an old one."""
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise DriverError(f"the NVIDIA driver library cannot be opened ({error}); install the NVIDIA driver") from error
    if not hasattr(library, "cuLaunchKernelEx"):
        raise DriverError(f"{name} has no cuLaunchKernelEx; the NVIDIA driver must be of CUDA 12 (525) or newer")
    return library


class CudaDriver(GpuDriver):
    """One NVIDIA GPU, in torch's primary context."""

    __slots__ = ("_context", "_overlap", "_version")

    name = "cuda"
    launch_function = "cuLaunchKernelEx"
    exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"

    def __init__(
        self, arch: ArchSpec, ordinal: int, library: ctypes.CDLL | None = None, torch_device: TorchDevice | None = None
    ) -> None:
        super().__init__(arch, ordinal, library or open_library(), torch_device)
        self._overlap = ctypes.create_string_buffer(_OVERLAP, len(_OVERLAP))
        device, context, version = c_int(), c_void_p(), c_int()
        self._call("cuDriverGetVersion", byref(version))
        self._version = version.value  # 13000 is CUDA 13.0
        self._call("cuInit", 0)
        self._call("cuDeviceGet", byref(device), ordinal)
        # The context is held for the life of the process, as torch holds it.
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        self._context = context

    def _need_driver_for(self, entry: KernelEntry) -> None:
        """DriverError when this machine's driver is of an older CUDA release than the object's compiler."""
        made_by = re.match(r"nvcc (\d+)", entry.compiler)
        if made_by is None:
            raise DriverError(f"{entry.id} was made by {entry.compiler}; build it with nvcc")
        release = int(made_by.group(1))
        if self._version < 1000 * release:
            first = f" (driver {_FIRST_DRIVERS[release]})" if release in _FIRST_DRIVERS else ""
            raise DriverError(
                f"the NVIDIA driver is of CUDA {self._version // 1000}.{self._version % 1000 // 10}, objects of "
                f"{entry.compiler} need one of CUDA {release}.0{first} or newer; update the driver, or name an nvcc of "
                f"an older CUDA: `python -m mla_suite build --arch {entry.arch} --nvcc PATH`"
            )

    def _load(self, entry: KernelEntry) -> Kernel:
        self._need_driver_for(entry)
        image = entry.read_object()
        module, function = c_void_p(), c_void_p()
        with self.relaxed_capture(), self._in_context():
            self._call("cuModuleLoadData", byref(module), image)
            self._call("cuModuleGetFunction", byref(function), module, entry.symbol.encode())
            kernel = Kernel(entry, function, self.arch)
            # More than 48 KiB need an opt-in, which is set once here and not at every launch.
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, kernel.max_dynamic_lds)
        return kernel

    def bind(self, kernel: Kernel, grid: Grid, block: int, dynamic_lds: int, overlap: bool = False) -> Start:
        """`overlap` allows the kernel to begin before the previous one on the stream ends (see `_OVERLAP`), unless
        `early_launch` forbids it."""
        may_be_early = early_launch_allowed.get
        current, ordinal, stream_of, launch = self._current, self.ordinal, self._stream, self._launch
        handle, size = kernel.handle, kernel.params_size
        fits = block == kernel.threads and dynamic_lds <= kernel.max_dynamic_lds
        attributes = ctypes.addressof(self._overlap) if overlap else 0
        configs: dict[int, bytes] = {}

        def start(params: bytes, buffers: Sequence[Buffer]) -> None:
            if current() != ordinal:
                with self._torch.guard(ordinal):
                    return start(params, buffers)
            if len(params) != size or not fits:
                kernel.check(block, dynamic_lds, params)
            stream = stream_of(ordinal)
            early = may_be_early()
            key = stream if early else ~stream
            config = configs.get(key)
            if config is None:
                given = (attributes, overlap) if early else (0, False)
                config = CONFIG.pack(*grid, block, 1, 1, dynamic_lds, stream, *given)
                if len(configs) >= _MAX_STREAMS:
                    configs.clear()
                configs[key] = config
            # ctypes passes bytes as the address of their contents; byref of a c_char_p is a one-entry array of such
            # addresses, as kernelParams wants. Both live for this call only, so threads share nothing.
            code = launch(config, handle, byref(c_char_p(params)), None)
            if code == _INVALID_CONTEXT:
                # A thread that has not yet used this GPU has no current context.
                self._call("cuCtxSetCurrent", self._context)
                code = launch(config, handle, byref(c_char_p(params)), None)
            if code:
                raise DriverError(self.explain(code))
            return None

        return start

    def explain(self, code: int) -> str:
        """The driver's name and text for one of its error codes."""
        text = c_char_p()
        self._library.cuGetErrorString(code, byref(text))
        name = c_char_p()
        self._library.cuGetErrorName(code, byref(name))
        explained = text.value is not None and name.value is not None
        return f"{name.value.decode()}: {text.value.decode()}" if explained else f"CUDA error {code}"  # type: ignore[union-attr]  # both were just tested

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))
