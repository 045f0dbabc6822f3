"""The source of decode over un-rotated caches on sm_90, executed on a CPU and compared with fp64.

The definition rounds rotated keys to the cache's type, so an lse within 1e-5 needs the same bits of them.
kernels_on_host.py says what such a run shows and what not.
"""

from __future__ import annotations

import pytest
from kernels_on_host import HostKernel

KERNEL = HostKernel("dense.cpp", "sm_90/decode")
FULL = pytest.mark.full  # a default run takes each type and each source of keys once
INSTANCES = [
    ("bf16", "tma"),
    pytest.param("fp16", "tma", marks=FULL),
    pytest.param("bf16", "cp_async", marks=FULL),
    ("fp16", "cp_async"),
]
PROBLEMS = {
    "tma": [
        "16 1 64 1 1 plain 128 300 1 0 33 64",
        "64 1 32 3 2 sink 70 1 0 330",
        "8 2 96 3 4 sharp 500 100",
        "8 2 32 1 3 ragged 100 30 200",
        "16 1 64 3 2 planned 100 330 200",
        "100 1 64 2 1 all_keys 300 65",
        "16 1 64 2 1 descaled 200 33",
        "16 1 64 1 1 descaled_nan 100 33",
        "16 1 64 2 1 window40 128 300 1 0 33 64",
        "8 2 32 3 2 ragged+planned+window31 100 330 200",
        "4 16 64 1 2 tree 300 65 17",
    ],
    "cp_async": [
        "16 1 1 1 1 plain 128 300 1 0 33 64",
        "64 1 7 3 2 sink 70 1 0 330",
        "8 2 16 3 4 sharp 500 100",
        "8 2 48 1 3 ragged 100 30 200",
        "16 1 16 3 2 planned 100 330 200",
        "16 1 16 2 1 descaled 200 33",
        "2 40 7 2 2 window20 200 47",
        "2 32 16 1 2 ragged+tree 200 33",
    ],
}


def constants(dtype, source):
    return {"MASKED": 1, "UNROTATED": 1, "DTYPE": dtype, "KV_SOURCE": source, "HOST_BLOCK_THREADS": 512}


@pytest.mark.parametrize(("dtype", "source"), INSTANCES)
def test_results_are_those_of_fp64(tmp_path, dtype, source):
    KERNEL.check(tmp_path, constants(dtype, source), PROBLEMS[source])


FAULTS = {
    "turned the other way": ("tma", "rotate_rope.hpp", "as_float(sin[2 * i + e]));", "-as_float(sin[2 * i + e]));"),
    "keys taken twice": ("tma", "rotate_rope.hpp", "+ lane / 8 % 2 * 4", "+ lane / 8 % 2 * 3"),
    "rotated before they arrive": (
        "tma",
        "rotate_rope.hpp",
        "    mbarrier_wait(barriers_.rope_full(kv_.stage), kv_.parity);\n",
        "",
    ),
    "the table read past the tile": ("tma", "producer.hpp", "min(end - first, BLOCK_N) * Traits", "BLOCK_N * Traits"),
    "a stage overwritten": ("tma", "producer.hpp", "    mbarrier_wait(stage.empty, stage.parity ^ 1);\n", ""),
    "a stage published early": ("tma", "traits.hpp", "? 1 + ROTATORS : 128", "? 1 : 128"),
    "halves exchanged": ("tma", "rotate_rope.hpp", "st_shared_v2(high, quad.high)", "st_shared_v2(high, quad.low)"),
    "nobody says that keys arrived": (
        "cp_async",
        "producer_cp_async.hpp",
        "      cp_async_mbarrier_arrive(barriers_.rope_full(kv.stage));\n",
        "",
    ),
    "NaN before the window": (
        "tma",
        "mainloop_qk.hpp",
        "        clear_values(kv_.stage, 0, tile_.first_key - first);\n",
        "",
    ),
    "siblings seen": ("tma", "query_rows.hpp", "return tree_bits(", "return ~0u; tree_bits("),
    "other positions": ("cp_async", "producer.hpp", "static_cast<int64_t>(first) * Traits", "0 * Traits"),
}


@KERNEL.each_of({name: fault for name, (_, *fault) in FAULTS.items()}, "rotated before they arrive")
def test_a_fault_is_found(tmp_path, name):
    source, *fault = FAULTS[name]
    masked = {"NaN before the window": "window40", "siblings seen": "tree"}.get(name)
    problem = "16 1 64 1 1 plain 300 33 90" if masked is None else f"4 4 64 1 1 {masked} 300 33 90"
    KERNEL.assert_found(tmp_path, constants("bf16", source), fault, [problem])
