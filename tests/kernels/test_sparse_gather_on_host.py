"""The source of sparse decode over bf16 rows on sm_90, run on a CPU and compared with fp64 (kernels_on_host.py)."""

from __future__ import annotations

import pytest
from kernels_on_host import HostKernel

KERNEL = HostKernel("sparse_gather.cpp", "sm_90/sparse_decode")
PROBLEMS = {
    "bf16x576": [
        "64 3 200 1 1 16 plain",
        "20 5 40 1 2 1 lengths",
        "100 2 33 1 1 7 sink",
        "16 2 300 3 2 16 plain",
        "8 3 129 2 1 16 lengths",
        "64 2 96 1 1 16 sharp",
        "64 2 64 1 1 16 no_max",
    ],
    "bf16x512": ["64 3 200 1 1 16 lengths", "5 2 300 3 1 1 sink"],
}


def constants(record):
    return {"KV_FORMAT": record, "HOST_BLOCK_THREADS": 512}


@pytest.mark.parametrize("record", PROBLEMS)
def test_results_are_those_of_fp64(tmp_path, record):
    KERNEL.check(tmp_path, constants(record), PROBLEMS[record])


PRODUCER = "producer_gather.hpp"
FAULTS = {
    "stages overwritten": (PRODUCER, "this->wait_for_empty(kv_);\n    copy_key", "copy_key"),
    "absent keys seen": (PRODUCER, "present_ = __ballot_sync(~0u, token.present);", "present_ = ~0u;"),
    "keys not swizzled": (PRODUCER, "(to ^ 4 << 4) + 4 * 128", "to + 4 * 128"),
}


@KERNEL.each_of(FAULTS)
def test_a_fault_is_found(tmp_path, name):
    KERNEL.assert_found(tmp_path, constants("bf16x576"), FAULTS[name], ["64 2 300 1 1 16 plain"])
