"""Every instruction of the emulator's table against a formula of the ISA manual, on both archs."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path

import numpy as np
import pytest
from isa_case import ARCHS, REGISTRY

from mla_suite.build import compilers
from mla_suite.emulator import core

for module in sorted(Path(__file__).parent.glob("isa_*.py")):
    importlib.import_module(module.stem)

CASES = [(arch, op) for op, specs in REGISTRY.items() for arch in ARCHS if any(arch in spec.archs for spec in specs)]


def built(arch: str, op: str):
    with np.errstate(all="ignore"):  # NaN and overflow are operands here
        return [case for spec in REGISTRY[op] if arch in spec.archs for case in spec.cases(arch)]


@pytest.mark.parametrize(("arch", "op"), CASES, ids=[f"{arch}-{op}" for arch, op in CASES])
def test_instruction(arch, op):
    cases = built(arch, op)
    assert cases
    for case in cases:
        case.run(arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_instruction_of_the_table_is_checked(arch):
    table, checked = set(core.load().opcodes(arch)), {op for there, op in CASES if there == arch}
    assert sorted(table - checked) == [], "these instructions have no check"
    assert sorted(checked - table) == [], "these checks are of instructions the emulator does not have"


@pytest.mark.parametrize("arch", ARCHS)
def test_the_assembler_knows_every_text(arch, tmp_path):
    """Only instructions, encodings and modifiers that exist on the arch are checked above."""
    lines = [".text"]
    for there, op in CASES:
        if there == arch:
            for number, case in enumerate(built(arch, op)):
                # labels of one case are its own
                lines += [line.replace(".L", f".L{op}{number}_") for line in case.lines]
    source = tmp_path / "all.s"
    source.write_text("\n".join(lines) + "\n")
    command = [*compilers.packaged().to_relocatable(arch), str(source), "-o", str(tmp_path / "all.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    wrong = [line for line in done.stderr.splitlines() if "error" in line or line.startswith(("v_", "s_", "ds_"))]
    assert done.returncode == 0, "\n".join(wrong[:60])
