"""bf16 queries of e4m3 caches that decode on sm_90 multiplies as fp16, executed on a CPU and compared with fp64.

kernels_on_host.py says what such a run shows and what not.
"""

from __future__ import annotations

from pathlib import Path

from kernels_on_host import check, compiled, ran, with_a_fault
from planted import each_of

CONSTANTS = {"DTYPE": "bf16", "KV_SOURCE": "fp8", "SCALE_Q": 1, "HOST_BLOCK_THREADS": 512}
PROBLEMS = [
    "16 1 64 1 1 plain 128 300 1 0 33 64",
    "64 1 7 3 2 sink+large 70 1 0 330",
    "8 2 32 1 3 ragged+small 100 30 200",
    "16 1 64 3 2 planned 100 330 200",
    "100 1 64 2 1 all_keys+large 300 65",
    "40 1 64 1 1 sharp 300",
]


def program(folder: Path, *first: Path) -> Path:
    return compiled("narrow.cpp", folder / "scaled", CONSTANTS, *first)


def test_results_are_those_of_fp64(tmp_path):
    built = program(tmp_path)
    for problem in PROBLEMS:
        check(built, problem)


FAULTS = {
    "not scaled": ("scaled_queries.hpp", "min(max(127 + 14 - exponent, -112), 112);", "0;"),
    "the largest of half a row": ("scaled_queries.hpp", "size = max(size, __shfl_xor_sync(~0u, size, 2));", ""),
    "the wrong row": ("scaled_queries.hpp", "+ half * 512 +", "+ half * 256 +"),
    "the other row's scale": ("mainloop_qk.hpp", "? row_scale_[half] : scale_", "? row_scale_[0] : scale_"),
    "converted before it arrives": (
        "mainloop_qk.hpp",
        "      mbarrier_wait(barriers_.kv_full(kv.stage), kv.parity);\n      stage =",
        "      stage =",
    ),
}


@each_of(FAULTS, "not scaled", place=lambda header, right, broken: (f"sm_90/decode/{header}", right))
def test_a_fault_is_found(tmp_path, name):
    header, right, broken = FAULTS[name]
    own = with_a_fault(tmp_path / "csrc", f"sm_90/decode/{header}", right, broken)
    built = program(tmp_path, own)
    found = [ran(built, f"64 1 64 1 1 {what} 300 90") for what in ("plain", "large", "small")]
    assert any(done.returncode for done in found), found
