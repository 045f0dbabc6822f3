"""A ROCm user space that lies in a folder: its HIP runtime, and how a program is run with its libraries.

The folder may be an installed ROCm, whose libraries fit this machine, or unpacked packages of another release, which
bring a C library of their own; a program then starts under that one's loader.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mla_suite.launch.driver import DriverError

_PLACES = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "lib", "lib64")
_LOADER = "ld-linux-x86-64.so.2"


def hip_library(folder: Path) -> Path:
    """The libamdhip64 of a user space. DriverError when there is none."""
    for place in _PLACES:
        found = sorted((folder / place).glob("libamdhip64.so.[0-9]"))
        if found:
            return found[0]
    raise DriverError(
        f"no libamdhip64.so is in {folder} ({', '.join(_PLACES)}); name the root of a ROCm, or a folder that "
        "Debian's packages were unpacked into"
    )


def command(folder: Path, program: Sequence[str]) -> list[str]:
    """`program` with the libraries of a user space, under its own loader where it has one."""
    loader = _loader(folder)
    if loader is None:
        return list(program)
    search = os.pathsep.join(str(folder / place) for place in _PLACES if (folder / place).is_dir())
    return [str(loader), "--argv0", program[0], "--library-path", search, *program]


def entered(folder: Path, maps: Path = Path("/proc/self/maps")) -> bool:
    """Whether this process runs with the C library of a user space, or the space has none."""
    loader = _loader(folder)
    return loader is None or str(loader.resolve().parent) in maps.read_text()


def _loader(folder: Path) -> Path | None:
    return next((folder / place / _LOADER for place in _PLACES if (folder / place / _LOADER).is_file()), None)
