"""Wait states that AMD's ISA leaves to the program, checked in the objects of any compiler but the pinned one.

The check is a program of the repository, `tools/check_hazards.py`. CI runs it on every object of the pinned compiler.
An installed package does not have the program, and refuses other compilers.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mla_suite.archs import CSRC
from mla_suite.build.locations import BuildError

CHECKER = CSRC.resolve().parent / "tools" / "check_hazards.py"


def need_checker(compiler: str) -> None:
    """BuildError where objects of another compiler than the pinned one cannot be checked."""
    if not CHECKER.is_file():
        raise BuildError(
            f"objects of {compiler} need a check for missing wait states, which an installed package does not have; "
            "build in a clone of the repository, or with the pinned compiler: `pip install 'mla_suite[build]'`"
        )


def check(arch: str, texts: Sequence[Path]) -> None:
    """BuildError with a sentence for each wait state that these texts of assembly lack."""
    if not texts:
        return
    command = [sys.executable, str(CHECKER), "--arch", arch, "--disassembly", *map(str, texts)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError((done.stderr + done.stdout).strip())
