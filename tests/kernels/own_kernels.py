"""Kernels that only tests have, compiled for an arch that can be emulated."""

from __future__ import annotations

import subprocess
from pathlib import Path

from mla_suite.archs import CSRC
from mla_suite.build import compilers


def assembly(name: str, arch: str, folder: Path) -> str:
    """The assembly text of `name`.hip beside this file; written to `folder` on the way."""
    out = folder / f"{name}.s"
    source = Path(__file__).with_name(f"{name}.hip")
    command = [*compilers.packaged().to_assembly(arch), f"-I{CSRC}", "-S", str(source), "-o", str(out)]
    subprocess.run(command, check=True)
    return out.read_text()
