"""bf16 queries of e4m3 caches that decode on sm_90 multiplies as fp16, executed on a CPU and compared with fp64.

kernels_on_host.py says what such a run shows and what not.
"""

from __future__ import annotations

from kernels_on_host import HostKernel

KERNEL = HostKernel("dense.cpp", "sm_90/decode")
CONSTANTS = {"DTYPE": "bf16", "KV_SOURCE": "fp8", "SCALE_Q": 1, "HOST_BLOCK_THREADS": 512}
PROBLEMS = [
    "16 1 64 1 1 plain 128 300 1 0 33 64",
    "64 1 7 3 2 sink+large 70 1 0 330",
    "8 2 32 1 3 ragged+small 100 30 200",
    "16 1 64 3 2 planned 100 330 200",
    "100 1 64 2 1 all_keys+large 300 65",
    "40 1 64 1 1 sharp 300",
]


def test_results_are_those_of_fp64(tmp_path):
    KERNEL.check(tmp_path, CONSTANTS, PROBLEMS)


FAULTS = {
    "not scaled": ("scaled_queries.hpp", "min(max(127 + 14 - exponent, -112), 112);", "0;"),
    "the largest of half a row": ("scaled_queries.hpp", "size = max(size, __shfl_xor_sync(~0u, size, 2));", ""),
    "the wrong row": ("scaled_queries.hpp", "+ half * 512 +", "+ half * 256 +"),
    "the other row's scale": ("mainloop_qk.hpp", "? row_scale_[half] : scale_", "? row_scale_[0] : scale_"),
    "not scaled back": ("mainloop_qk.hpp", "(scale_ * inverse_power(power[half]))", "(scale_)"),
}


@KERNEL.each_of(FAULTS, "not scaled")
def test_a_fault_is_found(tmp_path, name):
    problems = [f"64 1 64 1 1 {what} 300 90" for what in ("plain", "large", "small")]
    KERNEL.assert_found(tmp_path, CONSTANTS, FAULTS[name], problems)
