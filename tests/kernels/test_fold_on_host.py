"""Batch-invariant splits that a CTA of decode on sm_90 folds, executed on a CPU and compared with fp64.

kernels_on_host.py says what such a run shows and what not. That folded splits and splits that combine folds have the
same bits is shown on a GPU (tests/gpu/test_fold_on_gpu.py).
"""

from __future__ import annotations

import pytest
from kernels_on_host import HostKernel

KERNEL = HostKernel("dense.cpp", "sm_90/decode")
CONSTANTS = {"KV_SOURCE": "tma", "FOLD": 1, "HOST_BLOCK_THREADS": 512}
PROBLEMS = [
    "16 1 64 1 1 fold64 128 300 1 0 33 64",
    "64 1 32 3 2 sink+fold32 70 1 0 330",
    "8 2 96 2 4 sharp+fold64 500 100",
    "8 2 32 1 3 ragged+fold32 100 30 200",
    "16 1 64 3 2 planned+fold32 100 330 200",
    "100 1 64 1 1 all_keys+fold128 300 65",
]


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.full)])
def test_results_are_those_of_fp64(tmp_path, dtype):
    KERNEL.check(tmp_path, CONSTANTS | {"DTYPE": dtype}, PROBLEMS)


FAULTS = {
    "the last split lost": ("mainloop_pv.hpp", "      if (!goes_on) break;", "      if (goes_on) break;"),
    "never begun": ("mainloop_pv.hpp", "        sum.begin(o_, factors);", "        sum.add(o_, factors);"),
    "not scaled": ("fold.hpp", "factors.of_split[i / 2]);", "1.0f);"),
    "the sum so far not scaled": ("fold.hpp", "factors.before[i / 2], four[i]);", "1.0f, four[i]);"),
    "one split's denominator for all": ("fold.hpp", "      inverse[half] = fold.scale();\n", ""),
    "two warpgroups' sums in one place": ("fold.hpp", "(block(params) * 2 + group)", "(block(params) * 2)"),
    "O not cleared": (
        "mainloop_pv.hpp",
        "i < VALUES; ++i) o_[0][i] = o_[LAST_PRODUCT][i] = 0.0f;\n      command = next_command();\n",
        "i < 1; ++i) o_[0][i] = o_[LAST_PRODUCT][i] = 0.0f;\n      command = next_command();\n",
    ),
}


@KERNEL.each_of(FAULTS, "not scaled")
def test_a_fault_is_found(tmp_path, name):
    problems = ["16 1 64 1 1 fold64 300 33 200", "100 1 64 1 1 sharp+fold32 200"]
    KERNEL.assert_found(tmp_path, CONSTANTS | {"DTYPE": "bf16"}, FAULTS[name], problems)
