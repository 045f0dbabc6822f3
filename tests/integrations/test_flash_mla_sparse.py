"""Calls of FlashMLA's interface over records and selected tokens, against its documented formulas."""

import math

import pytest
import sparse_problems
import torch
from flash_mla_calls import check, dense_expected

from mla_suite import kv_formats
from mla_suite.integrations.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from mla_suite.kv_formats import cache as caches


def records(kv_format, pages, page):
    """Packed records and the keys they stand for, which of v32 are rounded to bf16."""
    kind = kv_formats.get_kv_format(kv_format)
    packed = caches.pack(kind, torch.randn(pages, page, kind.head_dim))
    values = caches.unpack(kind, packed)
    return packed, values.bfloat16().float() if kv_format == "v32" else values


def selection(batch, q_len, topk, tokens):
    """Picks with -1 and out-of-range ones among them."""
    picks = torch.randint(tokens, (batch, q_len, topk), dtype=torch.int32)
    picks[torch.rand(picks.shape) < 0.2] = -1
    picks[torch.rand(picks.shape) < 0.05] = 2**31 - 1
    return picks


def sparse_expected(q, pools, scale, sink=None):
    """pools of (values [num_pages, page_size, d], indices, topk_length or None).

    lse as FlashMLA has it: [batch, heads, q_len] in decode, [tokens, heads] in prefill, and +inf where there is no key.
    """
    values, indices, lengths = zip(*pools, strict=True)
    options = dict(kv_formats=["fp32"] * len(pools), softmax_scale=scale, rounded=False)
    out, lse, _ = sparse_problems.exact(q, values, indices, [None] * len(pools), lengths, sink, **options)
    return out.float(), lse.masked_fill(lse == -torch.inf, torch.inf).transpose(1, -1).float()


@pytest.mark.parametrize("as_dtype", [torch.uint8, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize(("page", "q_len", "heads"), [(64, 1, 64), (2, 2, 128), (61, 3, 16)])
def test_sparse_v32(page, q_len, heads, as_dtype):
    packed, values = records("v32", 9, page)
    k_cache = packed.view(as_dtype).unsqueeze(2)
    indices = selection(3, q_len, 40, 9 * page)
    indices[1] = -1  # nothing to attend to
    q = torch.randn(3, q_len, heads, 576).bfloat16()
    sched_meta, _ = get_mla_metadata()
    out, lse = flash_mla_with_kvcache(
        q, k_cache, None, None, 512, sched_meta, None, None, False, is_fp8_kvcache=True, indices=indices
    )
    check(out, lse, sparse_expected(q, [(values, indices, None)], 576**-0.5))


def two_pools(holder, batch=3, q_len=1, heads=8, page=64):
    """Arguments of a decode over V4's two pools with lengths and a sink, and these pools for `sparse_expected`."""
    (window, values), (extra, extra_values) = records("dsv4", 3, page), records("dsv4", 40, 2)
    indices, extra_indices = selection(batch, q_len, 32, 3 * page), selection(batch, q_len, 16, 80)
    lengths, extra_lengths = torch.tensor([32, 1, 7]).int()[:batch], torch.tensor([0, 5, 16]).int()[:batch]
    arguments = dict(
        q=torch.randn(batch, q_len, heads, 512).bfloat16(),
        k_cache=window.unsqueeze(2),
        block_table=None,
        cache_seqlens=None,
        head_dim_v=512,
        tile_scheduler_metadata=holder,
        softmax_scale=512**-0.5,
        is_fp8_kvcache=True,
        indices=indices,
        attn_sink=torch.randn(heads),
        extra_k_cache=extra.unsqueeze(2),
        extra_indices_in_kvcache=extra_indices,
        topk_length=lengths,
        extra_topk_length=extra_lengths,
    )
    return arguments, [(values, indices, lengths), (extra_values, extra_indices, extra_lengths)]


@pytest.mark.parametrize("with_extra", [False, True])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_sparse_v4_pools_and_sink(with_extra, with_lengths):
    given, pools = two_pools(get_mla_metadata()[0], batch=2, q_len=2, heads=64, page=256)
    assert given["k_cache"].stride(0) > 256 * 584  # block stride padded to 576s
    given["attn_sink"][:3] = torch.tensor([torch.inf, -torch.inf, 50.0])
    given["topk_length"][1] = 0
    if not with_lengths:
        given |= dict(topk_length=None, extra_topk_length=None)
        pools = [(values, indices, None) for values, indices, _ in pools]
    if not with_extra:
        given |= dict(extra_k_cache=None, extra_indices_in_kvcache=None, extra_topk_length=None)
        pools = pools[:1]
    expected = sparse_expected(given["q"], pools, given["softmax_scale"], given["attn_sink"])
    check(*flash_mla_with_kvcache(**given), expected)


def test_older_sparse_form():
    packed, values = records("v32", 4, 64)
    indices, cache_seqlens = selection(2, 1, 64, 256), torch.tensor([256, 100], dtype=torch.int32)
    metadata, num_splits = get_mla_metadata(cache_seqlens, 128, 1, 128, True, 64)
    q = torch.randn(2, 1, 128, 576).bfloat16()
    out, lse = flash_mla_with_kvcache(
        q, packed.unsqueeze(2), None, cache_seqlens, 512, metadata, num_splits, None, False, True, indices
    )
    check(out, lse, sparse_expected(q, [(values, indices, None)], 576**-0.5))


def test_sparse_calls_need_no_metadata():
    packed, _ = records("v32", 4, 64)
    given = torch.randn(2, 1, 16, 576).bfloat16(), packed.unsqueeze(2), None, None, 512
    indices = selection(2, 1, 64, 256)
    without = flash_mla_with_kvcache(*given, None, indices=indices)
    assert all(map(torch.equal, without, flash_mla_with_kvcache(*given, get_mla_metadata()[0], indices=indices)))


def test_older_metadata_with_topk_is_of_that_many_keys():
    lens = torch.tensor([90_000, 100], dtype=torch.int32)
    given = get_mla_metadata(lens, 128, 1, 128, True, 64)
    assert all(map(torch.equal, given, get_mla_metadata(torch.full_like(lens, 64), 128, 1)))
    assert not torch.equal(given[0], get_mla_metadata(lens, 128, 1)[0])


def test_dense_over_records():
    packed, values = records("v32", 3, 64)
    block_table, lengths = torch.tensor([[2, 0], [1, 7]], dtype=torch.int32), [100, 64]
    q = torch.randn(2, 1, 16, 576).bfloat16()
    out, lse = flash_mla_with_kvcache(
        q,
        packed.unsqueeze(2),
        block_table,
        torch.tensor(lengths, dtype=torch.int32),
        512,
        get_mla_metadata()[0],
        is_fp8_kvcache=True,
    )
    check(out, lse, dense_expected(q, values, block_table, lengths, 576**-0.5, False))


@pytest.mark.parametrize("width", [576, 512])
def test_sparse_prefill(width, monkeypatch):
    monkeypatch.setattr("mla_suite.ops.sparse_decode.max_logits.CHUNK_BYTES", 40 * width * 4 * 3)  # 3 tokens a chunk
    q, kv = torch.randn(8, 64, width).bfloat16(), torch.randn(90, 1, width).bfloat16()
    indices = selection(1, 8, 40, 90).view(8, 1, 40)
    indices[5] = -1
    topk_length = torch.tensor([40, 1, 0, 7, 40, 40, 39, 20], dtype=torch.int32)
    sink = torch.randn(64)
    out, max_logits, lse = flash_mla_sparse_fwd(q, kv, indices, 0.04, 512, sink, topk_length)
    check(out, lse, sparse_expected(q, [(kv.float(), indices, topk_length)], 0.04, sink))
    for t in range(8):
        picks = indices[t, 0, : int(topk_length[t])]
        keys = kv[picks[(picks >= 0) & (picks < 90)].long(), 0]
        largest = (q[t].float() @ keys.float().T * 0.04).amax(-1) if len(keys) else torch.full((64,), -math.inf)
        torch.testing.assert_close(max_logits[t], largest)
