"""Compile every AMD kernel with Debian's clang of one LLVM, fetched and unpacked; nothing is installed.

usage: python tests/packaging/compile_in_space.py clang21|clang22 FOLDER [--record]

A warning is as bad as a broken budget. clang22 is the LLVM of the ziglang wheel, so every kernel must have the wheel's
instructions, line by line. --record writes the row of docs/rocm.md.
"""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import compile_strictly
import debian_space
import need_objects
import rocm_matrix

from mla_suite.build import manifest
from mla_suite.emulator import assembly, user_space

ARCHS = "gfx942,gfx950"


def main(name: str, out: str, *options: str) -> int:
    folder = debian_space.fetch(name)
    root = Path(out) / "llvm"
    (root / "bin").mkdir(parents=True, exist_ok=True)
    for program, wrapper in (("clang", "clang++"), ("ld.lld", "ld.lld")):
        found = folder / "usr/lib" / f"llvm-{name[-2:]}" / "bin" / program
        command = user_space.command(folder, [str(found)])
        path = root / "bin" / wrapper
        path.write_text("#!/bin/sh\nexec " + " ".join(f"'{part}'" for part in command) + ' "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    if status := compile_strictly.main(ARCHS, f"{out}/objects", str(root / "bin/clang++")):
        return status
    theirs = manifest.read(Path(out) / "objects").kernels
    shown = f"{len(theirs)} kernels compile without a warning, inside their budgets"
    if name == "clang22":
        if need_objects.main(ARCHS):
            return 1
        ours = manifest.installed().kernels
        for key, entry in theirs.items():
            if _instructions(entry) != _instructions(ours[key]):
                print(f"{key}: Debian's clang and the ziglang wheel write other instructions", file=sys.stderr)
                return 1
        shown += "; their instructions are those of the ziglang wheel, line by line"
    versions = debian_space.versions(folder)
    named = [f"{package} {versions[package]}" for package in debian_space.SPACES[name].packages]
    print(f"{name} ({', '.join(named)}): {shown}")
    if "--record" in options:
        rocm_matrix.put(name, named, shown)
    return 0


def _instructions(entry: manifest.KernelEntry) -> list[str]:
    return [line.text for line in assembly.parse_kernel(entry.read_text(), entry.symbol).lines]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
