"""sparse_decode against fp64: pools, formats, sinks, invalid and repeated indices, NaN in all that is not selected."""

from __future__ import annotations

import itertools

import pytest
import torch
from hostile_inputs import ABSURD, POOLS, poisoned, problem
from hypothesis import given, settings
from hypothesis import strategies as st

import mla_suite
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.ops.decode import Q_FP8

few = settings(max_examples=25, deadline=None, derandomize=True)


def exact(q, pools, scale, sink, head_dim_v):
    """fp64 out, lse and sum(p |v|) of query tokens q [tokens, heads, D]; pools: (kv_format, cache, lists of slots)."""
    outs, lses, sizes = [], [], []
    for t, row in enumerate(q.double()):
        keys = []
        for name, cache, lists in pools:
            slots = [s for s in lists[t] if 0 <= s < cache.shape[0] * cache.shape[1]]
            read = caches.unpack(name, cache).flatten(0, 1)
            read = read.bfloat16() if name == "v32" else read  # its keys are defined as rounded
            keys.append(read[slots].double() if slots else read[:0].double())
        keys = torch.cat(keys)
        values = keys[:, :head_dim_v]
        scores = row @ keys.T * scale
        top = scores.amax(dim=1, keepdim=True) if len(keys) else torch.zeros(len(row), 1, dtype=torch.float64)
        weights = torch.exp(scores - top)
        total = weights.sum(dim=1)
        lses.append(top[:, 0] + total.log() if len(keys) else torch.full((len(row),), -torch.inf, dtype=torch.float64))
        if sink is not None:
            total = total + torch.exp(sink.double() - top[:, 0])
        p = weights / total[:, None] if len(keys) else weights
        outs.append(p @ values)
        sizes.append(p @ values.abs())
    return torch.stack(outs), torch.stack(lses), torch.stack(sizes)


def assert_exact(out, lse, expected, dtype=torch.bfloat16):
    """|out - exact| <= 1 ulp of out + 2^-18 sum(p |v|); lse within 1e-5, relative or absolute."""
    exact_out, exact_lse, size = expected
    out, lse = out.flatten(0, -3).double(), lse.flatten(0, -2).double()
    bits = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[dtype]
    ulp = torch.where(out == 0, 0.0, torch.exp2(torch.floor(torch.log2(out.abs())) - bits))
    error = (out - exact_out).abs()
    assert (error <= ulp + 2**-18 * size).all(), f"largest excess {(error - ulp - 2**-18 * size).max():.3g}"
    empty = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    difference = torch.where(empty, 0.0, lse - exact_lse).abs()
    assert (difference <= 1e-5 * torch.maximum(exact_lse.abs().nan_to_num(posinf=0), torch.ones(()))).all()


def pools_of(names, kv_caches, lists):
    return list(zip(names, kv_caches, lists, strict=True))


@pytest.mark.parametrize("shape", POOLS)
@pytest.mark.parametrize("heads", [1, 8, 12, 16, 24, 32, 40, 64, 96, 128])
def test_against_fp64(shape, heads):
    q, kv_caches, indices, names = problem(POOLS[shape], 3, heads, seed=heads)
    sink = torch.randn(heads, generator=torch.Generator().manual_seed(1)) if heads % 16 else None
    scale = q.shape[-1] ** -0.5
    out, lse = mla_suite.sparse_decode(
        q, kv_caches, indices, attn_sink=sink, kv_formats=names, softmax_scale=scale, head_dim_v=512
    )
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((3, heads, 512), q.dtype, (3, heads), torch.float32)
    assert_exact(out, lse, exact(q, pools_of(names, kv_caches, [i.tolist() for i in indices]), scale, sink, 512))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("q_len", [1, 2, 3, 4, 5, 8])
def test_query_lengths_and_dtypes(dtype, q_len):
    shape = POOLS["dsv4 window and compressed"]
    q, kv_caches, indices, names = problem(shape, 2 * q_len, 8, seed=q_len, dtype=dtype)
    batched = q.view(2, q_len, 8, 512)
    dense = [index.view(2, q_len, -1) for index in indices]
    out, lse = mla_suite.sparse_decode(batched, kv_caches, dense, kv_formats=names, softmax_scale=0.05)
    assert out.shape == (2, q_len, 8, 512)
    assert lse.shape == (2, q_len, 8)
    assert_exact(out, lse, exact(q, pools_of(names, kv_caches, [i.tolist() for i in indices]), 0.05, None, 512), dtype)


@pytest.mark.parametrize("name", ["fp8", "fp8_fnuz"])
@pytest.mark.parametrize("width", [576, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, *Q_FP8])
def test_rows_of_per_tensor_fp8(name, width, dtype):
    """Descales multiply in fp32: rows that fp16 could not hold, queries that are no e4m3 after it."""
    shape = [(name, 3, 16, 20), (name, 30, 2, 16)]
    q, kv_caches, indices, names = problem(shape, 3, 8, seed=1) if width == 512 else problem(shape[:1], 3, 8, seed=1)
    q, q_descale, kv_descale = q.to(dtype), None, torch.tensor(3000.0)
    out_dtype = dtype
    if dtype in Q_FP8:
        q_descale, out_dtype = torch.tensor([0.0137]), torch.bfloat16
    given = dict(kv_formats=names, softmax_scale=3e-6, q_descale=q_descale, kv_descale=kv_descale)
    out, lse = mla_suite.sparse_decode(q, kv_caches, indices, **given)
    assert out.dtype == out_dtype
    read = q.double() * (1.0 if q_descale is None else q_descale.double())
    stored = [caches.unpack(name, cache) * kv_descale for cache in kv_caches]
    lists = pools_of(["fp32"] * len(names), stored, [i.tolist() for i in indices])
    assert_exact(out, lse, exact(read, lists, 3e-6, None, 512), out_dtype)


@pytest.mark.parametrize("head_dim_v", [1, 64, 448, 512, 576])
def test_v_is_the_front_of_the_row(head_dim_v):
    q, kv_caches, indices, names = problem(POOLS["bf16"], 2, 4, seed=0)
    out, lse = mla_suite.sparse_decode(
        q, kv_caches, indices, kv_formats=names, softmax_scale=0.04, head_dim_v=head_dim_v
    )
    assert out.shape == (2, 4, head_dim_v)
    assert_exact(out, lse, exact(q, pools_of(names, kv_caches, [indices[0].tolist()]), 0.04, None, head_dim_v))


SINKS = {"zero": 0.0, "none": -torch.inf, "all": torch.inf, "large": 60.0, "small": -60.0}


@pytest.mark.parametrize("sink", SINKS)
def test_sinks_change_out_alone(sink):
    value = SINKS[sink]
    q, kv_caches, indices, names = problem(POOLS["three pools"], 3, 4, seed=3)
    indices[0][1], indices[1][1], indices[2][1] = -1, -1, -1  # query token 1 has no key
    plain, plain_lse = mla_suite.sparse_decode(q, kv_caches, indices, kv_formats=names, softmax_scale=0.04)
    sinks = torch.full((4,), value)
    out, lse = mla_suite.sparse_decode(q, kv_caches, indices, attn_sink=sinks, kv_formats=names, softmax_scale=0.04)
    assert torch.equal(lse, plain_lse)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert (lse[1] == -torch.inf).all()
    if value == torch.inf:
        assert torch.equal(out, torch.zeros_like(out))
    elif value == -torch.inf:
        assert torch.equal(out, plain)
    lists = pools_of(names, kv_caches, [i.tolist() for i in indices])
    assert_exact(out, lse, exact(q, lists, 0.04, sinks if value < torch.inf else torch.full((4,), 1e4), 512))


@pytest.mark.parametrize("empty", ["all invalid", "length 0", "ragged", "no pages", "topk 0"])
@pytest.mark.parametrize("sink", [None, 0.0, torch.inf, -torch.inf, torch.nan])
def test_nothing_to_attend_to(empty, sink):
    q = torch.randn(2, 3, 512).bfloat16()
    cache = poisoned("dsv4", 0 if empty == "no pages" else 2, 4, (), 0)
    index = torch.zeros(2, 0 if empty == "topk 0" else 6, dtype=torch.int32)
    indptr = lengths = None
    if empty == "all invalid":
        index = torch.tensor([[*ABSURD, 8, 9]] * 2, dtype=torch.int32)
    elif empty == "length 0":
        lengths = torch.zeros(2, dtype=torch.int32)
    elif empty == "ragged":
        index, indptr = index.flatten(), torch.full((3,), 5, dtype=torch.int32)
    out, lse = mla_suite.sparse_decode(
        q,
        [cache],
        [index],
        [indptr],
        [lengths],
        None if sink is None else torch.full((3,), sink),
        kv_formats=["dsv4"],
        softmax_scale=1.0,
    )
    assert torch.equal(out, torch.zeros(2, 3, 512).bfloat16())
    assert (lse == -torch.inf).all()


def test_an_index_given_twice_is_two_keys():
    q, kv_caches, _, names = problem([("bf16", 2, 8, 4)], 1, 4, seed=5)
    caches.scatter(get_kv_format("bf16"), kv_caches[0], torch.arange(16), torch.randn(16, 576))
    lists = [[3, 3, 3, 9, 3, 11, 9]]
    index = torch.tensor(lists, dtype=torch.int32)
    out, lse = mla_suite.sparse_decode(q, kv_caches, [index], kv_formats=names, softmax_scale=0.05)
    expected = exact(q, pools_of(names, kv_caches, [lists]), 0.05, None, 512)
    assert_exact(out, lse, expected)
    once = exact(q, pools_of(names, kv_caches, [[[3, 9, 11]]]), 0.05, None, 512)
    assert (expected[1] - once[1]).max() > 0.1  # the fp64 definition itself tells them apart
    same, same_lse = mla_suite.sparse_decode(
        q, kv_caches * 2, [index[:, :3], index[:, 3:]], kv_formats=names * 2, softmax_scale=0.05
    )
    assert torch.equal(out, same)
    assert torch.equal(lse, same_lse)


def test_ragged_dense_and_lengths_are_the_same_selection():
    q, kv_caches, (index,), names = problem([("v32", 3, 16, 12)], 6, 8, seed=8)
    keep = torch.tensor([12, 0, 5, 1, 12, 7], dtype=torch.int32)
    offset = 3  # ragged indices may begin anywhere
    ragged = torch.cat(
        [torch.full((offset,), -5, dtype=torch.int32), *[row[:n] for row, n in zip(index, keep, strict=True)]]
    )
    indptr = torch.cat([torch.zeros(1), keep.cumsum(0)]).int() + offset

    def call(q, index, indptr=None, lengths=None):
        out, lse = mla_suite.sparse_decode(
            q, kv_caches, [index], [indptr], [lengths], kv_formats=names, softmax_scale=0.04
        )
        return out.reshape(6, 8, 512), lse.reshape(6, 8)

    results = [
        call(q, index, lengths=keep),
        call(q, ragged, indptr=indptr),
        call(q.view(2, 3, 8, 576), ragged, indptr=indptr),
        call(q.view(2, 3, 8, 576), index.view(2, 3, -1), lengths=keep.view(2, 3)),
    ]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
    lists = [row[:n].tolist() for row, n in zip(index, keep, strict=True)]
    assert_exact(*results[0], exact(q, pools_of(names, kv_caches, [lists]), 0.04, None, 512))
    per_sequence = torch.tensor([4, 9], dtype=torch.int32)
    ours = call(q.view(2, 3, 8, 576), index.view(2, 3, -1), lengths=per_sequence)
    theirs = call(q, index, lengths=per_sequence.repeat_interleave(3))
    assert torch.equal(ours[0], theirs[0])


def test_a_query_token_is_bitwise_the_same_in_any_batch():
    q, kv_caches, indices, names = problem(POOLS["dsv4 window and compressed"], 9, 16, seed=2)
    out, lse = mla_suite.sparse_decode(q, kv_caches, indices, kv_formats=names, softmax_scale=0.04, split_size=16)
    for t in range(9):
        single = [index[t : t + 1] for index in indices]
        alone = mla_suite.sparse_decode(
            q[t : t + 1], kv_caches, single, kv_formats=names, softmax_scale=0.04, split_size=16
        )
        assert torch.equal(out[t], alone[0][0])
        assert torch.equal(lse[t], alone[1][0])


@few
@given(st.sampled_from(["bf16", "v32", "dsv4", "dsv4_fnuz", "fp8"]), st.integers(0, 10**6), st.integers(1, 5))
def test_permuting_pages_changes_nothing(name, seed, page):
    pages = 6
    q, (cache,), (index,), names = problem([(name, pages, page, 11)], 2, 4, seed)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    moved = cache.view(torch.uint8)[order].view(cache.dtype)  # torch 2.9 does not index float8
    where = order.argsort()
    valid = (index >= 0) & (index < pages * page)
    slot = index.clamp(0, pages * page - 1).long()
    renamed = torch.where(valid, where[slot // page] * page + slot % page, index.long()).int()
    before = mla_suite.sparse_decode(q, [cache], [index], kv_formats=names, softmax_scale=0.04)
    after = mla_suite.sparse_decode(q, [moved], [renamed], kv_formats=names, softmax_scale=0.04)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


@few
@given(st.integers(0, 10**6), st.lists(st.integers(0, 20), min_size=1, max_size=4), st.booleans())
def test_splitting_the_selection_and_combining_equals_not_splitting(seed, splits, with_sink):
    q, (cache,), (index,), names = problem([("v32", 2, 16, 20)], 2, 8, seed, dtype=torch.float32)
    sink = torch.randn(8, generator=torch.Generator().manual_seed(seed)) if with_sink else None
    bounds = [0, *sorted(splits), 20]
    parts = [
        mla_suite.sparse_decode(q, [cache], [index[:, a:b].contiguous()], kv_formats=names, softmax_scale=0.04)
        for a, b in itertools.pairwise(bounds)
    ]
    partial_out = torch.stack([out for out, _ in parts], dim=1).flatten(0, 1)  # [tokens x splits, heads, head_dim_v]
    partial_lse = torch.stack([lse for _, lse in parts], dim=1).flatten(0, 1)
    out, lse = mla_suite.combine(
        partial_out, partial_lse, attn_sink=sink, num_splits=len(parts), out_dtype=torch.bfloat16
    )
    assert_exact(out, lse, exact(q, pools_of(names, [cache], [index.tolist()]), 0.04, sink, 512))


@few
@given(st.sampled_from(["bf16", "fp16", "v32", "dsv4"]), st.integers(0, 10**6), st.integers(1, 12))
def test_append_then_attend_equals_attending_to_the_rows(name, seed, split):
    one = get_kv_format(name)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(12, one.head_dim, generator=generator).bfloat16()
    cache = poisoned(name, 3, 5, (), 0)
    slots = torch.randperm(15, generator=generator)[:12]
    for part in (slice(0, split), slice(split, 12)):
        new = rows[part]
        mla_suite.append_kv(new[:, : one.latent], new[:, one.latent :], cache, slots[part], kv_format=name)
    q = torch.randn(1, 8, one.head_dim, generator=generator).bfloat16()
    out, lse = mla_suite.sparse_decode(q, [cache], [slots[None].int()], kv_formats=[name], softmax_scale=0.04)
    whole = caches.pack(one, rows[None])
    assert_exact(out, lse, exact(q, [(name, whole, [list(range(12))])], 0.04, None, 512))


def test_out_overload_writes_strided_outputs_of_the_caller():
    q, kv_caches, indices, names = problem(POOLS["v32"], 2, 4, seed=1)
    args = (q, kv_caches, indices, [None], [None])
    out, lse = mla_suite.sparse_decode(*args, kv_formats=names, softmax_scale=0.04)
    room, lse_room = torch.full((2, 4, 600), 7.0).bfloat16(), torch.full((2, 4), 7.0)
    torch.ops.mla_suite.sparse_decode.out(
        *args, kv_formats=names, softmax_scale=0.04, out=room[..., :512], lse=lse_room
    )
    assert torch.equal(room[..., :512], out)
    assert (room[..., 512:] == 7).all()
    assert torch.equal(lse_room, lse)


def test_pool_beyond_two_gigabytes():
    cache = caches.empty("v32", 55_000, 64)  # 2.3 GB of address space, of which two pages are touched
    rows = torch.randn(2, 576)
    last = 55_000 * 64 - 1
    caches.scatter(get_kv_format("v32"), cache, torch.tensor([0, last]), rows)
    small = caches.pack("v32", rows[None])
    q = torch.randn(1, 4, 576).bfloat16()
    far = mla_suite.sparse_decode(
        q, [cache], [torch.tensor([[0, last, last + 1]]).int()], kv_formats=["v32"], softmax_scale=0.04
    )
    near = mla_suite.sparse_decode(q, [small], [torch.tensor([[0, 1]]).int()], kv_formats=["v32"], softmax_scale=0.04)
    assert torch.equal(far[0], near[0])
    assert torch.equal(far[1], near[1])


def test_compiled_fullgraph_equals_eager_with_two_pools():
    q, kv_caches, indices, names = problem(POOLS["dsv4 window and compressed"], 3, 8, seed=4)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def step(q, kv_caches, indices):
        return mla_suite.sparse_decode(q * 1, kv_caches, indices, kv_formats=names, softmax_scale=0.04)

    eager = mla_suite.sparse_decode(q, kv_caches, indices, kv_formats=names, softmax_scale=0.04)
    compiled = step(q, kv_caches, indices)
    assert torch.equal(eager[0], compiled[0])
    assert torch.equal(eager[1], compiled[1])
