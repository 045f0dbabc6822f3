"""Compile the AMD kernels with Debian's clang of one LLVM, fetched and unpacked; nothing is installed.

usage: python tools/compile_in_space.py clang21|clang22 FOLDER [--record]

A warning is as bad as a broken budget. clang21 is the LLVM of Debian's hipcc, which is what the build is given: it asks
that one's hipconfig for the clang. It compiles the kernels of gfx942, since it spills registers of some of gfx950.
clang22 is the LLVM of the ziglang wheel, so every kernel must have the wheel's instructions, line by line. --record
writes the row of docs/rocm.md.
"""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import compile_strictly
import debian_space
import rocm_matrix
from virtual_hip import user_space

from mla_suite.build import manifest
from mla_suite.build.manifest import KernelEntry
from mla_suite.emulator import assembly

ARCHS = {"clang21": "gfx942", "clang22": "gfx942,gfx950"}


def main(name: str, out: str, *options: str) -> int:
    folder = debian_space.fetch(name)
    if status := compile_strictly.main(ARCHS[name], f"{out}/objects", str(compiler(folder, name, Path(out) / "sdk"))):
        return status
    theirs = manifest.read(Path(out) / "objects").kernels
    shown = f"{len(theirs)} kernels compile without a warning, inside their budgets"
    if "hipcc" in debian_space.SPACES[name].packages:
        shown += "; hipcc was named to the build, its hipconfig named the clang"
    if name == "clang22":
        if subprocess.run([sys.executable, "-m", "mla_suite", "build", "--arch", ARCHS[name]]).returncode:
            return 1
        manifest.forget()
        if other := differing(theirs, manifest.installed().kernels):
            print(f"{other}: Debian's clang and the ziglang wheel write other instructions", file=sys.stderr)
            return 1
        shown += "; their instructions are those of the ziglang wheel, line by line"
    named = debian_space.named(name, folder)
    print(f"{name} ({', '.join(named)}): {shown}")
    if "--record" in options:
        rocm_matrix.put(name, named, shown)
    return 0


def compiler(folder: Path, name: str, sdk: Path) -> Path:
    """The program that `build --rocm` is given: the hipcc of a user space that has one, else its clang.

    Programs of a user space need its loader, so `sdk` gets scripts that start them under it.
    """
    llvm = folder / "usr/lib" / f"llvm-{name[-2:]}" / "bin"
    clang = _script(sdk / "llvm/clang++", folder, llvm / "clang")
    _script(sdk / "llvm/ld.lld", folder, llvm / "ld.lld")
    if not (folder / "usr/bin/hipcc").exists():
        return clang
    found = f"HIP_CLANG_PATH='{clang.parent}' "
    _script(sdk / "bin/hipconfig", folder, folder / "usr/bin/hipconfig", found)
    return _script(sdk / "bin/hipcc", folder, folder / "usr/bin/hipcc", found)


def _script(path: Path, folder: Path, program: Path, variables: str = "") -> Path:
    command = " ".join(f"'{part}'" for part in user_space.command(folder, [str(program)]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\n{variables}exec {command} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def differing(theirs: Mapping[tuple[str, str], KernelEntry], ours: Mapping[tuple[str, str], KernelEntry]) -> str:
    """The first kernel of `theirs` whose instructions in `ours` are others, or ''."""
    other = (key for key, entry in theirs.items() if _instructions(entry) != _instructions(ours[key]))
    return " ".join(next(other, ()))


def _instructions(entry: KernelEntry) -> list[str]:
    return [line.text for line in assembly.parse_kernel(entry.read_text(), entry.symbol).lines]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
