"""Calls as SGLang's wheel of FlashMLA, sgl-flash-mla 1.0.0, takes them, on our FlashMLA interface."""

import math

import pytest
import torch
from flash_mla_calls import Dense, check, dense_expected
from test_flash_mla_sparse import records

import mla_suite
from mla_suite.integrations.flash_mla import (
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    fused_norm_rope_attn_rope_cast,
    get_mla_decoding_metadata,
    get_mla_metadata,
    has_legacy,
)
from mla_suite.launch import has_kernel

LENGTHS = [130, 0, 700]


def test_a_dense_call_with_metadata_made_before_it():
    problem, holder = Dense(LENGTHS), FlashMLASchedMeta()
    made = get_mla_decoding_metadata(problem.lens, 2 * 16, 1, use_legacy=True)
    holder.tile_scheduler_metadata, holder.num_splits = made
    for _ in range(3):
        problem.check(problem.queries(2), holder, causal=True, use_legacy=True)


def float8(problem, q, scale_q, scale_k):
    """What a call over float8 rows gives, by these scales."""
    rows = problem.cache.float() * scale_k
    return dense_expected(q.float() * scale_q, rows, problem.table, LENGTHS, 576**-0.5, False)


@pytest.mark.parametrize("q_dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_dense_rows_of_float8(q_dtype):
    problem = Dense(LENGTHS, dtype=torch.float8_e4m3fn)
    descales = dict(descale_q=torch.tensor([0.5]), descale_k=torch.tensor([0.75]))
    for _ in range(3):
        q = torch.randn(3, 1, 16, 576).to(q_dtype)
        found = problem.call(q, is_fp8_kvcache=True, use_legacy=True, **descales)
        check(*found, float8(problem, q, 0.5, 0.75))


def test_a_descale_counts_in_every_call():
    """The third call is one that the fast path recognises, but for the descales' values."""
    problem, (holder, _) = Dense(LENGTHS, dtype=torch.float8_e4m3fn), get_mla_metadata()
    q = problem.queries()
    for descale in (1.0, 1.0, 0.25):
        given = torch.tensor([descale])
        check(*problem.call(q, holder, descale_q=given, descale_k=given), float8(problem, q, descale, descale))
    check(*problem.call(q, holder), float8(problem, q, 1.0, 1.0))


@pytest.mark.parametrize(("kv_format", "named", "head_dim"), [("v32", "V32", 576), ("dsv4", "V4", 512)])
def test_records_are_known_without_is_fp8_kvcache(kv_format, named, head_dim):
    k_cache, q = records(kv_format, 4, 64)[0].unsqueeze(2), torch.randn(2, 1, 16, head_dim).bfloat16()
    indices = torch.randint(-1, 256, (2, 1, 40), dtype=torch.int32)

    def attended(**options):
        return flash_mla_with_kvcache(
            q, k_cache, None, None, 512, get_mla_metadata()[0], indices=indices, use_legacy=True, **options
        )

    said = attended(is_fp8_kvcache=True)
    for options in ({}, {"kv_format": named}):
        assert all(map(torch.equal, attended(**options), said))
    with pytest.raises(ValueError, match=rf"kv_format is 'V41' and k_cache holds {kv_format}; it takes V32 for"):
        attended(kv_format="V41")
    with pytest.raises(ValueError, match="is_fp8_kvcache is False and k_cache is torch.uint8"):
        attended(is_fp8_kvcache=False)
    with pytest.raises(ValueError, match="a descale is given with indices"):
        attended(descale_q=torch.ones(1))


V41 = [("v41", "V41", True), ("v41_interleaved", "V41", False)]
V41 += [("v41_fp4", "V41_FP4", True), ("v41_fp4_interleaved", "V41_FP4", False)]


@pytest.mark.parametrize("pools", [1, 2])
@pytest.mark.parametrize(("kv_format", "named", "use_legacy"), [*V41, ("v32_nope", "V32_NO_ROPE", True)])
def test_records_of_one_width_are_told_apart(kv_format, named, use_legacy, pools):
    """By their page order, which use_legacy says, or by their name; the third call is one that is known. Those of an
    extra pool are of the format of k_cache, as FlashMLA says."""
    held = [records(kv_format, pages, 64)[0] for pages in (4, 2)[:pools]]
    q, indices = torch.randn(2, 1, 16, 512).bfloat16(), torch.randint(-1, 128, (2, 1, 40), dtype=torch.int32)
    formats = [kv_format] * pools
    right = mla_suite.sparse_decode(q, held, [indices] * pools, kv_formats=formats, softmax_scale=512**-0.5)
    extra = dict(extra_k_cache=held[1].unsqueeze(2), extra_indices_in_kvcache=indices) if pools == 2 else {}

    def attended(holder, **options):
        given = q, held[0].unsqueeze(2), None, None, 512, holder
        out, lse = flash_mla_with_kvcache(*given, indices=indices, **extra, **options)
        return torch.equal(out, right[0]) and torch.equal(lse, right[1].transpose(1, 2))

    holder, has_one_order = get_mla_metadata()[0], named == "V32_NO_ROPE"
    for legacy in (use_legacy, not use_legacy, use_legacy):
        assert attended(holder, kv_format=named, use_legacy=legacy) == (legacy == use_legacy or has_one_order)
    if not has_one_order:
        assert attended(get_mla_metadata()[0], use_legacy=use_legacy)


def check_invariance(record, attended, splits=True):
    """The second of three query tokens has the same results alone, unless a call need not be batch-invariant: then its
    sums are of several splits and differ in their last bits. `attended` takes which query tokens, and whether it is."""
    if not has_kernel("gfx942", f"sparse_decode_kvformat-{record}_rows-16"):
        pytest.skip("the kernels of gfx942 are not built; run `python -m mla_suite build --arch gfx942`")
    with mla_suite.emulate("gfx942"):
        together, alone = attended(slice(None), True), attended(slice(1, 2), True)
        assert all(torch.equal(of_all[1:2], one) for of_all, one in zip(together, alone, strict=True))
        assert not splits or not torch.equal(attended(slice(1, 2), False)[0], alone[0])


@pytest.mark.parametrize("lists", ["full", "of other widths"])
def test_batch_invariant_sparse_calls(lists):
    """Of other widths, and with a sink, as in V4's layers that select all closed entries: a batch pads them."""
    k_cache, q = records("v32", 40, 64)[0].unsqueeze(2), torch.randn(3, 1, 16, 576).bfloat16()
    indices = torch.randint(40 * 64, (3, 1, 1024), dtype=torch.int32)
    lengths, sink = torch.tensor([1024, 200, 500], dtype=torch.int32), torch.randn(16)

    def attended(which, invariant):
        given = dict(indices=indices[which])
        if lists != "full":
            width = 256 if which.start else 1024
            given = dict(indices=indices[which, :, :width].contiguous(), topk_length=lengths[which], attn_sink=sink)
        holder = get_mla_metadata()[0]
        return flash_mla_with_kvcache(
            q[which], k_cache, None, None, 512, holder, enable_batch_invariant=invariant, **given
        )

    check_invariance("v32", attended, splits=lists == "full")


@pytest.mark.parametrize("statistics", [False, None])
def test_batch_invariant_prefill(statistics):
    kv, q = torch.randn(900, 1, 576).bfloat16(), torch.randn(3, 16, 576).bfloat16()
    indices = torch.randint(900, (3, 1, 1024), dtype=torch.int32)

    def attended(which, invariant):
        options = dict(return_log2_lse=statistics, enable_batch_invariant=invariant)
        return flash_mla_sparse_fwd(q[which], kv, indices[which], 0.04, **options)[:1]

    check_invariance("bf16x576", attended)


def test_statistics_of_sparse_prefill():
    q, kv = torch.randn(5, 64, 576).bfloat16(), torch.randn(90, 1, 576).bfloat16()
    indices = torch.randint(-1, 90, (5, 1, 40), dtype=torch.int32)
    indices[3] = -1
    out, max_logits, lse = flash_mla_sparse_fwd(q, kv, indices, 0.04, use_legacy=True)
    of_two, max_of_two, lse_of_two = flash_mla_sparse_fwd(q, kv, indices, 0.04, return_log2_lse=True)
    torch.testing.assert_close(max_of_two, max_logits / math.log(2))
    torch.testing.assert_close(lse_of_two, lse / math.log(2))
    without = flash_mla_sparse_fwd(q, kv, indices, 0.04, return_log2_lse=False)
    assert without[1:] == (None, None)
    assert torch.equal(out, of_two)
    assert torch.equal(out, without[0])


def test_the_other_names_of_the_wheel():
    """Its `__all__` has a module of fused functions, which only Blackwell GPUs run, and a function of no arguments."""
    assert has_legacy() is True
    for name in ("prefill", "decode", "permute_q_b_proj", "permute_wv_proj"):
        with pytest.raises(NotImplementedError, match=rf"^fused_norm_rope_attn_rope_cast\.{name}: V4\.1's fused"):
            getattr(fused_norm_rope_attn_rope_cast, name)(True, rms_norm_eps=1e-6)
