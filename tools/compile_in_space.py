"""Compile every AMD kernel with Debian's clang-22, fetched and unpacked; nothing is installed.

A warning is as bad as a broken budget. clang-22 is the LLVM of the ziglang wheel, so every kernel must have the wheel's
instructions, line by line. --record writes the row of docs/rocm.md.
"""

from __future__ import annotations

import argparse
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

ARCHS = "gfx942,gfx950"


def main(name: str, out: str, record: bool = False) -> int:
    folder = debian_space.fetch(name)
    if status := compile_strictly.main(ARCHS, f"{out}/objects", str(compiler(folder, Path(out) / "sdk"))):
        return status
    theirs = manifest.read(Path(out) / "objects").kernels
    if subprocess.run([sys.executable, "-m", "mla_suite", "build", "--arch", ARCHS]).returncode:
        return 1
    manifest.forget()
    if other := differing(theirs, manifest.installed().kernels):
        print(f"{other}: Debian's clang and the ziglang wheel write other instructions", file=sys.stderr)
        return 1
    shown = (
        f"{len(theirs)} kernels compile without a warning, inside their budgets; their instructions are those of the "
        "ziglang wheel, line by line"
    )
    named = debian_space.named(name, folder)
    print(f"{name} ({', '.join(named)}): {shown}")
    if record:
        rocm_matrix.put(name, named, shown)
    return 0


def compiler(folder: Path, sdk: Path) -> Path:
    """The clang that `build --rocm` is given. A user space's programs need its loader: `sdk` gets scripts that start
    them under it."""
    llvm = folder / "usr/lib/llvm-22/bin"
    _script(sdk / "llvm/ld.lld", folder, llvm / "ld.lld")
    return _script(sdk / "llvm/clang++", folder, llvm / "clang")


def _script(path: Path, folder: Path, program: Path) -> Path:
    command = " ".join(f"'{part}'" for part in user_space.command(folder, [str(program)]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def differing(theirs: Mapping[tuple[str, str], KernelEntry], ours: Mapping[tuple[str, str], KernelEntry]) -> str:
    """The first kernel of `theirs` whose instructions in `ours` are others, or ''."""
    other = (key for key, entry in theirs.items() if _instructions(entry) != _instructions(ours[key]))
    return " ".join(next(other, ()))


def _instructions(entry: KernelEntry) -> list[str]:
    return [line.text for line in assembly.parse_kernel(entry.read_text(), entry.symbol).lines]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["clang22"])
    parser.add_argument("out", metavar="FOLDER", help="for objects and scripts")
    parser.add_argument("--record", action="store_true", help="write the row of docs/rocm.md")
    sys.exit(main(**vars(parser.parse_args())))
