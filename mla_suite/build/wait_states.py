"""Wait states that AMD's ISA leaves to the program, checked in the objects of any compiler but the pinned one.

The check is a program of the repository, `tools/check_hazards.py`. CI runs it on every object of the pinned compiler.
An installed package does not have the program, and refuses other compilers.
"""

from mla_suite.archs import CSRC
from mla_suite.build.locations import BuildError, sha256

CHECKER = CSRC.resolve().parent / "tools" / "check_hazards.py"


def need_checker(compiler: str) -> None:
    """BuildError where objects of another compiler than the pinned one cannot be checked."""
    if not CHECKER.is_file():
        raise BuildError(
            f"objects of {compiler} need a check for missing wait states, which an installed package does not have; "
            "build in a clone of the repository, or with the pinned compiler: `pip install 'mla_suite[build]'`"
        )


def arguments(arch: str, text: str) -> list[str]:
    """Arguments of the Python that checks a text of assembly: a sentence for each finding, and the exit status 1."""
    return [str(CHECKER), "--arch", arch, "--disassembly", text]


def identity() -> str:
    """sha256 over the sources of the check; a changed one checks again."""
    sources = [CHECKER, *sorted((CHECKER.parent / "hazards").glob("*.py"))]
    return sha256(b"".join(path.read_bytes() for path in sources))
