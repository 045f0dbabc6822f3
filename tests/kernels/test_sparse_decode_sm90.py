"""Checks of sm_90's sparse_decode that need no GPU: instances, reasons, arithmetic, launches."""

from __future__ import annotations

import itertools
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from backend_calls import BackendCalls, assert_refused
from built import assert_built_whole
from launch_records import mapped_to, record
from sparse_problems import FP8_POOLS, POOLS, V41_POOLS, in_mode, problem
from static_asserts import assert_compiles, equal

from mla_suite import archs
from mla_suite.archs.sm_90 import sparse_decode as sm_90
from mla_suite.archs.sm_90 import sparse_splits
from mla_suite.archs.sm_90.sparse_decode import (
    CLUSTERED,
    FEW_HEADS,
    FEW_ROWS,
    FEW_WARPS,
    SLOTS,
    STAGES,
    SWAP_AB,
    TOKEN_BYTES,
    WIDTHS,
    Sm90SparseConfig,
)
from mla_suite.build import params
from mla_suite.build.instances import instances
from mla_suite.core.dispatch import Supported
from mla_suite.core.explain import explain_on
from mla_suite.launch import launcher, tensor_map
from mla_suite.ops.decode import Q_FP8
from mla_suite.ops.sparse_decode import SPARSE_DECODE

NATIVE = BackendCalls(SPARSE_DECODE, "native")

H200 = archs.get("sm_90")
TALL = [Sm90SparseConfig(H200, record, mode) for mode, records in CLUSTERED.items() for record in records]
SWAPPED = [Sm90SparseConfig(H200, record, q_rows=rows) for record in TOKEN_BYTES for rows in SWAP_AB]
FEW = [Sm90SparseConfig(H200, record, q_rows=FEW_ROWS, few_heads=True) for record in FEW_HEADS]
LARGEST = [
    replace(config, max_logits=True) for config in TALL if config.returns_max_logits and config.cluster_mode == "none"
]
CONFIGS = TALL + LARGEST + SWAPPED + FEW


def test_every_record_is_declared():
    declared = {item.id: item for item in instances("sm_90") if item.kernel.endswith("sparse_decode")}
    assert set(declared) == {config.instance for config in CONFIGS}
    for config in CONFIGS:
        assert config.lds <= declared[config.instance].dynamic_lds <= H200.lds_bytes


def test_no_other_point_is_legal():
    fields = attrgetter("record", "cluster_mode", "q_rows", "few_heads", "max_logits")
    legal = set(map(fields, CONFIGS))
    others = "fp8", "exchange_p", 48, True, True
    for point in set(itertools.product(*map(set, zip(others, *legal, strict=True)))) - legal:
        with pytest.raises(ValueError, match="sparse_decode: no kernel of "):
            Sm90SparseConfig(H200, *point)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"arch": archs.get("gfx942")}, "gfx942 is not sm_90"),
        ({"record": "fp8"}, "records are dsv4, v32"),
        ({"record": "fp8x512", "cluster_mode": "reduce_o"}, "its cluster_mode is reduce_o; .*; reduce_o of dsv4, v32"),
        ({"q_rows": 48}, "blocks have at most 16, 32, 64 query rows, not 48"),
        ({"q_rows": 16}, "blocks of 16 query rows take v32 records, alone"),
        ({"few_heads": True}, "a kernel for few heads has 16 rows of dsv4, v32"),
    ],
)
def test_an_illegal_config_says_why(changed, sentence):
    with pytest.raises(ValueError, match=f"sparse_decode: no kernel of .* records on .*: {sentence}"):
        Sm90SparseConfig(**{"arch": H200, "record": "dsv4"} | changed)


def test_shared_memory_is_what_the_header_lays_out(tmp_path):
    """The Python sum against the compiler's view of sparse_decode/traits.hpp."""
    lines = []
    for config in SWAPPED:
        groups, stages = SWAP_AB[config.q_rows]
        problem, policy = f"SparseDecodeProblem<{config.record}>", f"SparseSwapAbPolicy<{config.q_rows}>"
        traits = f"SparseSwapAbTraits<{problem}, {policy}>"
        figures = {f"SharedStorage<{traits}>::BYTES": config.lds, f"{traits}::THREADS": config.threads}
        figures |= {f"{traits}::GROUPS": groups, f"{traits}::STAGES": stages}
        lines += equal(config.instance, figures | {f"{config.record}::TOKEN_BYTES": TOKEN_BYTES[config.record]})
    for config in FEW:
        traits = f"FewHeadsTraits<SparseDecodeProblem<{config.record}>, FewHeadsPolicy<{config.record}>>"
        figures = {f"SharedStorage<{traits}>::BYTES": config.lds, f"{traits}::THREADS": config.threads}
        figures |= {f"{traits}::PRODUCER_WARPS": FEW_WARPS, f"{traits}::RAW_STAGES": FEW_HEADS[config.record]}
        lines += equal(config.instance, figures)
    for config in TALL:
        record, cluster = config.record, f"cluster_mode::{config.cluster_mode}"
        traits = f"SparseDecodeTraits<SparseDecodeProblem<{record}>, SparseDecodePolicy<{record}, {cluster}>>"
        figures = {f"{traits}::SHARED_BYTES": config.lds, "BLOCK_M": config.rows, "THREADS": config.threads}
        figures |= {f"{record}::HEAD_DIM_QK": WIDTHS[record], f"{record}::STAGES": STAGES[record]}
        lines += equal(config.instance, figures)
    headers = [f"sparse_decode/{kernel}/shared_storage.hpp" for kernel in ("swap_ab", "few_heads")]
    assert_compiles(tmp_path, ["sparse_decode/traits.hpp", "decode/cluster/modes.hpp", *headers], lines)


def test_what_was_built():
    assert_built_whole(CONFIGS, "sparse_decode_tma")


def test_split_counts_of_every_instance():
    """One where the batch fills the device; many for one token; never more than there are stages."""
    for config in CONFIGS:
        if config.reduced_splits > 1:
            continue  # takes the place of one without clusters, when splits are known
        assert sparse_splits.best_splits(config, 128, 128, 2048) == 1
        assert sparse_splits.best_splits(config, 1, 128, 2048) > 10
        assert sparse_splits.best_splits(config, 1, 16, 40) <= 2
        assert sparse_splits.best_splits(config, 4, 16, 0) == 1


def answer_of(monkeypatch, pools, heads=16, **changes):
    declared = {item.id for item in instances("sm_90")}
    monkeypatch.setattr(launcher, "usable_kernels", lambda arch: declared)
    args, kwargs = problem(pools, 2, heads)
    args[0] = args[0].to(changes.pop("dtype", torch.bfloat16))
    return NATIVE.supports(SPARSE_DECODE.problem(*args, **kwargs | changes), H200)


@pytest.mark.parametrize(
    ("pools", "record"),
    [
        *(("v4", "dsv4"), ("v32", "v32"), ("v32 pow2", "v32"), ("both scales", "v32"), ("bf16", "bf16x576")),
        *(("v4.1", "v41"), ("v4.1 of both sizes", "v41any"), ("v4.1 of 288 bytes", "v41any")),
        *(("v4.1 interleaved", "v41any"), ("v32 without rope", "v32nope")),
        *(("fp8 rows", "fp8x576"), ("fp8 rows without rope", "fp8x512")),
    ],
)
@pytest.mark.parametrize("heads", [1, 64, 100, 300])
def test_which_kernel(monkeypatch, pools, record, heads):
    answer = answer_of(monkeypatch, (POOLS | V41_POOLS | FP8_POOLS)[pools], heads)
    assert isinstance(answer, Supported)
    assert answer.config.tiles(heads) == -(-heads // 64)
    if heads == 1 and record in FEW_HEADS:
        assert answer.config.instance == f"few_heads_sparse_decode_kvformat-{record}"
        return
    mode = "share_kv" if heads == 100 and record in SLOTS else "none"
    assert answer.config.instance == f"sparse_decode_kvformat-{record}_clustermode-{mode}"


@pytest.mark.parametrize(
    ("pools", "heads", "wanted"),
    [
        ("v4", 16, "sparse_decode_kvformat-dsv4_clustermode-reduce_four"),
        ("v4", 128, "sparse_decode_kvformat-dsv4_clustermode-share_and_reduce"),
        ("v32", 32, "swap_ab_sparse_decode_kvformat-v32_qrows-32"),
        ("fp8 rows", 64, "combine_dv-512_rows-4_vec-4_waves-4_slices-1"),
    ],
)
def test_a_build_without_a_kernel_that_a_call_may_launch_is_refused(monkeypatch, pools, heads, wanted):
    args, kwargs = problem((POOLS | FP8_POOLS)[pools], 2, heads)
    declared = {item.id for item in instances("sm_90")}
    monkeypatch.setattr(launcher, "usable_kernels", lambda arch: declared - {wanted})
    assert_refused(
        NATIVE.supports(SPARSE_DECODE.problem(*args, **kwargs), H200), f"kernel {wanted} is not built for sm_90"
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": torch.float16}, "q is torch.float16; it takes bfloat16"),
        ({"dtype": torch.float8_e4m3fn}, "q is torch.float8_e4m3fn; it takes bfloat16"),
        ({"head_dim_v": 256}, "head_dim_v 256; it takes 512"),
    ],
)
def test_what_it_cannot_take_is_refused_in_a_sentence(monkeypatch, options, sentence):
    assert_refused(answer_of(monkeypatch, POOLS["v32"], **options), sentence)


def launched(monkeypatch, args, kwargs, outputs=None):
    """A call's launches, the parameters of the first and its first tensor map, and the outputs."""
    calls, maps = record(monkeypatch), []
    mapped_to(monkeypatch, lambda *given: maps.append(given) or tuple(range(tensor_map.WORDS)))
    outputs = outputs or tuple(torch.empty(o.shape, dtype=o.dtype) for o in SPARSE_DECODE.specify(*args, **kwargs))
    NATIVE.run(sm_90.config_for(SPARSE_DECODE.problem(*args, **kwargs), H200), outputs, *args, **kwargs)
    return calls, params.load("sparse_decode_tma").unpack(calls[0].params), maps[0], outputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, *Q_FP8])
def test_a_launch_over_fp8_rows_takes_descales(monkeypatch, dtype):
    """float8 queries come as bf16 copies, which hold them exactly."""
    args, kwargs = problem(FP8_POOLS["fp8 rows"], 6, 24)
    args[0] = args[0].to(dtype)
    q_descale = torch.tensor([0.5]) if dtype in Q_FP8 else None
    args += [q_descale, torch.tensor(2.0)]
    (call, *_), read, map_of, outputs = launched(monkeypatch, args, kwargs)
    assert read["kv_descale"] == args[8].data_ptr()
    assert read["q_descale"] == (0 if q_descale is None else q_descale.data_ptr())
    assert outputs[0].dtype == torch.bfloat16
    assert map_of[1] == torch.bfloat16
    assert torch.equal(call.buffers["q"], args[0].bfloat16())
    notes = explain_on(H200, "sparse_decode", *args, **kwargs).notes
    assert ("queries are copied as bfloat16" in notes) == (dtype in Q_FP8)


@pytest.mark.parametrize("pools", ["v4", "both scales", "four pools", "v4.1 of every kind"])
@pytest.mark.parametrize("mode", ["one split", "splits and sink", "planned", "invariant", "ragged", "mtp"])
def test_a_launch(monkeypatch, pools, mode):
    """Every parameter of a call, as the kernel would read it."""
    shape = (POOLS | V41_POOLS)[pools]
    args, kwargs = problem(shape, 6, 100)
    in_mode(mode, args, kwargs, 3)
    config = sm_90.config_for(SPARSE_DECODE.problem(*args, **kwargs), H200)
    ((instance, grid, threads, shared, overlap, _, named), *merges), read, _, outputs = launched(
        monkeypatch, args, kwargs
    )
    reduces = mode == "ragged" and pools != "four pools"
    config = replace(config, cluster_mode="share_and_reduce") if reduces else config
    assert (instance, threads, shared, overlap) == (config.instance, 512, config.lds, True)
    assert grid == (2, read["grid_stride"], 1)
    assert not reduces or read["grid_stride"] == 6 * read["num_splits"]
    assert grid[0] * grid[1] <= H200.compute_units
    assert [read[f"q_map_{word}"] for word in range(16)] == list(range(16))
    assert (read["tokens"], read["heads"], read["pools"]) == (6, 100, len(shape))
    assert (read["interleaved"], read["fp4"]) == ((0b1100, 0b0101) if pools == "v4.1 of every kind" else (0, 0))
    assert read["out"] == outputs[0].data_ptr()
    assert (read["plan"] != 0) == (mode == "planned")
    assert read["split_size"] == (64 if mode == "invariant" else 0)
    for i, cache in enumerate(args[1]):
        assert read[f"cache_{i}"] == cache.data_ptr()
        assert read[f"slots_{i}"] == cache.shape[0] * cache.shape[1]
    assert all(read[f"slots_{i}"] == 0 for i in range(len(args[1]), 4))
    for name, tensor in named.items():
        assert name == "q" or read[name] == tensor.data_ptr()
    assert bool(merges) == (read["partial_out"] != 0)
    assert merges or mode in ("one split", "mtp", "ragged")


@pytest.mark.parametrize("wanted", [True, False])
def test_a_launch_stores_max_logits_where_they_are_wanted(monkeypatch, wanted):
    args, kwargs = problem(POOLS["bf16"], 6, 100)
    outputs = torch.empty(6, 100, 512).bfloat16(), torch.empty(6, 100), torch.empty(6, 100)
    (call, *_), read, *_ = launched(monkeypatch, args, kwargs, outputs if wanted else outputs[:2])
    assert read["max_logits"] == (outputs[2].data_ptr() if wanted else 0)
    assert call.kernel.endswith("_maxlogits-1") == wanted
