"""The source of sparse decode on sm_90, run on a CPU against fp64 on keys rounded to bf16 (kernels_on_host.py).

Records and rows with tiles of 64 query rows, v32 records with keys as the first operand (swap_ab), and the kernels for
few heads.
"""

from __future__ import annotations

import pytest
from kernels_on_host import HostKernel

from mla_suite.archs.sparse_attention import VALUES

KERNEL = HostKernel("sparse_records.cpp", "sm_90/sparse_decode")
TALL = ("v41", "v41any", "fp8x576", "fp8x512", "v32nope", "bf16x576", "bf16x512", "bf16x160")
INSTANCES = {
    **{name: {"KV_FORMAT": name, "D_V": VALUES.get(name, 512), "HOST_BLOCK_THREADS": 512} for name in TALL},
    **{
        f"{name}, max_logits": {
            **{"KV_FORMAT": name, "D_V": VALUES.get(name, 512), "HOST_BLOCK_THREADS": 512, "MAX_LOGITS": 1}
        }
        for name in TALL
        if name.startswith("bf16")
    },
    "16 rows": {"KV_FORMAT": "v32", "Q_ROWS": 16, "HOST_BLOCK_THREADS": 512},
    "32 rows": {"KV_FORMAT": "v32", "Q_ROWS": 32, "HOST_BLOCK_THREADS": 384},
    **{
        f"few heads, {record}": {"KV_FORMAT": record, "FEW_HEADS": 1, "HOST_BLOCK_THREADS": 384}
        for record in ("dsv4", "v41any", "v32", "v41")
    },
}
LEFT_OUT = ("v41", "v32nope", "fp8x512", "bf16x512", "bf16x160", "few heads, v32", "few heads, v41")
"""Of a default run."""
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
    "16 rows": [
        "16 2 1 1 plain 64 6 300",
        "5 3 2 2 sink 7 20 161",
        "8 2 3 4 sharp 1 400 333 16 9 40",
        "16 4 1 2 absent 64 3 200",
        "11 5 2 3 ragged 16 20 150 64 2 70",
        "16 6 1 2 lengths 64 4 100 2 7 30 1 1 1 5 5 90",
        "16 3 2 2 planned 64 6 500",
        "1 9 1 2 one 64 4 1",
        "7 3 4 5 absent 64 1 65 64 0 4",
    ],
    "32 rows": ["24 2 1 1 plain 64 6 300", "32 3 3 2 sink 16 30 333", "17 4 1 2 ragged 64 4 200"],
    "few heads, dsv4": [
        "16 2 1 1 plain 64 3 97 16 4 140",
        "12 3 2 2 sink 7 20 70 32 9 45",
        "16 3 1 1 sharp 1 400 400",
        "3 5 1 2 absent 16 9 90 64 0 4",
        "9 4 3 2 lengths 16 9 40 64 2 50 5 9 33 1 9 3",
        "8 3 2 2 planned 64 2 128 64 3 100",
        "1 24 1 1 one 16 4 1",
    ],
    "few heads, v41any": [
        "16 2 1 1 plain 64 3 97 16f 4 140",
        "5 3 2 2 sink 7fi 20 70 32i 9 45",
        "16 3 1 1 sharp 1f 400 400",
        "8 3 2 2 planned 64 2 128 64f 3 100",
        "3 5 1 2 ragged 16f 9 90 64f 0 4",
        "1 24 1 1 one 16f 4 1",
    ],
    "few heads, v32": ["16 2 1 1 plain 64 3 97", "7 4 2 3 ragged 16 20 150 64 2 70", "1 9 1 1 one 64 4 1"],
    "few heads, v41": ["16 2 1 1 plain 64 3 97 16i 4 40", "5 3 2 2 absent 7i 20 70", "1 12 1 1 one 64 4 1"],
}


@pytest.mark.parametrize(
    "instance", ["fp8x576", *(pytest.param(name, marks=pytest.mark.full) for name in ("16 rows", "few heads, v32"))]
)
def test_queries_in_two_tensors(tmp_path, instance):
    heads = (100, 20) if instance == "fp8x576" else (8, 5)
    KERNEL.check(tmp_path, INSTANCES[instance], [f"{n} 3 1 2 parts 16 9 90" for n in heads])


@pytest.mark.parametrize(
    "instance", [pytest.param(name, marks=[pytest.mark.full] if name in LEFT_OUT else []) for name in INSTANCES]
)
def test_results_are_those_of_fp64(tmp_path, instance):
    KERNEL.check(tmp_path, INSTANCES[instance], PROBLEMS[instance.removesuffix(", max_logits")])


TALL_FAULTS = {
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
SWAP_AB_FAULTS = {
    "keys overwritten early": ("mainloop.hpp", "if (c >= 2) wgmma_wait<1>();", "if (c >= 2) wgmma_wait<2>();"),
    "values overwritten early": ("mainloop.hpp", "wgmma_wait<VALUE_SETS - 1>();", "wgmma_wait<VALUE_SETS>();"),
    "values of the step before overwritten": ("mainloop.hpp", "if (c == 0) wait_for_vt();", ""),
    "odd columns at even ones' places": ("mainloop.hpp", "(vt_piece_ ^ 64) + 4 * 128", "vt_piece_ + 4 * 128"),
    "values not swizzled": ("lane_layout.hpp", "((2 * warp + matrix % 2) ^ t) * 16", "(2 * warp + matrix % 2) * 16"),
    "scores read early": ("mainloop.hpp", "    wgmma_wait<0>();\n    pin_accumulator(s);", "    pin_accumulator(s);"),
    "absent keys seen": ("mainloop.hpp", "mask_absent(s, present);\n  }", "static_cast<void>(present);\n  }"),
    "stages kept": ("mainloop.hpp", "if (!keeps_stages) release(kv);", ""),
    "O not rescaled": ("mainloop.hpp", "state_.rescale(i, exp2_approx(state_.max[i] - raised));", ""),
    "warpgroups not rescaled": ("merge.hpp", "state.rescale(i, factor_of(group_, count, Layout::row(i)));", ""),
    "results overwritten by keys": ("merge.hpp", "return group != 0;", "return false;"),
    "rope in the order of e4m3": ("queries.hpp", "(rope ? eight % 4 : eight / 2) * 4", "eight / 2 * 4"),
    "values of other keys": (
        "mainloop.hpp",
        "Layout::key_of_row(Layout::in_quad() * 2 + 1)",
        "Layout::key_of_row(Layout::in_quad() * 2)",
    ),
    "another step's indices": ("producer.hpp", "index = load_index(step + 2);", "index = load_index(step + 1);"),
}
FEW_HEADS_FAULTS = {
    "one P for two steps": ("mainloop.hpp", "p_stage_ ^= 1;", ""),
    "results over keys that are read": ("mainloop.hpp", "sync();  // all warps have multiplied the stage", ""),
    "absent keys seen": ("mainloop.hpp", "&& absent) s[i]", "&& absent && false) s[i]"),
    "keys of other warps": ("mainloop.hpp", "words + key / Traits::OWN_KEYS * 4", "words"),
    "O not rescaled": ("mainloop.hpp", "      sum_[i] *= factor;\n", "      sum_[i] *= factor;\n      continue;\n"),
    "a row's max of another": ("mainloop.hpp", "i == row / 8 * 2 + row % 2", "i == row / 8 * 2"),
    "scores read early": ("mainloop.hpp", "    wgmma_wait<0>();\n    pin_accumulator(s);", "    pin_accumulator(s);"),
    "queries of half the width": ("mainloop.hpp", "step / 2 * box + step % 2 * 32", "step / 2 * box"),
    "values of other keys": ("mainloop.hpp", "k * 2 * Traits::GROUP_BYTES)", "k * Traits::GROUP_BYTES)"),
}
SHOWN_BY = {
    "16 rows": ["5 4 1 1 absent 7 40 270", "5 2 1 1 sharp 1 400 400", "5 2 1 1 plain 64 6 2000"],
    "few heads, dsv4": [
        *("5 4 1 1 absent 7 40 270", "12 2 1 1 sharp 1 400 400", "16 1 1 1 plain 64 6 3000"),
        "3 5 1 2 absent 16 9 90",
    ],
}
"""Four work tiles in a row for one block; running maxima that are raised late; many steps; a short last step."""


def in_folder(faults, folder, kind):
    return {f"{kind}: {name}": (f"{folder}/{header}", *change) for name, (header, *change) in faults.items()}


FAULTS = TALL_FAULTS | in_folder(SWAP_AB_FAULTS, "swap_ab", "16 rows")
FAULTS |= in_folder(FEW_HEADS_FAULTS, "few_heads", "few heads, dsv4")


@KERNEL.each_of(FAULTS, "16 rows: absent keys seen", "few heads, dsv4: absent keys seen")
def test_a_fault_is_found(tmp_path, name):
    instance = name.split(": ")[0] if ": " in name else "v41any"
    if FAULTS[name][0] == "producer_gather.hpp":
        instance = "bf16x160" if name == "the next row copied" else "bf16x576"
    KERNEL.assert_found(tmp_path, INSTANCES[instance], FAULTS[name], SHOWN_BY.get(instance) or PROBLEMS[instance])
