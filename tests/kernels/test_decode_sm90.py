"""Checks of sm_90's decode that need no GPU: its instances, and unsupported problems."""

from __future__ import annotations

import itertools

import pytest
import torch
from backend_calls import BackendCalls, assert_refused
from built import assert_built_whole
from decode_launches import CPU, H200
from static_asserts import assert_compiles, equal

from mla_suite import archs
from mla_suite.archs.sm_90.decode import Sm90Config
from mla_suite.archs.sm_90.tile import BLOCK_M, BLOCK_N
from mla_suite.build.instances import instances
from mla_suite.core.dispatch import Supported
from mla_suite.launch import launcher
from mla_suite.ops.decode import DECODE
from mla_suite.ops.decode.samples import decode_sample

NATIVE = BackendCalls(DECODE, "native")

MODES = ("none", "reduce_o", "reduce_last", "exchange_p", "share_kv")
SOURCES = (*(("tma", mode) for mode in MODES), ("cp_async", "none"))
POINTS = [(*point, *source) for *point, source in itertools.product(("bf16", "fp16"), (576, 512), SOURCES)]
POINTS += [(dtype, 576, "fp8", mode) for dtype in ("bf16", "fp16", "fp8") for mode in ("none", "reduce_o")]
POINTS += [(dtype, 512, "fp8", "none") for dtype in ("bf16", "fp16", "fp8")]
STORED = [("fp8", 576, "fp8_scores", mode) for mode in ("none", "reduce_o", "reduce_last")]
PAIRED = [(dtype, 576, "fp8", "reduce_last") for dtype in ("bf16", "fp16")]
POINTS += STORED + PAIRED
ROTATED = [
    (dtype, 576, "tma_rotated", mode) for dtype in ("bf16", "fp16") for mode in ("none", "reduce_o", "reduce_last")
]
ROTATED += [(dtype, 576, "cp_async_rotated", "none") for dtype in ("bf16", "fp16")]
POINTS += ROTATED
NARROW = [
    (dtype, width, source, "none")
    for width in (320, 288, 160)
    for dtype, source in (("bf16", "tma"), ("bf16", "cp_async"), ("bf16", "fp8"), ("fp8", "fp8"))
]
POINTS += NARROW
SWAP_AB = [(dtype, 576, "swap_ab", "none", rows) for dtype in ("bf16", "fp16", "fp8") for rows in (16, 32)]
MASKED = [(*point, BLOCK_M, "masked") for point in POINTS if point[1] == 576 and point not in ROTATED + STORED + PAIRED]
MASKED += [(*point, "masked") for point in SWAP_AB]
SCALED = [("bf16", 576, "fp8", mode, BLOCK_M, "scaled") for mode in ("none", "reduce_o", "reduce_last")]
FOLDS = [(dtype, 576, "tma", mode, BLOCK_M, "folding") for dtype in ("bf16", "fp16") for mode in ("none", "share_kv")]
HALF = {"kv_format": "fp16", "dtype": torch.float16}
FP8 = {"kv_format": "fp8", "dtype": torch.float8_e4m3fn}
SUMS = {"precision": "fp8"}


def test_every_point_is_declared():
    kernels = ("decode", "decode_rotated", "decode_narrow", "swap_ab_decode", "masked_decode", "masked_swap_ab_decode")
    kernels += ("scaled_decode", "fold_decode")
    declared = {item.id: item for item in instances("sm_90") if item.kernel in kernels}
    points = POINTS + SWAP_AB + MASKED + SCALED + FOLDS
    assert set(declared) == {Sm90Config(H200, *point).instance for point in points}
    for point in points:
        config = Sm90Config(H200, *point)
        assert config.lds <= declared[config.instance].dynamic_lds <= H200.lds_bytes


def test_no_other_point_is_legal():
    axes = {"dtype": "bf16", "width": 576, "kv_load": "tma", "cluster_mode": "none", "q_rows": BLOCK_M}
    defaults = (*axes.values(), "plain")
    legal = {(*point, *defaults[len(point) :]) for point in POINTS + SWAP_AB + MASKED + SCALED + FOLDS}
    values = [sorted({point[i] for point in legal}) for i in range(len(defaults))]
    values[0] += ["fp32"]
    values[1] += [448]
    values[2] += ["hope"]
    values[3] += ["keys"]
    values[4] += [48]
    for point in set(itertools.product(*values)) - legal:
        with pytest.raises(ValueError, match="decode: no kernel at "):
            Sm90Config(H200, *point)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"arch": archs.get("gfx942")}, "gfx942 is not sm_90"),
        ({"dtype": "fp8"}, "dtype is one of bf16, fp16"),
        ({"width": 448}, "width is one of 576, 512, 320, 288, 160"),
        (
            {"kv_load": "hope"},
            "kv_load is one of tma, cp_async, fp8, fp8_scores, swap_ab, tma_rotated, cp_async_rotated",
        ),
        ({"kv_load": "fp8", "dtype": "fp8", "cluster_mode": "reduce_last"}, "cluster_mode is one of none, reduce_o$"),
        (
            {"kv_load": "fp8_scores", "dtype": "fp8", "variant": "masked"},
            "windows and trees are of keys in full precision",
        ),
        ({"kv_load": "swap_ab", "q_rows": 48}, "q_rows is one of 16, 32"),
        ({"kv_load": "tma_rotated", "variant": "masked"}, "windows and trees are of rotated rows of 576"),
        ({"cluster_mode": "reduce_o", "variant": "folding"}, "splits are folded with cluster_mode none and share_kv"),
    ],
)
def test_an_illegal_config_says_why(changed, sentence):
    with pytest.raises(ValueError, match=f"decode: no kernel at .*: {sentence}"):
        Sm90Config(**{"arch": H200, "dtype": "bf16", "width": 576, "kv_load": "tma"} | changed)


def test_shared_memory_is_what_the_header_lays_out(tmp_path):
    """The Python sum against the compiler's view of shared_storage.hpp."""
    lines = []
    clusters = {"none": "ClusterNone", "reduce_o": "ClusterReduceO", "reduce_last": "ClusterReduceLast"}
    clusters |= {"exchange_p": "ClusterExchangeP", "share_kv": "ClusterShareKv"}
    for point in POINTS + FOLDS:
        config = Sm90Config(H200, *point)
        source, rotates = config.kv_load.removesuffix("_rotated"), str(config.load.rotates).lower()
        policy = f"DecodePolicyOf<KvLoad::{source}, {clusters[config.cluster_mode]}, {config.width}, {rotates}, "
        policy += f"false, {str(config.folds).lower()}>"
        problem = f"DecodeProblem<{config.dtype}, {config.width}, {rotates}, {config.head_dim_v}>"
        traits = f"DecodeTraits<{problem}, {policy}>"
        figures = {f"SharedStorage<{traits}>::BYTES": config.lds, f"{traits}::STAGES": config.stages}
        figures |= {"THREADS": config.threads, "BLOCK_N": BLOCK_N, "BLOCK_M": BLOCK_M}
        lines += equal(config.instance, figures)
    for point in SWAP_AB:
        config = Sm90Config(H200, *point)
        traits = f"SwapAbTraits<SwapAbProblem<{config.dtype}>, SwapAbPolicy<{config.q_rows}>>"
        figures = {f"SharedStorage<{traits}>::BYTES": config.lds, f"{traits}::STAGES": config.stages}
        lines += equal(config.instance, figures | {f"{traits}::CONSUMERS + 128": config.threads})
    headers = [f"decode/cluster/{mode}.hpp" for mode in clusters]
    headers += [f"decode/{name}.hpp" for name in ("producer_fp8", "sentinel_fill", "swap_ab/shared_storage")]
    assert_compiles(tmp_path, headers, lines)


def test_what_was_built():
    assert_built_whole([Sm90Config(H200, *point) for point in POINTS + SWAP_AB + MASKED + FOLDS], "decode_tma")


def answer_of(monkeypatch, **options):
    declared = {item.id for item in instances("sm_90")}
    monkeypatch.setattr(launcher, "usable_kernels", lambda arch: declared)
    args, kwargs = decode_sample(options.pop("lens", (70,)), **options).make(CPU)
    return NATIVE.supports(DECODE.problem(*args, **kwargs), H200)


@pytest.mark.parametrize(
    ("options", "instance"),
    [
        ({}, "decode_dtype-bf16_dqk-576_kvsource-tma_clustermode-none"),
        ({"page": 32, "rope": 0}, "decode_dtype-bf16_dqk-512_kvsource-tma_clustermode-none"),
        ({"page": 48, "heads": 128, "q_len": 3}, "decode_dtype-bf16_dqk-576_kvsource-cp_async_clustermode-none"),
        ({"page": 1, "ragged_pages": True, **HALF}, "decode_dtype-fp16_dqk-576_kvsource-cp_async_clustermode-none"),
        ({"sink": True, "varlen": True, "q_len": 2, "causal": False, "split_size": 64}, "decode_dtype-bf16_dqk-576_"),
        ({"kv_format": "fp8", "page": 16, "heads": 128}, "decode_dtype-bf16_dqk-576_kvsource-fp8_clustermode-none"),
        ({"kv_format": "fp8", "page": 1, "heads": 16}, "swap_ab_decode_dtype-bf16_qrows-16"),
        ({"kv_format": "fp8", "heads": 17}, "swap_ab_decode_dtype-bf16_qrows-32"),
        ({**FP8, "page": 1, "q_len": 2}, "swap_ab_decode_dtype-fp8_qrows-32"),
        ({**FP8, "page": 1, "q_len": 4}, "decode_dtype-fp8_dqk-576_kvsource-fp8_clustermode-none"),
        ({**FP8, "heads": 64, **SUMS}, "decode_dtype-fp8_dqk-576_kvsource-fp8_scores_clustermode-none"),
        ({**FP8, "heads": 64, "page": 48, **SUMS}, "decode_dtype-fp8_dqk-576_kvsource-fp8_clustermode-none"),
        ({**FP8, "heads": 64, "window_left": 9, **SUMS}, "masked_decode_dtype-fp8_dqk-576_kvsource-fp8_"),
        ({"window_left": 9, "page": 1}, "masked_decode_dtype-bf16_dqk-576_kvsource-cp_async_"),
        ({"tree": True, "q_len": 4}, "masked_decode_dtype-bf16_dqk-576_kvsource-tma_"),
        ({**FP8, "tree": True, "q_len": 2, "heads": 8, **SUMS}, "masked_swap_ab_decode_dtype-fp8_qrows-16"),
        ({**FP8, "heads": 64, "rope": 0, **SUMS}, "decode_dtype-fp8_dqk-512_kvsource-fp8_"),
        ({**FP8, "heads": 16, **SUMS}, "swap_ab_decode_dtype-fp8_qrows-16"),
        ({"kv_format": "fp8", "heads": 64, **SUMS}, "decode_dtype-bf16_dqk-576_kvsource-fp8_"),
        ({**HALF, "kv_format": "fp8", "rope": 0}, "decode_dtype-fp16_dqk-512_kvsource-fp8_clustermode-none"),
        ({"latent": 256}, "decode_narrow_dtype-bf16_dqk-320_kvsource-tma_clustermode-none_dv-256"),
        ({"latent": 256, "rope": 32, "page": 1}, "decode_narrow_dtype-bf16_dqk-288_kvsource-cp_async_"),
        ({"latent": 128, "rope": 32, **FP8}, "decode_narrow_dtype-fp8_dqk-160_kvsource-fp8_clustermode-none_dv-128"),
        ({"rotate": True}, "decode_rotated_dtype-bf16_dqk-576_kvsource-tma_clustermode-none_rotate-1"),
        ({"rotate": True, "page": 1, **HALF}, "decode_rotated_dtype-fp16_dqk-576_kvsource-cp_async_clustermode-none_"),
    ],
)
def test_which_kernel(monkeypatch, options, instance):
    answer = answer_of(monkeypatch, **options)
    assert isinstance(answer, Supported)
    assert answer.config.instance.startswith(instance)
    rows = options.get("heads", 16) * options.get("q_len", 1)
    assert answer.config.tiles(rows) == -(-rows // 64)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": torch.float32}, "q is torch.float32; it takes bfloat16, float16 or float8_e4m3fn"),
        ({"dtype": torch.float8_e4m3fn}, "kv_format bf16 with torch.float8_e4m3fn queries; it takes fp8"),
        ({"kv_format": "fp16"}, "kv_format fp16 with torch.bfloat16 queries; it takes bf16 or fp8"),
        ({"latent": 64}, "rows of 128 values with head_dim_v 64; it takes 576 with 512, 512 with 512, 320 with 256,"),
        ({"latent": 256, **HALF}, "float16 queries of 320 values; it takes bfloat16 or float8_e4m3fn"),
        ({"tree": True, "rotate": True}, "window_left or tree_mask with rope_cos_sin; it has them for"),
        ({"tree": True, "rope": 0}, "window_left or tree_mask with rows of 512 values; it has"),
        ({"window_left": 9, "rope": 0}, "window_left or tree_mask with rows of 512 values; it has"),
        (
            {"rotate": True, "kv_format": "fp8"},
            "rope_cos_sin of 64 values with fp8 rows of 576; it rotates 64 of bf16 or fp16 rows of 576",
        ),
    ],
)
def test_what_it_cannot_take_is_refused_in_a_sentence(monkeypatch, options, sentence):
    assert_refused(answer_of(monkeypatch, **options), sentence)


def test_a_cache_off_alignment_is_refused():
    args, kwargs = decode_sample((70,)).make(CPU)
    flat = torch.zeros(args[1].numel() + 4, dtype=torch.bfloat16)
    shifted = flat[4:].view(args[1].shape)
    answer = NATIVE.supports(DECODE.problem(args[0], shifted, *args[2:], **kwargs), H200)
    assert "kv_cache is aligned to 8 bytes" in answer.reason
