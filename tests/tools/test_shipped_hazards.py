"""Wait states of shipped kernels: none is missing, those taken out are found, and passes are the emulator's."""

from __future__ import annotations

import itertools
import re

import pytest
from built import require_built
from hazards import check as hazards
from hazards.effects import instructions

from mla_suite.build.manifest import installed
from mla_suite.emulator.program import decode


def shipped(arch, name):
    require_built(arch, name)
    return installed().find(arch, name).read_text()


SHIPPED = [
    ("gfx950", "decode_fp8_query-fp8_weight-bf16_rows-16"),
    ("gfx950", "decode_fp8_weights_query-fp8_weight-fp8_rows-128"),
    ("gfx950", "sparse_decode_kvformat-dsv4_rows-64"),
    ("gfx942", "decode_dtype-bf16_rows-16_width-576_rotate-0"),
    ("gfx942", "sparse_decode_kvformat-dsv4_rows-64"),
]


COVERED = re.compile(r"v_mfma|v_accvgpr_read|v_readfirstlane|v_\w+_dpp")
"""Behind other instructions LLVM waits for what the manuals allow: carry-in, and loads into operands just read."""


@pytest.mark.parametrize(("arch", "name"), SHIPPED)
def test_wait_states_taken_out_of_a_shipped_kernel(arch, name):
    text = shipped(arch, name)
    assert hazards.check(text, arch) == []
    lines = text.splitlines()
    waits = [
        before.line
        for before, item in itertools.pairwise(instructions(lines))
        if before.operation.opcode == "s_nop" and COVERED.match(item.operation.text)
    ]
    assert waits
    for line in waits[:: max(1, len(waits) // 6)]:
        without = "\n".join([*lines[: line - 1], "", *lines[line:]])
        assert hazards.check(without, arch), f"line {line} of {name}"


def wider(accumulator):
    """Sixteen registers from the first of these on."""
    file, first = accumulator[0], int(re.search(r"\d+", accumulator).group())
    return f"{file}[{first}:{first + 15}]"


@pytest.mark.parametrize(("arch", "name"), [shipped for shipped in SHIPPED if "weights" not in shipped[1]])
def test_products_of_other_passes_in_a_shipped_kernel(arch, name):
    """One of two neighbouring products of a chain becomes one of other passes, as close to the next as before."""
    text = shipped(arch, name)
    lines = text.splitlines()
    last: dict[str, tuple[int, int]] = {}
    pairs, time = [], 0
    for item in instructions(lines):
        time += item.operation.waits
        if item.operation.passes == 0:
            continue
        into, *_, c = re.split(r", ?", item.operation.text.split(" ", 1)[1])
        if c in last and time - last[c][0] <= 4:
            pairs.append((last[c][1], c, item.operation.passes))
        last[into] = (time, item.line)
    assert pairs
    for line, c, passes in pairs[:: max(1, len(pairs) // 6)]:
        if passes == 8:
            other = f"v_mfma_f32_16x16x32_fp8_fp8 {c}, v[0:1], v[2:3], {c}"
        elif arch == "gfx950":
            other = f"v_mfma_f32_16x16x128_f8f6f4 {c}, v[0:7], v[8:15], {c}"
        else:
            other = f"v_mfma_f32_32x32x8_f16 {wider(c)}, v[200:201], v[202:203], {wider(c)}"
        found = hazards.check("\n".join([*lines[: line - 1], f"\t{other}", *lines[line:]]), arch)
        assert any("C of an unlike one" in item.rule.what for item in found), f"line {line} of {name}"


@pytest.mark.parametrize(("arch", "name"), SHIPPED)
def test_passes_are_those_of_the_emulator(arch, name):
    text = shipped(arch, name)
    program = decode(arch, text, installed().find(arch, name).symbol)
    counted = {line.number: passes for line, passes in zip(program.lines, program.passes, strict=True)}
    ours = {item.line: item.operation.passes for item in instructions(text.splitlines())}
    assert {line: passes for line, passes in ours.items() if passes} == {line: n for line, n in counted.items() if n}
