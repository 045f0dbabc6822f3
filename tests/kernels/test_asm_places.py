"""Where inline assembly may stand. A model of CUDA kernels on a CPU replaces the folder of sm_90's instructions."""

from __future__ import annotations

import re

from mla_suite.archs import CSRC

ASM = re.compile(r"\basm\b(?=[^\n]*\()")
PTX = "sm_90/ptx"
AMD = {
    "cdna/common/accum_registers.hpp",  # which of a wave's two register files holds a value
    "cdna/common/kernel_params.hpp",
    "cdna/common/lds_copy.hpp",
    "cdna/common/types.hpp",
    "cdna/decode/mainloop_row_split.hpp",  # which of its register files holds a wave's number
    "cdna/decode/mfma_16x16x32/producer_lds_ring.hpp",
    "cdna/decode/tile_copy.hpp",  # a wait state at the end of a turn
    "cdna/sparse_decode/kv_format.hpp",
}


def code(text: str) -> str:
    return re.sub(r"//.*", "", text)


def test_assembly_stands_in_named_places_alone():
    sources = [path for path in CSRC.rglob("*") if path.suffix in {".hpp", ".cu", ".hip"}]
    holding = {path.relative_to(CSRC).as_posix() for path in sources if ASM.search(code(path.read_text()))}
    ptx = {name for name in holding if name.startswith(f"{PTX}/")}
    assert len(ptx) > 5
    assert holding - ptx == AMD
