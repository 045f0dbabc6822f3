"""combine's own kernels on a real GPU against fp64: the whole product of shapes, bits, hostile values, memory."""

from __future__ import annotations

import merge_runs
import pytest
import torch
from merges import HEADS, SPLITS, TOKENS, assert_rounded, exact, hard_to_round, partials

import mla_suite
from mla_suite.archs import combine as config
from mla_suite.testing import assert_close

DEVICE = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def combine(*tensors, **options):
    """Result of the native kernel, twice the same bits, in outputs that were poisoned; a skip names what is missing."""
    choice = mla_suite.explain("combine", *tensors, **options)
    if choice.backend != "native":
        pytest.skip(str(choice))
    results = [merge_runs.into_poisoned(*tensors, **options) for _ in range(2)]
    for first, again in zip(*results, strict=True):
        assert torch.equal(first.view(torch.uint8), again.view(torch.uint8)), "another run, other bits"
    return results[0]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("heads", HEADS)
def test_the_whole_product(heads, tokens):
    """Every number of splits; out dtype, head_dim_v and the sink take turns."""
    for turn, splits in enumerate(SPLITS):
        head_dim_v = 128 if turn % 4 == 3 else 512
        out, lse = partials(tokens * splits, heads, head_dim_v, device=DEVICE)
        sink = torch.randn(heads, device=DEVICE) if turn % 3 == 1 else None
        result = combine(out, lse, None, sink, num_splits=splits, out_dtype=DTYPES[turn % 3])
        assert_close(*result, exact(out, lse, range(0, tokens * splits + 1, splits), sink))


@pytest.mark.parametrize("head_dim_v", config.HEAD_DIMS_V)
def test_ragged_splits_with_a_sink(head_dim_v):
    merge_runs.ragged_splits_with_a_sink(combine, DEVICE, head_dim_v, [0, 1, 5, 0, 33, 2, 161, 1, 1024])


def test_skip_single_leaves_those_rows():
    merge_runs.skip_single(combine, DEVICE)


@pytest.mark.parametrize("batch", [1, 300])
def test_what_is_not_read_and_what_is_nan(batch):
    """In a small batch several waves share a row, in a large one a wave has several."""
    merge_runs.what_is_not_read_and_what_is_nan(combine, DEVICE, batch)


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_nan_and_infinity_survive_rounding(out_dtype):
    assert_rounded(*combine(*hard_to_round(DEVICE), num_splits=2, out_dtype=out_dtype))


def test_sinks():
    merge_runs.sinks(combine, DEVICE)


def test_partials_beyond_two_to_the_31_elements():
    """By strides, then by size; 8.6 GB each."""
    merge_runs.partials_beyond_two_to_the_31_elements(combine, DEVICE)
    rows = 2**23 + 5
    wide, lse = torch.randn(2, rows, 128, device=DEVICE), torch.randn(2, rows, device=DEVICE)
    merged, total = combine(wide, lse, num_splits=2)
    last = slice(rows - 100, rows)
    assert_close(merged[:, last], total[:, last], exact(wide[:, last], lse[:, last], [0, 2]))


def test_strided_outputs_and_partials():
    merge_runs.strided_outputs_and_partials(DEVICE)
