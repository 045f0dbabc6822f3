"""combine's reference against fp64, with what its native kernels pass: what is not read, what is NaN, sinks, memory."""

import itertools

import merge_runs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merges import INF, exact, partials

import mla_suite
from mla_suite.testing import assert_close

few = settings(max_examples=40, deadline=None, derandomize=True)
CPU = torch.device("cpu")


@pytest.mark.parametrize("heads", [1, 8, 12, 16, 24, 32, 40, 64, 96, 128])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8])
def test_heads_and_tokens(heads, tokens):
    """Rows are tokens x heads, so a sink of `heads` logits repeats over the tokens."""
    out, lse = partials(6, tokens * heads, 16)
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
    torch.manual_seed(seed)
    out, lse = partials(bounds[-1], 3, 8, spread)
    lse[torch.rand(lse.shape) < 0.2] = -INF
    result = mla_suite.combine(out, lse, torch.tensor(bounds, dtype=torch.int32), out_dtype=torch.float32)
    assert_close(*result, exact(out, lse, bounds))


@given(st.lists(st.integers(1, 11), min_size=1, max_size=4), st.integers(0, 2**16))
@few
def test_merging_in_two_steps_equals_one(counts, seed):
    torch.manual_seed(seed)
    out, lse = partials(sum(counts), 3, 8)
    bounds = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    inner = mla_suite.combine(out, lse, bounds, out_dtype=torch.float32)
    outer = mla_suite.combine(*inner, num_splits=len(counts), out_dtype=torch.float32)
    assert_close(*outer, exact(out, lse, [0, sum(counts)]))


HOSTILE = (
    merge_runs.what_is_not_read_and_what_is_nan,
    merge_runs.sinks,
    merge_runs.plus_infinity_beside_zeros_is_a_part_without_keys,
    merge_runs.skip_single,
    merge_runs.partials_beyond_two_to_the_31_elements,
)


@pytest.mark.parametrize("run", HOSTILE)
def test_what_native_kernels_pass(run):
    run(merge_runs.into_poisoned, CPU)


def test_strided_outputs_and_partials():
    merge_runs.strided_outputs_and_partials(CPU)


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
        ({"num_splits": 3}, "num_splits is 3; it must divide the 4 splits"),
        ({"num_splits": -2}, "num_splits is -2; it must divide"),
        ({"num_splits": 0}, "split_indptr and num_splits are both missing; pass exactly one"),
        ({"split_indptr": ints(0, 4)}, "split_indptr and num_splits are both given; pass exactly one"),
        ({"num_splits": 0, "split_indptr": ints(0, 4).long()}, "split_indptr is int64; it takes int32"),
        ({"num_splits": 0, "split_indptr": ints()}, r"split_indptr is empty; it takes \[batch \+ 1\]"),
        ({"num_splits": 0, "split_indptr": ints(0, 3, 2)}, r"split_indptr is \[0, 3, 2\]; it must rise"),
        ({"num_splits": 0, "split_indptr": ints(-1, 4)}, r"split_indptr is \[-1, 4\]; it must rise, from 0 or more"),
        ({"num_splits": 0, "split_indptr": ints(0, 5)}, r"split_indptr is \[0, 5\]; it must rise, .* at most the 4"),
        ({"attn_sink": torch.zeros(3)}, "attn_sink has 3 heads; its heads must divide the 2 rows"),
        ({"attn_sink": torch.zeros(2).double()}, "attn_sink is float64; it takes float32"),
        ({"out_dtype": torch.float64}, "out_dtype is torch.float64; it takes bfloat16, float16 or float32"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, words):
    arguments = {"partial_out": torch.zeros(4, 2, 8), "partial_lse": torch.zeros(4, 2), "num_splits": 2} | change
    with pytest.raises((ValueError, TypeError), match="combine: " + words):
        mla_suite.combine(**arguments)
