"""Decode on sm_90 with blocks of 64 query rows, its source executed on a CPU and compared with fp64.

kernels_on_host.py says what such a run shows and what not. The definition rounds rotated keys to the type of an
un-rotated cache, so an lse within 1e-5 needs the same bits of them. Sums of fp8 products have all bits of fp32 here.
That folded splits and splits that combine folds have the same bits is shown on a GPU (tests/gpu/test_fold_on_gpu.py).
"""

from __future__ import annotations

import pytest
from kernels_on_host import HostKernel, without

KERNEL = HostKernel("dense.cpp", "sm_90/decode")
TYPES = {name: {"DTYPE": name} for name in ("bf16", "fp16", "fp8")}
SOURCES = {name: {"KV_SOURCE": name} for name in ("tma", "cp_async", "fp8", "fp8_scores")}
WIDTHS = {320: 256, 288: 256, 160: 128}  # narrow rows and their latents
NARROW = {width: {"D_QK": width, "D_V": latent} for width, latent in WIDTHS.items()}
KINDS = {"un-rotated": {"MASKED": 1, "UNROTATED": 1}, "scaled": {"SCALE_Q": 1}, "folded": {"FOLD": 1}}
KINDS |= {"plain": {}, "scores": {}}
INSTANCES = [
    *(("un-rotated", dtype, source) for dtype in ("bf16", "fp16") for source in ("tma", "cp_async")),
    *(
        (width, *of)
        for width in WIDTHS
        for of in (("bf16", "tma"), ("bf16", "cp_async"), ("bf16", "fp8"), ("fp8", "fp8"))
    ),
    *(("scaled", "bf16", "fp8"), ("folded", "bf16", "tma"), ("folded", "fp16", "tma"), ("scores", "fp8", "fp8_scores")),
]
DEFAULT = (
    *(("un-rotated", "bf16", "tma"), ("un-rotated", "fp16", "cp_async")),
    *((288, "bf16", "tma"), (160, "bf16", "cp_async"), (160, "fp8", "fp8")),
    *(("scaled", "bf16", "fp8"), ("folded", "bf16", "tma"), ("scores", "fp8", "fp8_scores")),
)
"""Each kind with each source of keys."""

IN_PARTS = [
    *("16 1 64 1 1 parts 128 300 1 0 33 64", "128 1 64 1 2 parts 200 33", "20 1 64 2 1 parts+sink 200 33"),
    *("8 2 32 1 3 parts+ragged 100 30 200", "32 4 7 3 2 parts+planned 100 330 200", "4 3 64 1 1 parts+sharp 50 70"),
]
PLANNED_FOLDS = ["16 1 64 3 2 planned+fold32 100 330 200", "16 1 64 3 1 planned+fold32 100 330 200"]
OUTGROWN = (
    "16 1 64 1 1 sink+planned+fold64 300 60"  # the plan's only work tile of the first sequence is five splits long
)
FIRST, RAGGED, PLANNED = "16 1 64 1 1 plain 128 300 1 0 33 64", "8 2 32 1 3 ragged 100 30 200", "planned 100 330 200"
PROBLEMS = {
    ("un-rotated", "tma"): [
        *(FIRST, "64 1 32 3 2 sink 70 1 0 330", "8 2 96 3 4 sharp 500 100", RAGGED, f"16 1 64 3 2 {PLANNED}"),
        *("100 1 64 2 1 all_keys 300 65", "16 1 64 2 1 descaled 200 33", "16 1 64 1 1 descaled_nan 100 33"),
        *("16 1 64 2 1 window40 128 300 1 0 33 64", "8 2 32 3 2 ragged+planned+window31 100 330 200"),
        "4 16 64 1 2 tree 300 65 17",
    ],
    ("un-rotated", "cp_async"): [
        *("16 1 1 1 1 plain 128 300 1 0 33 64", "64 1 7 3 2 sink 70 1 0 330", "8 2 16 3 4 sharp 500 100"),
        *("8 2 48 1 3 ragged 100 30 200", f"16 1 16 3 2 {PLANNED}", "16 1 16 2 1 descaled 200 33"),
        *("2 40 7 2 2 window20 200 47", "2 32 16 1 2 ragged+tree 200 33"),
    ],
    "scaled": [
        *(FIRST, "64 1 7 3 2 sink+large 70 1 0 330", "8 2 32 1 3 ragged+small 100 30 200", f"16 1 64 3 2 {PLANNED}"),
        *("100 1 64 2 1 all_keys+large 300 65", "40 1 64 1 1 sharp 300"),
    ],
    "folded": [
        *(
            "16 1 64 1 1 fold64 128 300 1 0 33 64",
            "64 1 32 3 2 sink+fold32 70 1 0 330",
            "8 2 96 2 4 sharp+fold64 500 100",
        ),
        *("8 2 32 1 3 ragged+fold32 100 30 200", *PLANNED_FOLDS),
        "16 1 64 5 2 planned+sink+fold64 300 260 130 40",
        "100 1 64 3 1 all_keys+fold128 300 65 200",
        OUTGROWN,
    ],
    "scores": [
        *(FIRST, "64 1 32 3 2 sink 70 1 0 330", RAGGED, f"48 1 64 3 2 {PLANNED}", "100 1 96 2 1 all_keys 300 65"),
        "40 1 64 1 1 sharp 300",
    ],
    "narrow": [
        *("16 1 64 1 1 plain 128 700 1 0 33 64", "64 1 32 3 2 sink 70 1 0 330", RAGGED, f"16 1 64 3 2 {PLANNED}"),
        "100 1 64 2 1 all_keys 300 65",
    ],
}


def constants(kind, dtype, source):
    return {**TYPES[dtype], **SOURCES[source], **(KINDS | NARROW)[kind], "HOST_BLOCK_THREADS": 512}


def problems(kind, source):
    if kind not in WIDTHS:
        return PROBLEMS.get((kind, source)) or PROBLEMS[kind]
    return [text.replace(" 64 ", " 7 ", 1) if source == "cp_async" else text for text in PROBLEMS["narrow"]]


@pytest.mark.parametrize(
    ("kind", "dtype", "source"),
    [point if point in DEFAULT else pytest.param(*point, marks=pytest.mark.full) for point in INSTANCES],
)
def test_results_are_those_of_fp64(tmp_path, kind, dtype, source):
    KERNEL.check(tmp_path, constants(kind, dtype, source), problems(kind, source))


@pytest.mark.parametrize(
    ("kind", "source"),
    [("plain", "tma"), ("plain", "cp_async")]
    + [pytest.param(*point, marks=pytest.mark.full) for point in (("scaled", "fp8"), (288, "tma"), (320, "cp_async"))],
)
def test_queries_in_two_tensors(tmp_path, kind, source):
    """With heads that fill a block, with fewer and with some that a block's rows are not full of."""
    problems = [text for text in IN_PARTS if source == "cp_async" or " 7 " not in text]
    KERNEL.check(tmp_path, constants(kind, "bf16", source), problems)


EXTENDS = {
    "plain": [
        *("4 50 64 1 1 spoiled30 70", "4 50 64 3 2 spoiled30+planned 170 300", "16 40 64 2 1 sink 20 100"),
        "8 40 32 2 3 ragged+spoiled20 60 90 30",
    ],
    "window": ["4 50 64 1 1 window20+spoiled16 170", "4 50 64 2 2 window100+spoiled16+planned 170 260"],
    "folded": [
        *("4 50 64 1 1 fold64+spoiled30 70", "4 50 64 3 2 planned+fold32+spoiled30 170 100"),
        "8 40 64 3 2 planned+sink+fold64 170 40",
    ],
}


@pytest.mark.parametrize(
    ("kind", "dtype", "source"),
    [
        *(("un-rotated", "bf16", "tma"), ("folded", "bf16", "tma"), ("scores", "fp8", "fp8_scores")),
        *(
            pytest.param(*point, marks=pytest.mark.full)
            for point in (("plain", "bf16", "tma"), ("un-rotated", "fp16", "cp_async"), (160, "fp8", "fp8"))
        ),
    ],
)
def test_row_tiles_of_an_extend_leave_out_what_none_of_their_rows_sees(tmp_path, kind, dtype, source):
    problems = EXTENDS["folded" if kind == "folded" else "plain"] + EXTENDS["window"] * (kind == "un-rotated")
    KERNEL.check(tmp_path, constants(kind, dtype, source), problems)


PLAIN, WINDOW, TREE = (f"{what} 300 33 90" for what in ("16 1 64 1 1 plain", "4 4 64 1 1 window40", "4 4 64 1 1 tree"))
QK, PV, FOLD, ROTATE = "mainloop_qk.hpp", "mainloop_pv.hpp", "fold.hpp", "rotate_rope.hpp"
PRODUCER, CP_ASYNC, FP8 = "producer.hpp", "producer_cp_async.hpp", "producer_fp8.hpp"
FAULTS_OF = {
    ("un-rotated", "bf16", "tma"): {
        "turned the other way": (ROTATE, "as_float(sin[2 * i + e]));", "-as_float(sin[2 * i + e]));"),
        "keys taken twice": (ROTATE, "+ lane / 8 % 2 * 4", "+ lane / 8 % 2 * 3"),
        "rotated before they arrive": without(
            ROTATE, "    mbarrier_wait(barriers_.rope_full(kv_.stage), kv_.parity);\n"
        ),
        "the table read past the tile": (PRODUCER, "min(end - first, BLOCK_N) * Traits", "BLOCK_N * Traits"),
        "a stage overwritten": without(PRODUCER, "    mbarrier_wait(stage.empty, stage.parity ^ 1);\n"),
        "a stage published early": ("traits.hpp", "? 1 + ROTATORS : 128", "? 1 : 128"),
        "halves exchanged": (ROTATE, "st_shared_v2(high, quad.high)", "st_shared_v2(high, quad.low)"),
        "NaN before the window": without(QK, "        clear_values(kv_.stage, 0, tile_.first_key - first);\n"),
        "siblings seen": ("query_rows.hpp", "return tree_bits(", "return ~0u; tree_bits("),
        "keys behind an extend's row tile": (
            *("tile_scheduler.hpp", "max(min(tile_.end_key, tile_.length - (count - 1 - last)), tile_.first_key);"),
            "tile_.end_key;",
        ),
        "keys before the windows of an extend's row tile": (
            *("tile_scheduler.hpp", "first_key(tile_.length, count - heads", "first_key(0, count - heads"),
        ),
    },
    ("un-rotated", "bf16", "cp_async"): {
        "nobody says that keys arrived": without(
            CP_ASYNC, "      cp_async_mbarrier_arrive(barriers_.rope_full(kv.stage));\n"
        ),
        "other positions": (PRODUCER, "static_cast<int64_t>(first) * Traits", "0 * Traits"),
    },
    (160, "bf16", "tma"): {
        "a block of the map twice": (
            *("prologue_prefetch.hpp", "WHOLE_BLOCKS ? 0 : block * 64", "WHOLE_BLOCKS ? 0 : 0"),
        ),
        "columns of the other warpgroup": (
            "cluster/none.hpp",
            "return group * Traits::WARPGROUP_COLUMNS",
            "return group * 2 * Traits::WARPGROUP_COLUMNS",
        ),
        "queries of half a row": ("q_operand.hpp", "HALF = 2 * Traits::Q_BOXES;", "HALF = Traits::Q_STEPS / 2;"),
        "narrow values behind the last key stay": (
            *(QK, "      clear_values(stage_multiplied_last(), tile_.end_key - first, BLOCK_N);\n", "      ;\n"),
        ),
        "buffers in a stage": (
            *("traits.hpp", "<= STAGE_BYTES ? 0 : 8 * OUT_BUFFER_BYTES;", "<= STAGE_BYTES ? 0 : 0;"),
        ),
    },
    (160, "bf16", "cp_async"): {"the next row copied": (CP_ASYNC, "valid && in_row(c)", "valid")},
    (160, "fp8", "fp8"): {
        "the next query converted": (FP8, "half == 1 ? Traits::LAST_Q_BOXES", "half == 1 ? Traits::Q_BOXES"),
        "a raw stage too many": (FP8, "copied_ - converted_ < AHEAD", "copied_ - converted_ <= AHEAD"),
    },
    ("scaled", "bf16", "fp8"): {
        "not scaled": ("scaled_queries.hpp", "min(max(127 + 14 - exponent, -112), 112);", "0;"),
        "the largest of half a row": without("scaled_queries.hpp", "size = max(size, __shfl_xor_sync(~0u, size, 2));"),
        "the wrong row": ("scaled_queries.hpp", "+ half * 512 +", "+ half * 256 +"),
        "the other row's scale": ("qk_rows.hpp", "? row_scale_[half] : scale_", "? row_scale_[0] : scale_"),
        "not scaled back": (QK, "(scale_ * inverse_power(power[half]))", "(scale_)"),
    },
    ("folded", "bf16", "tma"): {
        "the last split lost": (PV, "      if (!goes_on) {\n", "      if (goes_on) {\n"),
        "a state divided": without(QK, "        inverse[0] = inverse[1] = 1.0f;\n"),
        "another sequence's split": (
            "tile_scheduler.hpp",
            "words.x) != tile_.sequence || warp_uniform(words.y) != tile_.end_key) break;",
            "words.x) == -2) break;",
        ),
        "combine not told": without("producer_tma.hpp", "if constexpr (Traits::FOLDS) scheduler.tell_combine();"),
        "never begun": (PV, "        sum.begin(o_, factors);", "        sum.add(o_, factors);"),
        "a split not scaled": (FOLD, "factors.of_split[i / 2]);", "1.0f);"),
        "the sum so far not scaled": (FOLD, "factors.before[i / 2], four[i]);", "1.0f, four[i]);"),
        "one split's denominator for all": without(FOLD, "      inverse[half] = fold.scale();\n"),
        "two warpgroups' sums in one place": (FOLD, "(block(params) * 2 + group)", "(block(params) * 2)"),
        "two warpgroups' sums in one shared place": (
            *(FOLD, "(group * 128 + warpgroup_thread()) * 16", "warpgroup_thread() * 16"),
        ),
        "a sink in every split": without(
            QK, "if (tile_.partial_row < 0 && params_.attn_sink != nullptr) return tile_.keys();"
        ),
        "a tile that is not in shared memory": (FOLD, "tile >= SHARED_TILES", "tile > SHARED_TILES"),
        "O not cleared": (
            PV,
            "i < VALUES; ++i) o_[0][i] = o_[LAST_PRODUCT][i] = 0.0f;\n      command = next_command();\n",
            "i < 1; ++i) o_[0][i] = o_[LAST_PRODUCT][i] = 0.0f;\n      command = next_command();\n",
        ),
    },
    ("plain", "bf16", "tma"): {
        "a rope part of the latent part's map": (
            PRODUCER,
            "rope ? params_.q_rope_map : params_.q_map",
            "params_.q_map",
        ),
        "rope blocks counted behind the latent ones": (PRODUCER, "rope ? block - LATENT_BLOCKS : block", "block"),
        "boxes over each other": (PRODUCER, "++block, to += Traits::q_box_bytes(params_)", "++block"),
        "each block from its token's first head": (
            *(PRODUCER, "head = heads.head(first_row(), in_sequence);", "head = 0;"),
        ),
    },
    ("scores", "fp8", "fp8_scores"): {
        "half of a row's queries twice": (
            *("q_as_stored.hpp", "&steps_[4 * (half * HALF_STEPS + k)]", "&steps_[4 * k]"),
        ),
        "pieces of one side": ("q_as_stored.hpp", "row * PITCH + side * 16;", "row * PITCH;"),
        "blocks of 16-bit keys": (
            *("q_as_stored.hpp", "k / 2 * Traits::RAW_BLOCK_BYTES", "k / 4 * Traits::RAW_BLOCK_BYTES"),
        ),
        "values in another order": (FP8, "((part ^ key / 2 % 4) << 4)", "(part << 4)"),
        "a stage copied while scores are made of it": (*("kernel.hpp", "Traits::SCORES_AS_STORED ? 256 : 128", "128"),),
        "scores of the stage before": (QK, "SCORES_AS_STORED) raw_.next();", "SCORES_AS_STORED) ;"),
        "values behind the last key stay": without(FP8, "if (count < BLOCK_N) clear_absent(count, to);"),
    },
}
"""Faults by the instance that shows them."""
SHOWN_BY = {
    "plain": IN_PARTS[:2],
    "un-rotated": [PLAIN],
    **{width: [PLAIN, "64 1 32 1 1 plain 700 700"] for width in WIDTHS},
    "scaled": [f"64 1 64 1 1 {what} 300 90" for what in ("plain", "large", "small")],
    "folded": ["16 1 64 1 1 fold64 300 33 200", "100 1 64 1 1 sharp+fold32 200", *PLANNED_FOLDS, OUTGROWN],
    "scores": ["64 1 64 1 1 plain 300 90", "64 1 32 1 2 planned 700 40 330"],
}
MASKED = {
    "NaN before the window": [WINDOW],
    "siblings seen": [TREE],
    "keys behind an extend's row tile": EXTENDS["plain"][:1],
    "keys before the windows of an extend's row tile": EXTENDS["window"][:1],
}
FAULTS = {name: (instance, *fault) for instance, faults in FAULTS_OF.items() for name, fault in faults.items()}
PLANTED = (
    *("rotated before they arrive", "not scaled", "a split not scaled", "boxes over each other"),
    *("half of a row's queries twice", "keys behind an extend's row tile"),
)


@KERNEL.each_of({name: fault for name, (_, *fault) in FAULTS.items()}, *PLANTED)
def test_a_fault_is_found(tmp_path, name):
    instance, *fault = FAULTS[name]
    shown_by = MASKED.get(name) or SHOWN_BY[instance[0]]
    KERNEL.assert_found(tmp_path, constants(*instance), fault, shown_by)
