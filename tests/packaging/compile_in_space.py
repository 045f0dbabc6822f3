"""Compile every AMD kernel with Debian's clang of one LLVM, fetched and unpacked; nothing is installed.

usage: python tests/packaging/compile_in_space.py clang21|clang22 FOLDER

A warning is as bad as a broken budget. clang22 is the LLVM of the ziglang wheel, so every kernel must have the wheel's
instructions, line by line.
"""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import compile_strictly
import debian_space

from mla_suite.build import manifest
from mla_suite.emulator import assembly, user_space

ARCHS = "gfx942,gfx950"


def main(name: str, out: str) -> int:
    folder = debian_space.fetch(name)
    root = Path(out) / "llvm"
    (root / "bin").mkdir(parents=True, exist_ok=True)
    for program, wrapper in (("clang", "clang++"), ("ld.lld", "ld.lld")):
        found = folder / "usr/lib" / f"llvm-{name[-2:]}" / "bin" / program
        command = user_space.command(folder, [str(found)])
        path = root / "bin" / wrapper
        path.write_text("#!/bin/sh\nexec " + " ".join(f"'{part}'" for part in command) + ' "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    status = compile_strictly.main(ARCHS, f"{out}/objects", str(root / "bin/clang++"))
    if status or name != "clang22":
        return status
    build = [sys.executable, "-m", "mla_suite", "build", "--arch", ARCHS, "--out", f"{out}/wheel"]
    if subprocess.run(build).returncode:
        return 1
    theirs, ours = (manifest.read(Path(out) / part).kernels for part in ("objects", "wheel"))
    for key, entry in theirs.items():
        texts = [_instructions(each) for each in (entry, ours[key])]
        if texts[0] != texts[1]:
            print(f"{key}: Debian's clang and the ziglang wheel write other instructions", file=sys.stderr)
            return 1
    print(f"{name}: the instructions of {len(theirs)} kernels are those of the ziglang wheel")
    return 0


def _instructions(entry: manifest.KernelEntry) -> list[str]:
    return [line.text for line in assembly.parse_kernel(entry.read_text(), entry.symbol).lines]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
