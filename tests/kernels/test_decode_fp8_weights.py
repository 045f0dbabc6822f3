"""decode's softmax weights that are rounded to fp8, in the emulator: which calls have them, how near they stay."""

from __future__ import annotations

import decode_grid as grid
import pytest
import torch
from backend_calls import BackendCalls
from built import emulated, require_built
from decode_grid import CPU, FP8_QUERIES, assert_within_bound, cosine_distance, decode

from mla_suite import archs, emulator
from mla_suite.archs.gfx942 import Gfx942Config
from mla_suite.archs.gfx950 import Gfx950Config
from mla_suite.ops.decode import DECODE
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import exact_decode

CONFIGS = {"gfx942": Gfx942Config, "gfx950": Gfx950Config}
SMALLEST = "decode_fp8_query-fp8_weight-bf16_rows-16"


arch = emulated(lambda arch: require_built(arch, SMALLEST))


def normal(arch, batch, length, scale):
    """q (32 heads, 4 query tokens) and keys ~ N(0, 1), quantised to e4m3."""
    generator, e4m3 = torch.Generator().manual_seed(length), FP8_QUERIES[arch]["dtype"]
    q = torch.randn(batch, 4, 32, 576, generator=generator).to(e4m3)
    cache = torch.randn(batch, length, 576, generator=generator).to(e4m3).view(torch.uint8)
    table = torch.arange(batch, dtype=torch.int32)[:, None]
    lens, one = torch.full((batch,), length, dtype=torch.int32), torch.tensor(1.0)
    args = (q, cache, lens, table, None, None, None, one, one)
    return args, dict(softmax_scale=scale**-0.5, kv_format=FP8_QUERIES[arch]["kv_format"], num_splits=1)


def with_weights(arch, fp8_weights, args, kwargs):
    """Runs the instance of 128 rows with these weights, whatever would be chosen; gfx942 has it with fp8 ones alone."""
    config = CONFIGS[arch](archs.get(arch), "fp8", "fp8", 128, 576, False, fp8_weights)
    out, lse = torch.empty(*args[0].shape[:-1], 512, dtype=torch.bfloat16), torch.empty(args[0].shape[:-1])
    BackendCalls(DECODE, "native").run(config, (out, lse), *args, **kwargs)
    return out, lse


@pytest.mark.parametrize(
    ("length", "scale", "most"), [(512, 192, 1.4e-4), (2048, 192, 1.0e-4), (512, 576, 2.6e-4), (2048, 576, 1.6e-4)]
)
def test_fp8_weights_are_as_near_as_their_rounding_allows(arch, length, scale, most):
    args, kwargs = normal(arch, 4, length, scale)
    exact = exact_decode(*args, **kwargs)
    out, lse = decode(arch, args, kwargs)
    assert cosine_distance(out, exact.out) <= most
    assert_within_bound(out, lse, exact, grid.COARSE)
    if length == 512:
        assert torch.equal(out, with_weights(arch, True, args, kwargs)[0]), "fp8 weights are the default at 128 rows"


@pytest.mark.parametrize("length", [512, 2048])
@pytest.mark.parametrize("arch", ["gfx950"], indirect=True)
def test_bf16_weights(arch, length):
    args, kwargs = normal(arch, 1, length, 192)
    exact = exact_decode(*args, **kwargs)
    out, lse = with_weights(arch, False, args, kwargs)
    assert cosine_distance(out, exact.out) <= 1e-5
    assert_within_bound(out, lse, exact)


@pytest.mark.parametrize(
    ("arch", "rows", "batch", "context", "fp8_weights"),
    [
        *(("gfx950", 128, *row) for row in ((4, 8192, False), (4, 16384, False), (32, 16384, False))),
        *(("gfx950", 128, *row) for row in ((32, 16640, True), (256, 2048, False), (256, 2112, True))),
        *(("gfx942", rows, 4, 8192, rows > 96) for rows in (64, 96, 112, 128)),
    ],
    indirect=["arch"],
)
def test_which_calls_with_a_plan_have_fp8_weights(arch, rows, batch, context, fp8_weights):
    """On gfx950 memory takes longer than bf16 weights do up to 2,048 keys of a work tile, however long the sequence is.
    On gfx942 bf16 weights of many rows take the matrix unit longer than memory takes, however short work tiles are.
    """
    args, kwargs = decode_sample((64, 64), heads=rows // 4, q_len=4, planned=True, **FP8_QUERIES[arch]).make(CPU)
    problem = DECODE.problem(*args, **kwargs)._replace(batch=batch, context=context)
    assert archs.kernels(archs.get(arch)).decode_config(problem, 128).fp8_weights is fp8_weights


@pytest.mark.parametrize("arch", ["gfx950"], indirect=True)
def test_bf16_weights_cost_a_third_more_clocks(arch):
    grid.counted_by_packaged_compiler(arch, SMALLEST)
    args, kwargs = decode_sample((1024,), heads=128, num_splits=1, **FP8_QUERIES[arch]).make(CPU)
    with emulator.configured(collect=True) as reports:
        with_weights(arch, False, args, kwargs)
    (report,) = reports
    assert report.bound(archs.get(arch)).matrix == 52 * 1024
    assert grid.counted(arch, args, kwargs).bound(archs.get(arch)).matrix <= 40 * 1024
