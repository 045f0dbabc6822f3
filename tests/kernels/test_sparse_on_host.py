"""The source of sparse decode over records and rows on sm_90, run on a CPU against fp64 (kernels_on_host.py)."""

from __future__ import annotations

import pytest
from kernels_on_host import HostKernel

from mla_suite.archs.sparse_attention import VALUES

KERNEL = HostKernel("sparse_records.cpp", "sm_90/sparse_decode")
PROBLEMS = {
    "v41": ["16 2 1 1 plain 64 3 97 16i 4 40", "5 3 2 2 absent 7i 20 70", "1 12 1 1 one 64 4 1", "1 9 1 1 one 16i 4 1"],
    "v41any": [
        "16 2 1 1 plain 64 3 97 16f 4 140",
        "70 2 2 1 sink 7fi 20 70 32i 9 45",
        "4 6 3 2 lengths 16f 9 40 64 2 50 5fi 9 33 1i 9 3",
        "8 3 2 2 planned 64 2 128 64f 3 100",
        "1 24 1 1 one 16f 4 1",
        "3 5 1 2 ragged 16f 9 90 64f 0 4",
    ],
    "fp8x576": [
        "16 2 1 1 plain 64 3 97",
        "70 2 2 1 sink 7 20 70 32 9 45",
        "4 6 3 2 lengths 16 9 40 64 2 50 1 9 3",
        "8 3 2 2 planned 64 2 128 1 30 9",
        "1 24 1 1 one 16 4 1",
        "3 5 1 2 ragged 16 9 90 64 0 4",
    ],
    "fp8x512": ["16 2 1 1 absent 64 3 97", "1 12 1 1 one 64 4 1"],
    "v32nope": ["16 2 1 1 plain 64 3 97", "1 12 1 1 one 64 4 1"],
    "bf16x576": [
        "64 3 1 1 plain 16 40 200",
        "20 5 1 2 lengths 1 40 40",
        "100 2 1 1 sink 7 40 33",
        "16 2 3 2 plain 16 40 300",
        "8 3 2 1 ragged 16 40 129",
        "64 2 1 1 sharp 16 40 96",
        "64 2 1 1 no_max 16 40 64",
        "9 2 1 2 absent 64 0 40",
    ],
    "bf16x512": ["64 3 1 1 lengths 16 40 200 2 9 7", "5 2 3 1 sink 1 40 300"],
    "bf16x160": [
        "64 3 1 1 plain 16 40 700 3 9 7",
        "16 2 1 1 plain 1 2 64",
        "100 2 2 2 lengths 1 40 640",
        "16 2 3 2 sink 7 40 300",
        "8 3 2 1 ragged 16 40 129",
        "8 3 2 2 planned 16 40 480",
        "64 2 1 1 sharp 16 40 96",
        "9 2 1 2 absent 64 0 40",
    ],
}


def constants(record):
    return {"KV_FORMAT": record, "D_V": VALUES.get(record, 512), "HOST_BLOCK_THREADS": 512}


@pytest.mark.parametrize(
    "record",
    [
        *("v41any", "fp8x576", "bf16x576", "bf16x512", "bf16x160"),
        *(pytest.param(record, marks=pytest.mark.full) for record in ("v41", "v32nope", "fp8x512")),
    ],
)
def test_results_are_those_of_fp64(tmp_path, record):
    KERNEL.check(tmp_path, constants(record), PROBLEMS[record])


FAULTS = {
    "pools share a stage": (
        "staged_lists.hpp",
        "int stages = (keys + STAGE_KEYS - 1) / STAGE_KEYS;",
        "int stages = keys / STAGE_KEYS;",
    ),
    "another pool's list": ("staged_lists.hpp", "(begin - start));", "(begin));"),
    "absent keys seen": ("staged_lists.hpp", "start + keys);", "stages * STAGE_KEYS);"),
    "scales of the page before": ("kv_format.hpp", "(values - scales)) / SCALE_BYTES", "values) / SCALE_BYTES"),
    "halves of bytes exchanged": ("convert_fp4.hpp", "upper | negative, 0x5140", "upper | negative, 0x4051"),
    "signs lost": ("convert_fp4.hpp", "<< 1 & 0x80808080u", "<< 1 & 0u"),
    "4-bit values not swizzled": ("gather_layout.hpp", "(half * 4 ^ key) * 16", "half * 4 * 16"),
    "the other scale": ("gather_layout.hpp", "scales[part / 2] >> part % 2 * 8", "scales[part / 2]"),
    "raw tokens overwritten": (
        "producer_dequant.hpp",
        "cp_async_wait<RAW_STAGES - 2>();",
        "cp_async_wait<RAW_STAGES>();",
    ),
    "stages overwritten": ("producer_gather.hpp", "this->wait_for_empty(kv_);\n    copy_key", "copy_key"),
    "absent rows seen": ("producer_gather.hpp", "present_ = __ballot_sync(~0u, token.present);", "present_ = ~0u;"),
    "rows not swizzled": ("producer_gather.hpp", "(to ^ 4 << 4) + 4 * 128", "to + 4 * 128"),
    "the next row copied": ("producer_gather.hpp", "piece() < Traits::HEAD_DIM_QK % 64 / 8", "true"),
}
NARROW = "the next row copied"


@KERNEL.each_of(FAULTS)
def test_a_fault_is_found(tmp_path, name):
    gathered = "bf16x160" if name == NARROW else "bf16x576"
    record = gathered if FAULTS[name][0] == "producer_gather.hpp" else "v41any"
    KERNEL.assert_found(tmp_path, constants(record), FAULTS[name], PROBLEMS[record])
