"""Wait states that the ISA leaves to the program, as data: after which instruction which other one may come, and when.

AMD's manuals list dependencies that the hardware does not check: "CDNA3 ISA" (gfx942) and "CDNA4 ISA" (gfx950), in
sections 4.5 (table 11) for all instructions and 7.5 or 7.6 (tables 37 and 38) for matrix instructions. A row here says
how many independent instructions must stand between a producer and a consumer that touch the same registers. Rows for
the export unit, traps and VSKIP are absent, as compute kernels have none of these; so is the alias of VCC and its SGPR
number, which assembly text always spells `vcc`.

Classes of producers (what an instruction did to a register) and of consumers (what another does with it) are given to
instructions by `effects.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

ARCHS = ("gfx942", "gfx950")
LONGEST = 20
"""The most wait states of any row: what lies further back matters to nothing."""

_MATRIX = {"gfx942": "CDNA3 ISA 7.5, table 37", "gfx950": "CDNA4 ISA 7.6, table 38"}
_SOFTWARE = {"gfx942": "CDNA3 ISA 4.5, table 11", "gfx950": "CDNA4 ISA 4.5, table 11"}

Waits = int | Mapping[int, int]
"""Wait states, or wait states by the producer's passes (a pass is four clocks)."""


@dataclass(frozen=True)
class Rule:
    """`waits` and `source` by arch; an arch that is absent does not have the hazard. `what` names it in a sentence."""

    producer: str
    consumer: str
    waits: Mapping[str, Waits]
    source: Mapping[str, str]
    what: str

    def required(self, arch: str, passes: int) -> int:
        """Wait states on `arch` after a producer of `passes` passes (0 for one that is no matrix instruction)."""
        waits = self.waits.get(arch, 0)
        return waits if isinstance(waits, int) else waits[passes]


def _passes(two: int, four: int, eight: int, sixteen: int) -> dict[int, int]:
    return {2: two, 4: four, 8: eight, 16: sixteen}


def _both(waits: Waits) -> dict[str, Waits]:
    return dict.fromkeys(ARCHS, waits)


def _matrix(producer: str, consumer: str, gfx942: Waits, gfx950: Waits, *, what: str) -> Rule:
    return Rule(producer, consumer, {"gfx942": gfx942, "gfx950": gfx950}, _MATRIX, what)


def _software(producer: str, consumer: str, waits: int, what: str) -> Rule:
    return Rule(producer, consumer, _both(waits), _SOFTWARE, what)


_CHAINED = (_passes(2, 0, 0, 0), _passes(2, 0, 0, 0))
_READ_BY_C = (_passes(1, 3, 7, 15), _passes(1, 3, 7, 15))
_SGEMM_C = (_passes(2, 4, 8, 16), _passes(2, 4, 8, 16))
_XDL_DONE = (_passes(5, 7, 11, 19), _passes(5, 8, 12, 20))
_SGEMM_DONE = (_passes(4, 6, 10, 18), _passes(4, 6, 10, 18))

RULES = (
    # The manuals grant forwarding of an accumulator to "the same number of passes"; LLVM's pull 218363 to the same
    # instruction only, which is what `_same` means here.
    _matrix("valu_vgpr", "matrix_read", 2, 2, what="VALU write, then a matrix instruction reads it"),
    _matrix("valu_exec", "matrix_exec", 4, 4, what="VALU write of EXEC, then a matrix instruction"),
    _matrix("dot", "dot_ab_same", 3, 3, what="dot product, then the same opcode reads it as A or B"),
    _matrix("dot", "any_read", 3, 3, what="dot product, then another opcode reads it"),
    _matrix("dot", "any_write", 3, 3, what="dot product, then another opcode writes it"),
    _matrix("xdl", "xdl_c_same", *_CHAINED, what="matrix write, then the same instruction's C"),
    _matrix("xdl", "xdl_c", _passes(3, 5, 9, 17), _passes(4, 6, 10, 18), what="matrix write, then C of an unlike one"),
    _matrix("xdl", "sgemm_c", _passes(3, 5, 9, 17), _passes(3, 6, 10, 18), what="matrix write, then C of an fp32 one"),
    _matrix("xdl", "dgemm_c", _passes(3, 5, 9, 17), _passes(3, 6, 10, 18), what="matrix write, then C of an fp64 one"),
    _matrix("xdl", "matrix_ab", *_XDL_DONE, what="matrix write, then A or B of another"),
    _matrix("xdl", "memory_read", *_XDL_DONE, what="matrix write, then memory or LDS reads it"),
    _matrix("xdl", "valu_read", *_XDL_DONE, what="matrix write, then VALU reads it"),
    _matrix("xdl", "valu_write", *_XDL_DONE, what="matrix write, then VALU writes it"),
    _matrix("xdl_c", "valu_write", *_READ_BY_C, what="C of a matrix instruction, then VALU writes it"),
    _matrix("sgemm", "sgemm_c_same", *_CHAINED, what="fp32 matrix write, then the same instruction's C"),
    _matrix("sgemm", "sgemm_c", *_SGEMM_C, what="fp32 matrix write, then C of an unlike one"),
    _matrix("sgemm", "dgemm_c", *_SGEMM_C, what="fp32 matrix write, then C of an fp64 one"),
    _matrix("sgemm", "matrix_ab", *_SGEMM_DONE, what="fp32 matrix write, then A or B of another"),
    _matrix("sgemm", "memory_read", *_SGEMM_DONE, what="fp32 matrix write, then memory or LDS reads it"),
    _matrix("sgemm", "valu_read", *_SGEMM_DONE, what="fp32 matrix write, then VALU reads it"),
    _matrix("sgemm", "valu_write", *_SGEMM_DONE, what="fp32 matrix write, then VALU writes it"),
    _matrix("dgemm16", "sgemm_c", 9, 17, what="fp64 16x16 write, then C of an fp32 one"),
    _matrix("dgemm16", "dgemm_c", 9, 17, what="fp64 16x16 write, then C of an unlike fp64 one"),
    _matrix("dgemm16", "matrix_ab", 11, 19, what="fp64 16x16 write, then A or B of another"),
    _matrix("dgemm16", "memory_read", 18, 18, what="fp64 16x16 write, then memory or LDS reads it"),
    _matrix("dgemm16", "valu_read", 11, 19, what="fp64 16x16 write, then VALU reads it"),
    _matrix("dgemm16", "valu_write", 11, 19, what="fp64 16x16 write, then VALU writes it"),
    _matrix("dgemm4", "dgemm_c_same", 4, 4, what="fp64 4x4 write, then the same instruction's C"),
    _matrix("dgemm4", "sgemm_c", 4, 4, what="fp64 4x4 write, then C of an fp32 one"),
    _matrix("dgemm4", "dgemm_c", 4, 4, what="fp64 4x4 write, then C of an unlike fp64 one"),
    _matrix("dgemm4", "matrix_ab", 6, 6, what="fp64 4x4 write, then A or B of another"),
    _matrix("dgemm4", "memory_read", 9, 9, what="fp64 4x4 write, then memory or LDS reads it"),
    _matrix("dgemm4", "valu_read", 6, 6, what="fp64 4x4 write, then VALU reads it"),
    _matrix("dgemm4", "valu_write", 6, 6, what="fp64 4x4 write, then VALU writes it"),
    _software("valu_sgpr", "vmem_sgpr", 5, "VALU write of an SGPR, then vector memory reads it"),
    _software("valu_sgpr", "valu_sgpr", 2, "VALU write of an SGPR, then VALU reads it as a constant"),
    _software("valu_exec", "valu_sgpr", 2, "VALU write of EXEC, then VALU reads it as a constant"),
    _software("valu_sgpr", "lane_select", 4, "VALU write of an SGPR, then a lane is selected by it"),
    _software("valu_sgpr", "div_fmas", 4, "VALU write of VCC, then v_div_fmas"),
    _software("valu_sgpr", "zero_flag", 5, "VALU write of VCC, then VALU reads VCCZ"),
    _software("valu_exec", "zero_flag", 5, "VALU write of EXEC, then VALU reads EXECZ"),
    _software("valu_exec", "lane_exec", 4, "VALU write of EXEC, then v_readlane, v_readfirstlane or v_writelane"),
    _software("valu_exec", "dpp_exec", 5, "VALU write of EXEC, then a DPP instruction"),
    _software("valu_vgpr", "dpp_read", 2, "VALU write, then a DPP instruction reads it"),
    _software("valu_vgpr", "lane_read", 1, "VALU write, then v_readlane or v_readfirstlane reads it"),
    _software("shifted", "valu_read", 1, "VALU write of a part of a register, then VALU reads it"),
    _software("trans", "non_trans_read", 1, "transcendental result, then another VALU instruction reads it"),
    _software("wide_store", "any_write", 1, "store of more than 64 bits per lane, then its data is overwritten"),
    _software("wide_store", "valu_write", 2, "store of more than 64 bits per lane, then VALU overwrites its data"),
    _software("salu_m0", "m0_read", 1, "SALU write of M0, then LDS-DMA, s_sendmsg, s_movrel or an add-TID access"),
    _software("setreg", "getreg", 2, "s_setreg, then s_getreg or s_setreg of the same register"),
    Rule(
        "salu_m0",
        "m0_read_by_buffer",
        _both(1),
        dict.fromkeys(ARCHS, "LLVM's rule for every LDS-DMA; section 4.5 names global, scratch and buffer_store_lds"),
        what="SALU write of M0, then a buffer load into LDS",
    ),
    Rule(
        "wide_buffer_store",
        "valu_write",
        _both(1),
        dict.fromkeys(ARCHS, "llvm-project pull 197267 (seen on gfx950; section 4.5 asks for none)"),
        "buffer store of more than 64 bits with an SGPR offset, then VALU overwrites its data",
    ),
    Rule("valu_exec", "permlane_exec", {"gfx950": 4}, _SOFTWARE, "VALU write of EXEC, then v_permlane"),
    Rule("valu_vgpr", "permlane_read", {"gfx950": 2}, _SOFTWARE, "VALU write, then v_permlane reads it"),
)
"""Every rule. The pair of classes is the key; a class of consumer without a row for a producer needs no wait."""

BY_CLASSES = {(rule.producer, rule.consumer): rule for rule in RULES}

_SHAPE_PASSES = (
    (r"(4x4x\w+|4x4x4_16b\w*)_(f32|f16|bf16|bf16_1k|i8)|4x4x[12]bf16\w*", 2),
    (r"16x16x4_?f64", 8),
    (r"4x4x4(_4b_)?f64", 4),
    (r"16x16x(1|4)_4b_\w+|16x16x(1f32|4f16|2bf16|4i8|4bf16_1k)", 8),
    (r"32x32x(1|4)_2b_\w+|32x32x(1f32|4f16|2bf16|4i8|4bf16_1k)", 16),
    (r"16x16x4_?f32", 8),
    (r"32x32x2_?f32", 16),
    (r"16x16x\w+", 4),
    (r"32x32x\w+", 8),
)


def passes_of(opcode: str, cbsz: int = 0, blgp: int = 0) -> int:
    """Passes of a matrix instruction (CDNA4 ISA 7.1.2, table 28: clocks over four; CDNA3 ISA alike).

    `cbsz` and `blgp` are the formats of A and B of an f8f6f4 instruction: two narrow ones take half the passes.
    """
    shape = re.sub(r"^v_s?mf(ma|mac)_(scale_)?[a-z]+\d+_", "", opcode)
    if shape.endswith("f8f6f4"):
        passes = 8 if shape.startswith("16x16") else 16
        return passes // 2 if cbsz >= 2 and blgp >= 2 else passes
    for pattern, passes in _SHAPE_PASSES:
        if re.fullmatch(pattern, shape):
            return passes
    raise ValueError(f"{opcode}: the passes of this matrix instruction are not declared in tools/hazards/table.py")
