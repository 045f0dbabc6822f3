"""sparse_decode in Triton gives the reference's numbers, run by Triton's interpreter on the CPU.

The interpreter's bf16 dot is wrong (Triton 3.6), so queries are fp16 and fp32, or bf16 that are multiplied as fp32; the
pools are in every kv_format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from backend import check_layouts, run
from backend_calls import assert_refused
from sparse_problems import exact as exact_of
from sparse_problems import problem as hostile_problem

from mla_suite import testing
from mla_suite.core import register
from mla_suite.core.dispatch import Supported
from mla_suite.kv_formats import KV_FORMATS
from mla_suite.kv_formats import cache as caches
from mla_suite.ops.sparse_decode import SparseDecodeArgs
from mla_suite.ops.sparse_decode import triton as sparse

POOLS = {
    "dsv4 window and compressed": [("dsv4", 2, 64, 24), ("dsv4", 30, 2, 16)],
    "two flavours": [("dsv4_fnuz", 2, 16, 13), ("dsv4", 3, 5, 7)],
    "three pools": [("dsv4", 1, 256, 9), ("bf16", 4, 61, 8), ("dsv4_fnuz", 5, 1, 5)],
}


def problem(shape: Any, tokens: int, heads: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """(q, caches, indices, kv_formats)"""
    width = 512 if len(shape) > 1 else 0
    args, kwargs = hostile_problem(shape, tokens, heads, seed, spread=0, width=width, dtype=dtype)
    return *args[:3], kwargs["kv_formats"]


def compare(
    q: torch.Tensor,
    kv_caches: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor],
    names: Sequence[str],
    indptrs: Sequence[torch.Tensor | None] | None = None,
    lengths: Sequence[torch.Tensor | None] | None = None,
    sink: torch.Tensor | None = None,
    kv_descale: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    nothing = [None] * len(names)
    args = (q, kv_caches, indices, indptrs or nothing, lengths or nothing, sink, None, None, kv_descale)
    kwargs = dict(kv_formats=names, softmax_scale=0.05) | options
    expected = torch.ops.mla_suite.sparse_decode(*args, **kwargs)
    got = run(sparse, "sparse_decode", args, kwargs)
    torch.testing.assert_close(got, expected, atol=3e-6, rtol=1e-5, equal_nan=True)
    return got[0], got[1]


@pytest.mark.parametrize("name", KV_FORMATS)
def test_kv_formats(name: str) -> None:
    compare(*problem([(name, 3, 7, 90)], 2, 16), num_splits=3 if "fnuz" in name else 1)


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize(("heads", "options"), [(1, {}), (12, {"split_size": 20}), (40, {"num_splits": 2})])
def test_pools_and_heads(name: str, heads: int, options: dict[str, int]) -> None:
    sink = torch.randn(heads) if heads != 12 else None
    compare(*problem(POOLS[name], 2, heads, seed=heads), sink=sink, **options)


@pytest.mark.parametrize(("width", "splits"), [(576, 1), (512, 3)])
def test_rows_of_per_tensor_fp8_with_a_descale(width: int, splits: int) -> None:
    shape = [("fp8", 3, 16, 90), ("fp8_fnuz", 30, 2, 16)]
    q, *rest = problem(shape if width == 512 else shape[:1], 2, 16)
    assert q.shape[-1] == width
    compare(q, *rest, sink=torch.randn(16), kv_descale=torch.tensor([0.37]), num_splits=splits)


def test_a_descale_of_queries() -> None:
    """Here of fp32 ones, since float8 queries are multiplied as bf16; an operator refuses it, the kernel does not."""
    q, kv_caches, indices, names = problem([("v32", 3, 16, 40)], 2, 16)
    args, scale = (q, kv_caches, indices, [None], [None]), 0.05
    expected = torch.ops.mla_suite.sparse_decode(*args, kv_formats=names, softmax_scale=scale)
    answer = sparse.supports(register.get("sparse_decode").problem(*args, kv_formats=names, softmax_scale=scale), None)
    assert isinstance(answer, Supported)
    given = dict(kv_formats=names, softmax_scale=scale / 0.375, q_descale=torch.tensor([0.375]))
    out, lse = torch.empty(2, 16, 512), torch.empty(2, 16)
    sparse.run(answer.config, (out, lse), SparseDecodeArgs(*args, **given))
    torch.testing.assert_close(out, expected[0], atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected[1], atol=3e-6, rtol=1e-5)


def test_128_heads() -> None:
    compare(*problem(POOLS["two flavours"], 1, 128), sink=torch.randn(128))


def test_ragged_dense_and_lengths() -> None:
    q, kv_caches, (index, other), names = problem([("dsv4", 3, 16, 12), ("fp16", 3, 16, 12)], 6, 8)
    keep = torch.tensor([12, 0, 5, 1, 12, 7], dtype=torch.int32)
    ragged = torch.cat([torch.full((3,), -5).int(), *[row[:n] for row, n in zip(other, keep, strict=True)]])
    indptr = torch.cat([torch.zeros(1), keep.cumsum(0)]).int() + 3
    plain = compare(q, kv_caches, [index, ragged], names, [None, indptr], [keep, None])
    batched, sizes = q.view(2, 3, 8, 512), keep.view(2, 3)
    same = compare(batched, kv_caches, [index.view(2, 3, -1), ragged], names, [None, indptr], [sizes, None])
    assert torch.equal(plain[0], same[0].view_as(plain[0]))
    per_sequence = torch.tensor([4, 9], dtype=torch.int32)
    dense = [index.view(2, 3, -1), other.view(2, 3, -1)]
    compare(batched, kv_caches, dense, names, None, [per_sequence, None], num_splits=2)
    compare(batched, kv_caches, [dense[0], ragged], names, [None, indptr], [per_sequence, None], split_size=4)


def test_lengths_are_a_column_of_a_table() -> None:
    q, kv_caches, indices, names = problem([("fp32", 3, 16, 12)], 3, 4)
    table = torch.tensor([[12, 0], [5, 0], [7, 0]], dtype=torch.int32)
    compare(q[:, None], kv_caches, [indices[0][:, None]], names, None, [table[:, :1]])


def test_a_length_counts_no_more_entries_than_there_are() -> None:
    """A GPU does not look at lengths: what lies behind a query token's entries are the next one's."""
    q, kv_caches, indices, names = problem([("fp32", 3, 16, 12)], 2, 4)
    kwargs = dict(kv_formats=names, softmax_scale=0.05)
    lengths = torch.tensor([17, 30], dtype=torch.int32)
    found = run(sparse, "sparse_decode", (q, kv_caches, indices, [None], [lengths]), kwargs)
    assert all(map(torch.equal, found, run(sparse, "sparse_decode", (q, kv_caches, indices, [None], [None]), kwargs)))


@pytest.mark.parametrize("sink", [None, 0.0, torch.inf, -torch.inf])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_token_without_keys(sink: float | None, num_splits: int) -> None:
    q, kv_caches, indices, names = problem(POOLS["three pools"], 3, 4)
    indices[0][1], indices[1][1], indices[2][1] = -1, 2**31 - 1, -1
    sinks = None if sink is None else torch.full((4,), sink)
    out, lse = compare(q, kv_caches, indices, names, sink=sinks, num_splits=num_splits)
    assert out[1].eq(0).all()
    assert lse[1].eq(-torch.inf).all()


def test_no_pages_and_no_topk() -> None:
    q, _, indices, names = problem([("dsv4", 1, 4, 6)], 2, 4)
    empty = caches.empty("dsv4", 0, 4)
    compare(q, [empty], indices, names)
    compare(q, [empty], [indices[0][:, :0]], names)
    compare(q[:0], [empty], [indices[0][:0]], names)


def test_nan_that_is_selected_is_seen() -> None:
    for name in ("dsv4", "v32", "fp16"):
        q, kv_caches, _, names = problem([(name, 2, 4, 1)], 1, 4)
        index = torch.arange(8, dtype=torch.int32)[None]  # all slots, those still 0xff too
        out, lse = compare(q, kv_caches, [index], names)
        assert out.isnan().all()
        assert lse.isnan().all()


def test_a_query_token_is_bitwise_the_same_in_any_batch() -> None:
    q, kv_caches, indices, names = problem(POOLS["dsv4 window and compressed"], 5, 16)
    indptr = torch.arange(6, dtype=torch.int32) * indices[0].shape[1]
    for ragged in (False, True):
        chosen = [indices[0].flatten() if ragged else indices[0], indices[1]]
        whole = compare(q, kv_caches, chosen, names, [indptr if ragged else None, None], split_size=16)
        for t in (0, 3):
            one = [indices[0][t] if ragged else indices[0][t : t + 1], indices[1][t : t + 1]]
            bounds = [indptr[:2] if ragged else None, None]
            alone = compare(q[t : t + 1], kv_caches, one, names, bounds, split_size=16)
            assert torch.equal(whole[0][t], alone[0][0])
            assert torch.equal(whole[1][t], alone[1][0])


def test_every_fp8_code_is_read_as_the_kv_format_says() -> None:
    for name in ("fp8", "fp8_fnuz"):
        codes = torch.arange(256, dtype=torch.uint8).repeat(2)
        bad = torch.tensor([0x80]) if "fnuz" in name else torch.tensor([0x7F, 0xFF])
        codes[torch.isin(codes, bad)] = 1
        cache = torch.zeros(1, 1, 576, dtype=torch.uint8)
        cache[0, 0, :512] = codes
        out, _ = compare(torch.zeros(1, 1, 576), [cache], [torch.zeros(1, 1, dtype=torch.int32)], [name])
        torch.testing.assert_close(out[0, 0], caches.unpack(name, cache)[0, 0, :512], atol=0, rtol=0)


def test_half_precision() -> None:
    q, kv_caches, indices, names = problem([("v32", 3, 16, 150)], 2, 24, dtype=torch.float16)
    args = (q, kv_caches, indices, [None], [None])
    kwargs = dict(kv_formats=names, softmax_scale=0.04)
    expected_out, expected_lse = torch.ops.mla_suite.sparse_decode(*args, **kwargs)
    out, lse = run(sparse, "sparse_decode", args, kwargs)
    # results are rounded to fp16: half an ulp is 2^-11 of values of size 1
    torch.testing.assert_close(out, expected_out, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, expected_lse, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("q_dtype", "kv_formats"),
    [
        (torch.float16, ["bf16"]),
        (torch.float16, ["fp32"]),
        (torch.float16, ["v32_pow2"]),
        (torch.bfloat16, ["fp32"]),
        (torch.bfloat16, ["bf16", "fp16"]),
        (torch.bfloat16, ["dsv4", "fp32"]),
    ],
    ids=str,
)
def test_rows_of_more_bits_or_range_than_the_queries(q_dtype: torch.dtype, kv_formats: list[str]) -> None:
    """Neither bits of keys are lost nor is a value that the queries' type does not have infinite."""
    q, kv_caches, indices, names = problem([(name, 3, 16, 40) for name in kv_formats], 2, 4, dtype=q_dtype)
    if len(kv_formats) == 1:  # the last value is no part of V
        rows = caches.unpack(names[0], kv_caches[0])
        rows[..., -1], q[..., -1] = 7e4, 0.0
        kv_caches[0] = caches.pack(names[0], rows)
    nothing = [None] * len(names)
    args, kwargs = (q, kv_caches, indices, nothing, nothing), dict(kv_formats=names, softmax_scale=0.2)
    exact = exact_of(*args, None, rounded=False, **kwargs)
    for compared in testing.attention_within(run(sparse, "sparse_decode", args, kwargs), exact):
        tight = compared.allowed if compared.name == "out" else 3e-6 + 1e-6 * compared.exact.abs()
        assert bool(((compared.got.double() - compared.exact).abs() <= tight).all()), compared.name


def test_queries_and_indices_that_are_parts_of_larger_tensors() -> None:
    q, kv_caches, (index,), names = problem([("v32", 3, 16, 12)], 4, 8)
    wider_q, wider_index = torch.full((4, 10, 580), torch.nan), torch.full((4, 15), 5, dtype=torch.int32)
    wider_q[:, 1:9, 2:578], wider_index[:, 2:14] = q, index
    expected = compare(q, kv_caches, [index], names)
    got = compare(wider_q[:, 1:9, 2:578], kv_caches, [wider_index[:, 2:14]], names)
    assert all(map(torch.equal, got, expected))


def test_splits_of_a_size_have_the_same_bits_in_wider_lists() -> None:
    q, kv_caches, (index,), names = problem([("fp32", 3, 64, 150)], 1, 1)
    wider = torch.nn.functional.pad(index, (0, 350), value=-1)
    narrow = compare(q, kv_caches, [index], names, split_size=128)
    lengths = torch.full((1,), 150, dtype=torch.int32)
    assert all(map(torch.equal, narrow, compare(q, kv_caches, [wider], names, None, [lengths], split_size=128)))


def test_refusals_are_sentences() -> None:
    q, kv_caches, indices, names = problem([("v32", 3, 16, 12)], 2, 8)
    args, kwargs = (q, kv_caches, indices, [None], [None]), dict(kv_formats=names, softmax_scale=0.05)
    given = register.get("sparse_decode").problem(*args, **kwargs)
    for change in (dict(head_dim_v=500), dict(head_dim_v=64, head_dim=128), dict(head_dim_v=8, head_dim=8)):
        assert_refused(sparse.supports(given._replace(**change), None), ";")


@pytest.mark.parametrize("splits", [1, 2])
def test_outputs_of_any_strides(splits: int) -> None:
    q, kv_caches, indices, _ = problem([("fp32", 3, 8, 20)], 4, 3)
    indices[0][1] = -1
    batched = q.view(2, 2, *q.shape[1:]), kv_caches, [indices[0].view(2, 2, -1)], [None], [None]
    options: dict[str, Any] = dict(kv_formats=["fp32"], softmax_scale=0.2, num_splits=splits)
    check_layouts(sparse, "sparse_decode", batched, options)
