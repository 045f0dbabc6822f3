"""The launches of sm_90's decode and of the combine behind it, without a GPU: every member of their records."""

from __future__ import annotations

import math

import pytest
import torch
from decode_launches import CPU, call_of, launched, long_call

import mla_suite
from mla_suite.launch.spec import CallSpec, Input, LaunchSpec, Output, Scratch, TensorMap
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.ops.plan.metadata import most_work_tiles

FP8 = {"kv_format": "fp8", "dtype": torch.float8_e4m3fn}
SUMS = {"precision": "fp8"}


def test_the_record_of_a_call_in_splits():
    """Every member of decode and of the combine beside it: two tiles of 64 rows, three splits of three sequences."""
    args, kwargs = decode_sample((700, 90, 5), heads=40, q_len=2, sink=True, num_splits=3).make(CPU)
    lse = dict(lse_token_stride=40, lse_head_stride=1, lse_batch_stride=0, lse_tokens_reciprocal=2**31)
    rows = dict(out_token_stride=40 * 512, out_head_stride=512, batch=3, heads=40, q_len=2, num_splits=3)
    rows |= lse | dict(lse_tokens_shift=0, empty_lse=-math.inf)
    ranks = dict(cp_interleave=1, cp_period=1, cp_period_reciprocal=2**31, cp_period_shift=0, cp_offset=0)
    numbers = (
        rows
        | ranks
        | dict(
            **dict(
                q_row_stride=576, heads_reciprocal=-(-(2**32) // 40), rows=80, plan_words=0, grid_stride=9, streaming=1
            ),
            **dict(page_ids_stride=11, page_ids_width=11, kv_page_stride=64 * 576, page=64, page_shift=6),
            **dict(page_reciprocal=2**31, splits_reciprocal=-(-(2**33) // 3), splits_shift=2, split_size=0),
            **dict(fold_size=0, fold_slot=0, in_parts=0),
            **dict(causal=1, window_left=-1, softmax_scale=576**-0.5),
        )
    )
    absent = ("kv_indptr", "cu_seqlens_q", "q_descale", "kv_descale", "rope_cos_sin", "plan", "cp_tot_seq_lens")
    shared = {"attn_sink": Input(9), "out": Output(0), "lse": Output(1)}
    shared |= {"partial_out": Scratch("partial_out"), "partial_lse": Scratch("partial_lse")}
    pointers = dict.fromkeys((*absent, "tree_mask")) | shared
    pointers |= {"q": Input(0), "kv_cache": Input(1), "seq_lens": Input(2), "page_ids": Input(3)}
    maps = {
        "kv_map": TensorMap(Input(1), torch.bfloat16, (64, 64, 9, 15), (1152, 128, 64 * 1152), (64, 32, 9, 1)),
        "q_map": TensorMap(Input(0), torch.bfloat16, (32, 240, 1, 18), (1152, 1152, 64), (32, 64, 1, 9)),
        **dict.fromkeys(("kv_rest_map", "q_rope_map")),
    }
    merged = rows | dict(
        **dict(partial_split_stride=80 * 512, partial_row_stride=512, partial_lse_split_stride=80),
        **dict(partial_lse_row_stride=1, sink_heads=40, out_type=0, skip_none=0, skip_single=0),
        workgroups=20,  # seconds that a combine beside decode waits for it
        **dict(rows_reciprocal=-(-(2**38) // 80), rows_shift=7, heads_reciprocal=-(-(2**37) // 40), heads_shift=6),
    )
    instance, combine = "decode_dtype-bf16_dqk-576_kvsource-tma_clustermode-none", "streaming_combine_dv-512_waves-4"
    launches = (
        LaunchSpec(instance, (2, 9, 1), 512, 215104, True, "decode_tma", numbers, pointers, maps),
        LaunchSpec(
            *(f"{combine}_slices-1_runs-2", (240, 1, 1), 128, 0, True, "combine", merged),
            *(shared | dict.fromkeys(("split_indptr", "cu_seqlens_q")), {}, ("out", "lse")),
        ),
    )
    note = "3 splits of each sequence, whose 3 partial results combine merges while decode runs"
    scratch = {"partial_out": (9, 80, 512), "partial_lse": (9, 80)}
    assert call_of(args, kwargs) == CallSpec(launches, scratch, notes=(note,))


def test_large_batches_fold_their_splits():
    """What a small batch of the same lengths leaves apart, its combine folds."""

    def launches(batch, **options):
        return call_of(*long_call((4000,) * batch, heads=64, split_size=512, **options))

    split, combine = launches(1).launches
    assert (split.numbers["num_splits"], split.numbers["fold_size"]) == (8, 0)
    assert combine.kernel.startswith("fold_combine")
    spec = launches(128)
    (folded,) = spec.launches
    assert folded.kernel == "fold_decode_dtype-bf16_dqk-576_kvsource-tma_clustermode-none_fold-1"
    assert [folded.numbers[name] for name in ("num_splits", "fold_size", "fold_slot")] == [1, 512, 0]
    assert spec.scratch["partial_out"] == (128, 64, 512), "a place to fold for each CTA"
    assert "16 splits of at most 512 keys" in spec.notes[-1]
    folded, combine = launches(128, sink=True).launches
    assert folded.numbers["num_splits"] == 2, "the sink is combine's"
    assert not combine.kernel.startswith("fold")
    assert len(launches(128, page=48).launches) == 2, "keys that threads copy are not folded"
    folded, combine = launches(128, planned=True).launches
    assert folded.kernel.startswith("decode"), "L2 keeps the partials of a plan"
    assert combine.numbers["partial_lse_row_stride"] == 1
    spec = launches(400, planned=True)
    folded, combine = spec.launches
    assert folded.kernel.startswith("fold_decode")
    assert combine.numbers["partial_lse_row_stride"] == 2
    assert spec.scratch["partial_lse"][1] == 2 * 64, "a base and a sum of weights"
    split, combine = launches(1, planned=True).launches
    assert split.numbers["plan_words"] > 0
    assert combine.kernel.startswith("fold_combine")


def test_ragged_queries_and_pages(monkeypatch):
    sample = decode_sample((70, 20, 33), heads=16, q_len=3, page=7, varlen=True, ragged_pages=True, num_splits=1)
    call = launched(monkeypatch, sample)
    args, fields = call.args, call.fields
    assert call.kernel.endswith("kvsource-cp_async_clustermode-none")
    assert all(fields[f"kv_map_{i}"] == 0 for i in range(16))
    assert fields["kv_indptr"] == args[4].data_ptr()
    assert fields["page_ids"] == args[5].data_ptr()
    assert fields["cu_seqlens_q"] == args[6].data_ptr()
    assert (fields["page_ids_width"], fields["page_ids_stride"], fields["partial_out"]) == (0, 0, 0)
    assert "partial_out" not in call.buffers
    assert (call.grid, fields["grid_stride"]) == ((1, 3, 1), 3)


def test_a_plan(monkeypatch):
    args, kwargs = decode_sample((700, 90, 5), heads=128, planned=True).make(CPU)
    kwargs["max_seqlen_kv"] = 50_000  # short sequences would need no plan
    call = launched(monkeypatch, (args, kwargs))
    grid, fields, (merge,) = call.grid, call.fields, call.merges
    bounds = args[11][16:20]  # of the plan combine reads the splits of three sequences
    assert merge["split_indptr"] == bounds.data_ptr()
    assert torch.equal(merge["buffers"]["split_indptr"], bounds)
    assert (fields["plan"], fields["plan_words"]) == (args[11].data_ptr(), args[11].shape[0])
    assert fields["num_splits"] == 1
    assert grid == (2, fields["grid_stride"], 1)
    assert grid[0] * grid[1] <= 132
    rows = call.buffers["partial_out"].shape[0]
    assert rows == most_work_tiles(args[11].shape[0], 3), "a row for every item it may have"


@pytest.mark.parametrize(("split_size", "given"), [(32, 32), (48, 64), (100, 128), (256, 256)])
def test_cuts_by_size_are_whole_stages(monkeypatch, split_size, given):
    """A box of 32 keys may not reach into the next page; the same for gathered keys, whose bits then agree."""
    for page in (64, 24):
        sample = decode_sample((700, 90), page=page, split_size=split_size)
        call = launched(monkeypatch, sample)
        assert call.fields["split_size"] == given
        assert call.fields["num_splits"] * given >= call.args[3].shape[1] * page


@pytest.mark.parametrize("stored", [{}, FP8], ids=["bf16", "fp8"])
def test_scales_are_positive_and_the_kernel_takes_that_of_the_queries(monkeypatch, stored):
    args, kwargs = decode_sample((70,), num_splits=1, **stored).make(CPU)
    args = [*args[:7], torch.tensor([0.25]), *args[8:]]
    kwargs["softmax_scale"] = -0.5
    call = launched(monkeypatch, (args, kwargs))
    assert (call.fields["softmax_scale"], call.fields["q_descale"]) == (0.5, args[7].data_ptr())
    assert torch.equal(call.buffers["q"].float(), -args[0].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_an_e4m3_cache(monkeypatch, dtype):
    """The kernel takes both scales and, of e4m3 queries, their address and no map. A pair of splits reduces O."""
    args, kwargs = decode_sample((700, 90), kv_format="fp8", dtype=dtype, heads=128, page=16, num_splits=2).make(CPU)
    args = [*args[:7], torch.tensor([0.25]), *args[8:]]
    call = launched(monkeypatch, (args, kwargs))
    fields, name = call.fields, "fp8" if dtype == torch.float8_e4m3fn else "bf16"
    assert call.kernel == f"decode_dtype-{name}_dqk-576_kvsource-fp8_clustermode-reduce_o"
    assert (call.grid, call.smem, call.buffers["out"].dtype) == ((2, 4, 1), 228896, torch.bfloat16)
    assert (fields["q"], fields["q_descale"]) == (args[0].data_ptr(), args[7].data_ptr())
    assert (fields["kv_cache"], fields["kv_descale"]) == (args[1].data_ptr(), args[8].data_ptr())
    assert (fields["kv_page_stride"], fields["q_row_stride"]) == (16 * 576, 576)
    assert [fields[f"kv_map_{i}"] for i in range(16)] == [0] * 16
    assert (fields["q_map_0"] == 0) == (name == "fp8")


def test_scores_of_an_e4m3_cache_as_it_is_stored(monkeypatch):
    """Keys come in boxes of bytes; the queries' address is the kernel's, which has no map of them."""
    sample = decode_sample((700, 90), heads=128, num_splits=2, **FP8, **SUMS)
    call = launched(monkeypatch, sample)
    assert call.kernel == "decode_dtype-fp8_dqk-576_kvsource-fp8_scores_clustermode-reduce_o"
    assert (call.grid, call.smem) == ((2, 4, 1), 216640)
    assert (call.fields["q"], call.fields["q_map_0"]) == (call.args[0].data_ptr(), 0)
    assert any(call.fields[f"kv_map_{i}"] for i in range(16))


@pytest.mark.parametrize(
    ("keys", "options", "scaled"),
    [
        (4096, {"heads": 64}, True),
        (320, {"heads": 64}, False),
        (4096, {"heads": 64, "num_splits": 5}, True),
        (4096, {"heads": 64, "num_splits": 6}, False),
        (300, {"heads": 64, "split_size": 768}, True),
        (4096, {"heads": 64, "split_size": 736}, False),
        (4096, {"heads": 16, "num_splits": 1}, False),
        (4096, {"heads": 64, "dtype": torch.float16}, False),
        (4096, {"heads": 64, "dtype": torch.float8_e4m3fn}, False),
        (4096, {"heads": 64, "window_left": 100}, False),
        (4096, {"heads": 64, "rope": 0}, False),
    ],
)
def test_long_work_tiles_of_an_e4m3_cache_scale_queries(monkeypatch, keys, options, scaled):
    """24 stages of 32 keys."""
    kernel = launched(monkeypatch, long_call((keys,) * 132, kv_format="fp8", **options)).kernel
    assert kernel.startswith("scaled_") == scaled, kernel


@pytest.mark.parametrize("parts", [132, 600])
def test_long_work_tiles_of_a_plan_scale_queries(monkeypatch, parts):
    args, kwargs = long_call((4096,) * 66, heads=64, kv_format="fp8")
    args = [*args[:11], mla_suite.plan(args[2], num_heads=64, num_sm_parts=parts, max_seqlen_kv=4096)]
    assert launched(monkeypatch, (args, kwargs)).kernel.startswith("scaled_")


def test_an_e4m3_cache_without_a_cluster(monkeypatch):
    """Three splits are in no cluster, so keys are the first operand: 384 threads, and rows of 16 heads at once."""
    sample = decode_sample((700, 90), kv_format="fp8", heads=16, page=16, num_splits=3)
    call = launched(monkeypatch, sample)
    assert call.kernel == "swap_ab_decode_dtype-bf16_qrows-16"
    assert (call.grid, call.threads, call.smem) == ((1, 6, 1), 384, 231344)
    assert (call.fields["q"], call.fields["kv_cache"]) == (call.args[0].data_ptr(), call.args[1].data_ptr())


@pytest.mark.parametrize(("page", "mapped"), [(64, True), (24, False)])
def test_an_unrotated_cache(monkeypatch, page, mapped):
    """Two splits reduce O in a cluster, if boxes bring the keys; nothing streams. The cosines are where they were."""
    call = launched(monkeypatch, decode_sample((700, 90), heads=128, page=page, num_splits=2, rotate=True))
    args, fields = call.args, call.fields
    mode, source = ("reduce_o", "tma") if mapped else ("none", "cp_async")
    assert call.kernel == f"decode_rotated_dtype-bf16_dqk-576_kvsource-{source}_clustermode-{mode}_rotate-1"
    assert (call.grid, call.threads, call.smem) == ((2, 4, 1), 512, 212448 if mapped else 211008)
    assert (fields["rope_cos_sin"], fields["streaming"]) == (args[10].data_ptr(), 0)
    assert (fields["kv_cache"], fields["batch"], fields["rows"]) == (args[1].data_ptr(), 2, 128)
    assert (fields["kv_map_0"] != 0) == mapped
    boxes = [box for *_, box in call.maps if box[0] == 64]
    assert boxes == ([(64, 32, 1, 1)] if mapped else [])


def test_cosines_off_alignment_are_copied(monkeypatch):
    args, kwargs = decode_sample((70,), num_splits=1, rotate=True).make(CPU)
    flat = torch.zeros(args[10].numel() + 1)
    args = [*args[:10], flat[1:].view(args[10].shape).copy_(args[10]), *args[11:]]
    call = launched(monkeypatch, (args, kwargs))
    copy = call.buffers["rope_cos_sin"]
    assert call.fields["rope_cos_sin"] == copy.data_ptr() != args[10].data_ptr()
    assert copy.data_ptr() % 16 == 0
    assert torch.equal(copy, args[10])
