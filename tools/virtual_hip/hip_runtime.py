"""The calls of AMD's HIP runtime that a host program makes around launches: memory and streams."""

from __future__ import annotations

import ctypes as c

from mla_suite.launch.driver import DriverError

_IN, _OUT = 1, 2  # hipMemcpyHostToDevice, hipMemcpyDeviceToHost
_NON_BLOCKING = 1

Handle = int


class HipRuntime:
    """libamdhip64 as `hip.open_library` opens it. Handles and addresses are integers; errors are DriverErrors."""

    def __init__(self, library: c.CDLL) -> None:
        self._library = library

    def call(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            name, text = self._library.hipGetErrorName(code), self._library.hipGetErrorString(code)
            raise DriverError(f"{function}: {code} {name.decode()}: {text.decode()}")

    def _made(self, function: str, *arguments: object) -> Handle:
        handle = c.c_void_p()
        self.call(function, c.byref(handle), *arguments)
        return handle.value or 0

    def set_device(self, ordinal: int) -> None:
        self.call("hipSetDevice", ordinal)

    def malloc(self, size: int) -> int:
        return self._made("hipMalloc", c.c_size_t(size))

    def free(self, address: int) -> None:
        self.call("hipFree", c.c_void_p(address))

    def copy_in(self, gpu: int, host: int, size: int, stream: Handle) -> None:
        """From the host's memory, in the stream's order."""
        self.call("hipMemcpyAsync", c.c_void_p(gpu), c.c_void_p(host), c.c_size_t(size), _IN, c.c_void_p(stream))

    def copy_out(self, host: int, gpu: int, size: int, stream: Handle) -> None:
        """To the host's memory, in the stream's order."""
        self.call("hipMemcpyAsync", c.c_void_p(host), c.c_void_p(gpu), c.c_size_t(size), _OUT, c.c_void_p(stream))

    def stream(self) -> Handle:
        """A stream that does not wait for the default one."""
        return self._made("hipStreamCreateWithFlags", _NON_BLOCKING)

    def synchronize(self, stream: Handle) -> None:
        self.call("hipStreamSynchronize", c.c_void_p(stream))
