"""Compiles the recording driver libraries and reads what they recorded."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from mla_suite.build import emulator_library
from mla_suite.core import dispatch, register
from mla_suite.core.op import Op, Overload
from mla_suite.launch import hip, launcher
from mla_suite.launch.driver import TorchDevice

HERE = Path(__file__).parent


def triton_backends() -> Path:
    """The folder of the triton wheel that carries the vendors' headers."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        pytest.skip("the triton wheel, which carries the vendors' headers, is not installed")
    return Path(found.origin).parent / "backends"


def compile_all(folder: Path) -> Path:
    """libcuda.so.1 and libamdhip64.so in `folder`, and the same again in `folder/decoy`."""
    backends = triton_backends()
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("the ziglang wheel, which compiles the stub libraries, is not installed")
    # With the emulator's target zig finds its own parts in its cache; for another it compiles them, for 7 s.
    target = () if emulator_library.missing() else ("-target", emulator_library.TARGET)
    (folder / "decoy").mkdir()
    for source, name, include in (
        ("libcuda.c", "libcuda.so.1", "nvidia/include"),
        ("libamdhip64.c", "libamdhip64.so", "amd/include"),
    ):
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-D__HIP_PLATFORM_AMD__", f"-I{backends / include}"]
        command = [sys.executable, "-m", "ziglang", "cc", *target, *flags, str(HERE / source), "-o", str(folder / name)]
        subprocess.run(command, check=True)
        (folder / "decoy" / name).write_bytes((folder / name).read_bytes())
    return folder


class Call(NamedTuple):
    thread: int
    function: str
    text: str


class Stub:
    """One loaded stub library."""

    def __init__(self, path: Path) -> None:
        opened = hip.open_library if path.name.startswith("libamdhip64") else ctypes.CDLL
        self.library = opened(str(path))
        self.library.stub_log.restype = ctypes.c_char_p

    def reset(self, params_bytes: int) -> None:
        self.library.stub_reset(params_bytes)

    def fail(self, function: str, code: int, times: int = 1) -> None:
        self.library.stub_fail(function.encode(), code, times)

    def capture(self, on: bool) -> None:
        self.library.stub_capture(int(on))

    def calls(self, function: str = "") -> list[Call]:
        lines = self.library.stub_log().decode().splitlines()
        calls = [Call(int(thread), name, text) for thread, name, text in (line.split(" ", 2) for line in lines)]
        return [call for call in calls if call.function.startswith(function)]


class FakeTorch:
    """Stands in for torch's devices and streams: per-thread streams, a settable current device, a log of guards."""

    def __init__(self) -> None:
        self.current = 0
        self.stream: Callable[[int], int] = lambda ordinal: 0x7F00_0000_9000 + ordinal
        self.guards: list[int] = []

    @contextmanager
    def guard(self, ordinal: int):
        self.guards.append(ordinal)
        before, self.current = self.current, ordinal
        try:
            yield
        finally:
            self.current = before

    def device(self) -> TorchDevice:
        return TorchDevice(lambda: self.current, lambda ordinal: self.stream(ordinal), self.guard)


def route(monkeypatch, make_driver):
    """Has CPU tensors go to the driver that `make_driver()` returns, values unseen, as those of a GPU are."""
    for name, value in (("_make_driver", lambda index: make_driver()), ("_drivers", {}), ("_prepared", {})):
        monkeypatch.setattr(launcher, name, value)
    monkeypatch.setattr(register, "_validate", lambda *arguments: None)
    for called in (Op, Overload):
        monkeypatch.setattr(called, "validate_values", lambda *arguments: None)
    dispatch.clear_caches()  # calls made ready for the emulator
