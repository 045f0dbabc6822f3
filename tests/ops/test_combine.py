"""combine against fp64, and the rules of its docstring: what is not read, what is NaN, what the sink does."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mla_suite
from mla_suite.testing import Exact, assert_close

few = settings(max_examples=40, deadline=None, derandomize=True)
INF, NAN = torch.inf, torch.nan


def exact(partial_out, partial_lse, bounds, sink=None):
    """fp64 merge of each sequence by the formula: weights exp(lse_s - log sum exp), splits of lse -inf left out."""
    outs, lses, sizes = [], [], []
    rows, head_dim_v = partial_out.shape[1:]
    logits = torch.full((rows,), -INF) if sink is None else sink.repeat(rows // sink.shape[0])
    for first, end in itertools.pairwise(bounds):
        lse = partial_lse[first:end].double()
        total = torch.logsumexp(lse, dim=0) if end > first else torch.full((rows,), -INF, dtype=torch.float64)
        denominator = torch.logaddexp(total, logits.double())
        weight = torch.where(lse == -INF, 0.0, torch.exp(lse - denominator)).unsqueeze(-1)
        values = torch.where(weight == 0, 0.0, partial_out[first:end].double())
        outs.append((weight * values).sum(0))
        sizes.append((weight * values.abs()).sum(0))
        lses.append(total)
    none = torch.zeros(0, rows, head_dim_v, dtype=torch.float64)
    stack = lambda parts, empty: torch.stack(parts) if parts else empty  # noqa: E731  read at once
    return Exact(stack(outs, none), stack(lses, none[..., 0]), stack(sizes, none))


def partials(splits, rows, head_dim_v=64, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(splits, rows, head_dim_v, generator=generator)
    return out, torch.randn(splits, rows, generator=generator) * spread


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("splits", [1, 2, 3, 4, 7, 16, 33, 64, 66, 132, 160, 161, 512])
def test_uniform_splits(splits, sink):
    out, lse = partials(2 * splits, 12)
    attn_sink = torch.randn(4) if sink else None
    result = mla_suite.combine(out, lse, None, attn_sink, num_splits=splits)
    assert_close(*result, exact(out, lse, [0, splits, 2 * splits], attn_sink))


@pytest.mark.parametrize("heads", [1, 8, 12, 16, 24, 32, 40, 64, 96, 128])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8])
def test_heads_and_tokens(heads, tokens):
    """Rows are tokens x heads, so a sink of `heads` logits repeats over the tokens."""
    out, lse = partials(6, tokens * heads, head_dim_v=16)
    sink = torch.randn(heads)
    bounds = [0, 1, 1, 4, 6]
    result = mla_suite.combine(out, lse, torch.tensor(bounds, dtype=torch.int32), sink)
    assert_close(*result, exact(out, lse, bounds, sink))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim_v", [1, 128, 512])
def test_out_dtypes_and_widths(out_dtype, head_dim_v):
    out, lse = partials(9, 5, head_dim_v)
    result = mla_suite.combine(out, lse, num_splits=3, out_dtype=out_dtype)
    assert result[0].dtype == out_dtype
    assert_close(*result, exact(out, lse, [0, 3, 6, 9]))


@given(st.lists(st.integers(0, 20), min_size=0, max_size=8), st.floats(0.1, 80), st.integers(0, 2**16))
@few
def test_ragged_splits(counts, spread, seed):
    bounds = [0, *itertools.accumulate(counts)]
    out, lse = partials(bounds[-1], 3, 8, seed, spread)
    lse[torch.rand(lse.shape, generator=torch.Generator().manual_seed(seed)) < 0.2] = -INF
    result = mla_suite.combine(out, lse, torch.tensor(bounds, dtype=torch.int32), out_dtype=torch.float32)
    assert_close(*result, exact(out, lse, bounds))


@given(st.lists(st.integers(1, 11), min_size=1, max_size=4), st.integers(0, 2**16))
@few
def test_merging_in_two_steps_equals_one(counts, seed):
    out, lse = partials(sum(counts), 3, 8, seed)
    bounds = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    inner = mla_suite.combine(out, lse, bounds, out_dtype=torch.float32)
    outer = mla_suite.combine(*inner, num_splits=len(counts), out_dtype=torch.float32)
    assert_close(*outer, exact(out, lse, [0, sum(counts)]))


# Values that are not read


def test_a_split_of_lse_minus_infinity_is_not_read():
    out, lse = partials(4, 2)
    out[1] = NAN
    lse[1] = -INF
    out[2, 0] = INF
    lse[2, 0] = -INF
    assert_close(*mla_suite.combine(out, lse, num_splits=4), exact(out, lse, [0, 4]))


def test_a_split_whose_weight_rounds_to_zero_is_not_read():
    out, lse = partials(2, 3)
    out[0], lse[0], lse[1] = NAN, -200.0, 0.0
    result = mla_suite.combine(out, lse, num_splits=2, out_dtype=torch.float32)
    assert torch.equal(result[0][0], out[1])


@pytest.mark.parametrize("sink", [None, -INF, 0.0, INF])
def test_nothing_to_merge_gives_zero_and_minus_infinity(sink):
    out, lse = partials(3, 4)
    out.fill_(NAN)
    lse.fill_(-INF)
    logits = None if sink is None else torch.full((4,), sink)
    bounds = torch.tensor([0, 0, 3, 3], dtype=torch.int32)
    merged, total = mla_suite.combine(out, lse, bounds, logits)
    assert torch.equal(merged, torch.zeros(3, 4, 64, dtype=torch.bfloat16))
    assert torch.equal(total, torch.full((3, 4), -INF))


# NaN is never hidden


@pytest.mark.parametrize("sink", [None, 0.0, INF])
def test_a_nan_lse_gives_nan(sink):
    out, lse = partials(3, 2)
    lse[1, 0] = NAN
    logits = None if sink is None else torch.full((2,), sink)
    merged, total = mla_suite.combine(out, lse, None, logits, num_splits=3)
    assert bool(merged[0, 0].isnan().all())
    assert bool(total[0, 0].isnan())
    assert not bool(merged[0, 1].isnan().any())
    assert not bool(total[0, 1].isnan())


def test_nan_in_a_split_that_weighs_gives_nan():
    out, lse = partials(3, 2, spread=0.1)
    out[2, 1, 5] = NAN
    merged, total = mla_suite.combine(out, lse, num_splits=3)
    assert merged.isnan().nonzero().tolist() == [[0, 1, 5]]
    assert not bool(total.isnan().any())


@pytest.mark.parametrize("sink", [None, 0.5])
def test_plus_infinity_beside_zeros_is_a_part_without_keys(sink):
    out, lse = partials(4, 3)
    out[1], lse[1] = 0.0, INF
    out[0::2, 2], lse[0::2, 2] = 0.0, INF
    out[3, 2], lse[3, 2] = -0.0, INF
    logits = None if sink is None else torch.full((3,), sink)
    unmarked = torch.where(lse == INF, -INF, lse)
    merged, total = mla_suite.combine(out, lse, None, logits, num_splits=4)
    assert_close(merged, total, exact(out, unmarked, [0, 4], logits))
    assert total[0, 2] == -INF
    assert bool((merged[0, 2] == 0).all())
    out[1, 0, 63] = 1e-30
    merged, total = mla_suite.combine(out, lse, None, logits, num_splits=4)
    assert bool(merged[0, 0].isnan().all())
    assert total[0, 0] == INF


def test_lse_plus_infinity_is_not_taken_for_a_number():
    out, lse = partials(2, 1)
    lse[0] = INF
    merged, total = mla_suite.combine(out, lse, num_splits=2)
    assert bool((total == INF).all())
    assert bool(merged.isnan().all())


# Sinks


def test_sinks_change_out_and_never_lse():
    out, lse = partials(4, 6)
    plain_out, plain_lse = mla_suite.combine(out, lse, num_splits=2, out_dtype=torch.float32)
    for value in (-INF, -3.0, 0.0, 5.0, INF):
        sink = torch.full((3,), value)
        merged, total = mla_suite.combine(out, lse, None, sink, num_splits=2, out_dtype=torch.float32)
        assert torch.equal(total, plain_lse)
        share = torch.sigmoid(plain_lse - value) if value != -INF else torch.ones(())
        torch.testing.assert_close(merged, plain_out * share.unsqueeze(-1) if value != -INF else plain_out)
        assert bool((merged == 0).all()) == (value == INF)


# The .out overload


def test_skip_single_leaves_what_producers_wrote():
    out, lse = partials(6, 2)
    bounds = [0, 1, 1, 4, 5, 6]
    split_indptr = torch.tensor(bounds, dtype=torch.int32)
    results = {
        skip: (torch.full((5, 2, 64), 7.0, dtype=torch.bfloat16), torch.full((5, 2), 7.0)) for skip in (False, True)
    }
    for skip, (merged, total) in results.items():
        torch.ops.mla_suite.combine.out(
            out, lse, split_indptr, out_dtype=torch.bfloat16, skip_single=skip, out=merged, lse=total
        )
    single = torch.tensor([True, False, False, True, True])
    for kept, written in zip(results[True], results[False], strict=True):
        assert bool((kept[single] == 7.0).all())
        assert torch.equal(kept[~single], written[~single])
    assert_close(*results[False], exact(out, lse, bounds))


def test_strided_outputs_and_partials():
    wide, lse_wide = torch.randn(6, 4, 96), torch.randn(4, 6)
    out, lse = wide[:, :, 16:80], lse_wide.t()[:, :4].contiguous()
    room, lse_room = torch.full((2, 8, 100), 7.0), torch.full((2, 9), 7.0)
    merged, total = room[:, ::2, 10:74], lse_room[:, 3:7]
    torch.ops.mla_suite.combine.out(out, lse, num_splits=3, out_dtype=torch.float32, out=merged, lse=total)
    assert_close(merged, total, exact(out, lse, [0, 3, 6]))
    merged.fill_(7.0)
    total.fill_(7.0)
    assert bool((room == 7.0).all())
    assert bool((lse_room == 7.0).all())


def test_offsets_beyond_31_bits():
    """Splits 2^30 elements apart, in 8 GiB of address space of which only they are touched."""
    gap = 2**30 + 64
    out = torch.empty(2 * gap + 64).as_strided((3, 1, 64), (gap, 64, 1))
    out.copy_(torch.randn(3, 1, 64))
    lse = torch.randn(3, 1)
    assert 2 * out.stride(0) > 2**31
    assert_close(*mla_suite.combine(out, lse, num_splits=3), exact(out, lse, [0, 3]))


# Bad input


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"partial_out": torch.zeros(4, 2)}, r"partial_out has shape \(4, 2\); it takes 3 dimensions"),
        ({"partial_out": torch.zeros(4, 2, 8).half()}, "partial_out is float16; it takes float32"),
        ({"partial_out": torch.zeros(4, 8, 2).mT}, "partial_out has strides .*; its last dimension must be contiguous"),
        ({"partial_lse": torch.zeros(4, 3)}, r"partial_lse has shape \(4, 3\); it takes \[splits, rows\] = \(4, 2\)"),
        ({"partial_lse": torch.zeros(4, 2).double()}, "partial_lse is float64; it takes float32"),
        ({"partial_lse": torch.zeros(4, 2, device="meta")}, "partial_lse is on meta; the other tensors are on cpu"),
        ({"num_splits": 3}, "num_splits is 3; it must divide the 4 splits"),
        ({"num_splits": -2}, "num_splits is -2; it must divide"),
        ({"num_splits": 0}, "split_indptr and num_splits are both missing; pass exactly one"),
        ({"split_indptr": ints(0, 4)}, "split_indptr and num_splits are both given; pass exactly one"),
        ({"num_splits": 0, "split_indptr": ints(0, 4).long()}, "split_indptr is int64; it takes int32"),
        ({"num_splits": 0, "split_indptr": ints(0, 3, 2)}, r"split_indptr is \[0, 3, 2\]; it must rise"),
        ({"num_splits": 0, "split_indptr": ints(-1, 4)}, r"split_indptr is \[-1, 4\]; it must rise"),
        ({"num_splits": 0, "split_indptr": ints(0, 5)}, r"split_indptr is \[0, 5\]; it must rise .* at most the 4"),
        ({"attn_sink": torch.zeros(3)}, "attn_sink has 3 heads; its heads must divide the 2 rows"),
        ({"attn_sink": torch.zeros(2).double()}, "attn_sink is float64; it takes float32"),
        ({"out_dtype": torch.float64}, "out_dtype is torch.float64; it takes bfloat16 or float16 or float32"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, words):
    arguments = {"partial_out": torch.zeros(4, 2, 8), "partial_lse": torch.zeros(4, 2), "num_splits": 2} | change
    with pytest.raises((ValueError, TypeError), match="combine: " + words):
        mla_suite.combine(**arguments)
