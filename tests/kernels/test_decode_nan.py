"""decode on AMD: a NaN, whatever it comes from, is in the results it belongs to and in no other; zeros make none, and
neither does a q_descale that queries of 16 bits cannot be multiplied by."""

from __future__ import annotations

import decode_grid as grid
import pytest
import torch
from built import emulated
from decode_grid import CPU, FP8_NAN, NANS, assert_within_bound
from hostile_inputs import in_turn

from mla_suite import archs
from mla_suite.ops.decode import DECODE
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import exact_decode

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DESCALES = ["q_descale", "kv_descale", *DTYPES]  # those of fp8, and the q_descale of caches in 16 bits


arch = emulated(autouse=True)


def formats(arch):
    """Cache and queries in bf16 and fp16, an fp8 cache, and fp8 queries as well."""
    return {}, grid.FP16, {"kv_format": grid.FP8_FORMATS[arch]}, grid.FP8_QUERIES[arch]


def problem(heads, splits, **options):
    args, kwargs = decode_sample((100, 33), heads=heads, num_splits=splits, **options).make(CPU)
    return [*args], kwargs


@pytest.mark.parametrize(("splits", "column"), [(1, 3), (3, 575)])
@pytest.mark.parametrize("heads", [16, 48, 128])
def test_nan_in_a_key(arch, heads, splits, column):
    for options in formats(arch):
        args, kwargs = problem(heads, splits, **options)
        cache, table = args[1], args[3]
        page = cache.shape[1]
        value = torch.nan if cache.dtype != torch.uint8 else FP8_NAN[archs.get(arch).fp8]
        cache[table[0, 50 // page].item(), 50 % page, column] = value
        grid.assert_nan_in(slice(1), *grid.decode(arch, args, kwargs))


@pytest.mark.parametrize("column", [5, 40], ids=["cosine", "sine"])
@pytest.mark.parametrize("heads", [16, 48, 128])
@pytest.mark.parametrize("nan", NANS)
def test_nan_in_rope_cos_sin(arch, nan, heads, column):
    """Position 50 is behind the last key of sequence 1."""
    args, kwargs = problem(heads, 1, rotate=True)
    args[10] = args[10].clone()
    args[10][50, column] = nan
    grid.assert_nan_in(slice(1), *grid.decode(arch, args, kwargs))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("heads", [16, 48])
def test_nan_in_a_query_row(arch, heads, splits):
    args, kwargs = problem(heads, splits)
    args[0][0, 0, 2, 5] = torch.nan
    out, lse = grid.decode(arch, args, kwargs)
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 0, 2]]
    assert bool(out[0, 0, 2].isnan().all())
    assert lse.isnan().nonzero().tolist() == [[0, 0, 2]]


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("heads", [16, 48])
@pytest.mark.parametrize("nan", NANS)
def test_nan_in_a_sink(arch, nan, heads, splits):
    args, kwargs = problem(heads, splits, sink=True)
    args[9][3] = nan
    out, lse = grid.decode(arch, args, kwargs)
    rows = torch.zeros(heads, dtype=torch.bool)
    rows[3] = True
    assert torch.equal(out.isnan(), rows[:, None].expand_as(out))
    assert bool(lse.isfinite().all())


def with_descale(arch, heads, splits, name):
    """A problem of fp8, or of 16 bits alone, and the place of its descale among the arguments."""
    types = formats(arch)[-1] if name in ("q_descale", "kv_descale") else {"kv_format": name, "dtype": DTYPES[name]}
    return *problem(heads, splits, **types), 8 if name == "kv_descale" else 7


@pytest.mark.parametrize("heads", [16, 48, 128])
@pytest.mark.parametrize("name", DESCALES)
@pytest.mark.parametrize("nan", NANS)
def test_nan_in_a_descale(arch, nan, name, heads):
    args, kwargs, at = with_descale(arch, heads, 1, name)
    args[at] = nan.reshape(1)
    choice = grid.chosen(arch, args, kwargs)
    assert choice.backend.name == "native"
    out, lse = torch.zeros(2, 1, heads, 512, dtype=DTYPES.get(name, torch.bfloat16)), torch.zeros(2, 1, heads)
    # As on a GPU, where values are not checked.
    choice.backend.run(choice.supported.config, (out, lse), DECODE.Args(*args, **kwargs))
    assert bool(out.isnan().all() and lse.isnan().all())


@pytest.mark.parametrize("heads", [16, 48, 128])
@pytest.mark.parametrize("name", DESCALES)
def test_a_descale_of_zero(arch, name, heads):
    """All scores are 0, the masked ones apart."""
    args, kwargs, at = with_descale(arch, heads, 2, name)
    args[at] = torch.zeros(1)
    coarse = getattr(grid.chosen(arch, args, kwargs).supported.config, "fp8_weights", False)
    out, lse = grid.decode(arch, args, kwargs)
    assert_within_bound(out, lse, exact_decode(*args, **kwargs), grid.COARSE if coarse else 2.0**-8)


@pytest.mark.parametrize(
    ("factor", "problem"),
    in_turn([1e6, 1.7, 1e-6], [(16, {"num_splits": 3}), (48, {"planned": True, "sink": True}), (128, {})]),
    ids=str,
)
def test_a_q_descale_that_16_bits_cannot_hold(arch, factor, problem):
    """Queries times the factor are infinite in fp16, or lose their bits; scores are as without it."""
    heads, options = problem
    for stored in (*formats(arch)[:3], {"rotate": True}):
        args, kwargs = decode_sample((100, 33, 0), heads=heads, **options, **stored).make(CPU)
        given = [*args[:7], torch.tensor([factor]), *args[8:]]
        kwargs["softmax_scale"] /= factor
        assert_within_bound(*grid.decode(arch, given, kwargs), exact_decode(*given, **kwargs))
