"""Kernels that only tests have, compiled for an arch that can be emulated."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

from mla_suite.archs import CSRC
from mla_suite.build import compilers
from mla_suite.emulator import Emulator, Memory


def assembly(name: str, arch: str, folder: Path) -> str:
    """The assembly text of `name`.hip beside this file; written to `folder` on the way."""
    out = folder / f"{name}.s"
    source = Path(__file__).with_name(f"{name}.hip")
    command = [*compilers.packaged().to_assembly(arch), f"-I{CSRC}", "-S", str(source), "-o", str(out)]
    subprocess.run(command, check=True)
    return out.read_text()


def launch(arch, text, kernel, threads, arrays, *scalars):
    """One workgroup. arrays: (tensor, access) in the order of the struct's pointers; findings fail the test."""
    machine = Emulator(arch)
    params = struct.pack(f"<{len(arrays)}Q{len(scalars)}i", *(tensor.data_ptr() for tensor, _ in arrays), *scalars)
    params += b"\0" * (-len(params) % 8)
    memories = [Memory.of(f"array {i}", tensor, access) for i, (tensor, access) in enumerate(arrays)]
    report = machine.launch(machine.load_text(text, kernel), (1, 1, 1), threads, 0, params, memories)
    assert not report.findings, "\n".join(map(str, report.findings))
    return report
