"""AMD's own HIP runtime with the emulator as its GPU: fetch it, check it, run every operator through it.

usage: python tests/hip/run_hip.py [--quick] [pytest's arguments]

The whole: comgr reads every code object, then tests/hip on gfx942 and on gfx950. --quick: comgr, and one operator per
arch. The exit status is 77, with a sentence, where the packages cannot be had.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mla_suite.emulator import user_space

HERE = Path(__file__).resolve().parent
NAME = "hip72"
ARCHS = ("gfx942", "gfx950")
QUICK = [str(HERE / "test_operators.py"), "-k", "append_kv"]


def main(arguments: list[str]) -> int:
    quick = "--quick" in arguments
    rest = [argument for argument in arguments if argument != "--quick"]
    sys.path.insert(0, str(HERE.parent / "packaging"))
    import debian_space

    try:
        folder = debian_space.fetch(NAME)
    except debian_space.Unavailable as error:
        print(f"SKIPPED: {error}", file=sys.stderr)
        return debian_space.SKIPPED
    checks = [[sys.executable, str(HERE.parent / "packaging" / "rocm_space.py"), NAME]]
    tests = [sys.executable, "-m", "pytest", *(QUICK if quick else [str(HERE)]), *rest]
    for command in checks:
        if subprocess.run(command).returncode:
            return 1
    failed = 0
    for arch in ARCHS:
        environment = {**os.environ, "MLA_SUITE_HIP_ARCH": arch, "MLA_SUITE_HIP_SPACE": str(folder)}
        failed |= subprocess.run(user_space.command(folder, tests), env=environment).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
