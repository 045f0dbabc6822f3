"""Compile kernels with the compiler of this environment; a warning is as bad as a broken budget.

usage: python tools/compile_strictly.py ARCH[,ARCH] OBJECT_FOLDER [COMPILER]

COMPILER is the path of a clang to use instead of the ziglang wheel's.
"""

import subprocess
import sys


def main(archs: str, out: str, compiler: str = "") -> int:
    build = [sys.executable, "-m", "mla_suite", "build", "--arch", archs, "--out", out]
    done = subprocess.run([*build, *(["--rocm", compiler] if compiler else [])], stderr=subprocess.PIPE, text=True)
    print(done.stderr, end="", file=sys.stderr)
    if done.returncode == 0 and "warning" in done.stderr.lower():
        print(f"the compiler warns about the kernels of {archs}: its messages are above", file=sys.stderr)
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
