"""Compiles programs.hip once per arch, and launches its kernels."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from built import assembly

from mla_suite.emulator import Emulator, Memory, Report, Schedule

DEPTHS = {"gfx942": 16, "gfx950": 32}


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Assembly text of programs.hip by arch."""
    folder = tmp_path_factory.mktemp("programs")
    source = Path(__file__).with_name("programs.hip")
    return {arch: assembly(arch, source, folder / f"{arch}.s", {"K": depth}) for arch, depth in DEPTHS.items()}


@pytest.fixture(params=DEPTHS)
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Triton compiles into a folder of the file's own."""
    with patch.dict(os.environ, {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}):
        yield


class Launcher:
    """Launches kernels of an assembly text on numpy arrays."""

    def __init__(self, arch: str, text: str) -> None:
        self.machine = Emulator(arch)
        self.text = text

    def __call__(
        self,
        kernel: str,
        grid: int,
        block: int,
        arrays: dict[str, tuple[np.ndarray, str]],
        *scalars: int,
        text: str | None = None,
        dynamic_lds: int = 0,
        **options: object,
    ) -> Report:
        """arrays: name -> (array, access), in the order of the kernel's pointers; then its int32 scalars."""
        program = self.machine.load_text(text or self.text, kernel)
        pointers = [array.ctypes.data for array, _ in arrays.values()]
        params = struct.pack(f"<{len(pointers)}Q{len(scalars)}i", *pointers, *scalars)
        memories = [Memory.of(name, array, access) for name, (array, access) in arrays.items()]
        return self.machine.launch(program, (grid, 1, 1), block, dynamic_lds, params, memories, Schedule(**options))


@pytest.fixture
def launch(arch: str, programs: dict[str, str]) -> Launcher:
    return Launcher(arch, programs[arch])
