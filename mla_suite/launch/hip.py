"""AMD: libamdhip64 through ctypes, and always the copy that torch uses."""

from __future__ import annotations

import ctypes
import importlib.util
import sysconfig
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_void_p
from functools import cache
from pathlib import Path

from mla_suite.archs import ArchSpec
from mla_suite.build.manifest import KernelEntry
from mla_suite.launch.driver import Buffer, DriverError, Grid, Kernel, Start, TorchDevice, check_hip_grid, fits_hip_grid
from mla_suite.launch.gpu_driver import GpuDriver

# AMD's own packages, then those of Debian and its derivatives, whose folder is named for the architecture.
SEARCHED = (Path("/opt/rocm/lib"), Path("/usr/lib") / (sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"))
"""Folders that may hold a libamdhip64 that torch does not bring itself."""

_NO_DEVICE, _INVALID_DEVICE, _UNKNOWN = 100, 101, 999  # hipError_t
_NO_GPU = (
    "no AMD GPU is visible to the HIP runtime: see whether `rocminfo` lists one, whether this user may open /dev/kfd "
    "and /dev/dri/renderD* (groups render and video) and what HIP_VISIBLE_DEVICES says; without a GPU, run CPU "
    'tensors in the emulator (`with mla_suite.emulate("gfx942")`)'
)


def module_version() -> str:
    """The version of the kernel module that is loaded; an empty string where it says none."""
    stated = Path("/sys/module/amdgpu/version")
    return stated.read_text().strip() if stated.is_file() else ""


def mapped_copies(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Paths of the distinct libamdhip64 files mapped into this process, in order of appearance."""
    found: dict[str, None] = {}
    for line in maps.read_text().splitlines():
        columns = line.split(maxsplit=5)
        if len(columns) == 6 and Path(columns[5]).name.startswith("libamdhip64.so"):
            found[columns[5].removesuffix(" (deleted)")] = None
    return list(found)


def find_library(
    maps: Path = Path("/proc/self/maps"), torch_lib: Path | None = None, sdk: Sequence[Path] = SEARCHED
) -> str:
    """The HIP runtime to use: the one mapped already, else the one in torch's folder, else the SDK's.

    A second copy has its own streams and contexts, and answers torch's with errors. DriverError when two are mapped,
    naming both, or when there is none.
    """
    copies = mapped_copies(maps)
    if len(copies) > 1:
        raise DriverError(
            f"two HIP runtimes are mapped, {' and '.join(copies)}; start the process with one of them only "
            "(mind LD_LIBRARY_PATH and LD_PRELOAD)"
        )
    if copies:
        return copies[0]
    if torch_lib is None:
        torch = importlib.util.find_spec("torch")
        torch_lib = Path(torch.origin).parent / "lib" if torch and torch.origin else Path("/nonexistent")
    for folder in (torch_lib, *sdk):
        for path in sorted(folder.glob("libamdhip64.so*")):
            return str(path)
    raise DriverError(
        f"no libamdhip64 is mapped, nor in {torch_lib}, nor in {', '.join(map(str, sdk))}; "
        "install ROCm and a ROCm build of torch"
    )


@cache
def open_library(path: str) -> ctypes.CDLL:
    """The HIP runtime at `path`. DriverError when it cannot be opened."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise DriverError(f"the HIP runtime cannot be opened ({error}); install ROCm") from error
    library.hipGetErrorName.restype = library.hipGetErrorString.restype = c_char_p
    return library


class HipDriver(GpuDriver):
    """One AMD GPU, in torch's context."""

    __slots__ = ()

    name = "hip"
    launch_function = "hipModuleLaunchKernel"
    exchange_capture_mode = "hipThreadExchangeStreamCaptureMode"

    def __init__(
        self, arch: ArchSpec, ordinal: int, library: ctypes.CDLL | None = None, torch_device: TorchDevice | None = None
    ) -> None:
        super().__init__(arch, ordinal, library or open_library(find_library()), torch_device)

    def _load(self, entry: KernelEntry) -> Kernel:
        image = entry.read_object()
        module, function = c_void_p(), c_void_p()
        with self._torch.guard(self.ordinal), self.relaxed_capture():
            self._call("hipModuleLoadData", byref(module), image)
            self._call("hipModuleGetFunction", byref(function), module, entry.symbol.encode())
        return Kernel(entry, function, self.arch)

    def bind(self, kernel: Kernel, grid: Grid, block: int, dynamic_lds: int, overlap: bool = False) -> Start:
        """`overlap` is a permission that AMD GPUs have no use for."""
        current, ordinal, stream_of, launch = self._current, self.ordinal, self._stream, self._launch
        handle, size, shape = kernel.handle, kernel.params_size, (*grid, block, 1, 1, dynamic_lds)
        fits = block == kernel.threads and dynamic_lds <= kernel.max_dynamic_lds and fits_hip_grid(grid, block)

        def start(params: bytes, buffers: Sequence[Buffer]) -> None:
            if current() != ordinal:
                with self._torch.guard(ordinal):
                    return start(params, buffers)
            if len(params) != size or not fits:
                kernel.check(block, dynamic_lds, params)
                check_hip_grid(grid, block)
            # Bytes pass as the address of their contents; byref of a c_char_p is a one-entry array of such addresses,
            # which is what kernelParams wants. Both live for the call only, so threads share nothing.
            code = launch(handle, *shape, c_void_p(stream_of(ordinal)), byref(c_char_p(params)), None)
            if code:
                raise DriverError(self.explain(code))
            return None

        return start

    def explain(self, code: int) -> str:
        """The runtime's words for one of its error codes, or the number where it has none.

        A runtime calls every code it does not know hipErrorUnknown.
        """
        name, text = self._library.hipGetErrorName(code).decode(), self._library.hipGetErrorString(code).decode()
        if name == "hipErrorUnknown" and code != _UNKNOWN:
            return f"HIP error {code}, which this runtime has no words for"
        return f"{name}: {text}"

    def _advice(self, code: int) -> str:
        return f"; {_NO_GPU}" if code in (_NO_DEVICE, _INVALID_DEVICE) else ""
