"""decode's softmax weights that gfx950 rounds to fp8, in the emulator: which calls have them, how near they stay."""

from __future__ import annotations

import pytest
import torch
from backend_calls import BackendCalls
from built import require_built
from decode_grid import COARSE, CPU, assert_within_bound, counted, counted_by_packaged_compiler, decode

import mla_suite
from mla_suite import archs, emulator
from mla_suite.archs.gfx950 import Gfx950Config
from mla_suite.ops.decode import DECODE
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import exact_decode

ARCH, E4M3 = "gfx950", torch.float8_e4m3fn
SMALLEST = "decode_fp8_query-fp8_weight-bf16_rows-16"


@pytest.fixture(autouse=True)
def gfx950():
    require_built(ARCH, SMALLEST)
    with mla_suite.emulate(ARCH):
        yield


def normal(batch, length, scale):
    """q (32 heads, 4 query tokens) and keys ~ N(0, 1), quantised to e4m3."""
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(batch, 4, 32, 576, generator=generator).to(E4M3)
    cache = torch.randn(batch, length, 576, generator=generator).to(E4M3).view(torch.uint8)
    table = torch.arange(batch, dtype=torch.int32)[:, None]
    lens, one = torch.full((batch,), length, dtype=torch.int32), torch.tensor(1.0)
    args = (q, cache, lens, table, None, None, None, one, one)
    return args, dict(softmax_scale=scale**-0.5, kv_format="fp8", num_splits=1)


def cosine_distance(a, b):
    a, b = a.double(), b.double()
    return float(1 - (a * b).sum() / (a.norm() * b.norm()))


def with_weights(fp8_weights, args, kwargs):
    """Runs the instance of 128 rows with these weights, whatever would be chosen."""
    config = Gfx950Config(archs.get(ARCH), "fp8", "fp8", 128, 576, False, fp8_weights)
    out, lse = torch.empty(*args[0].shape[:-1], 512, dtype=torch.bfloat16), torch.empty(args[0].shape[:-1])
    BackendCalls(DECODE, "native").run(config, (out, lse), *args, **kwargs)
    return out, lse


@pytest.mark.parametrize(
    ("length", "scale", "most"), [(512, 192, 1.4e-4), (2048, 192, 1.0e-4), (512, 576, 2.6e-4), (2048, 576, 1.6e-4)]
)
def test_fp8_weights_are_as_near_as_their_rounding_allows(length, scale, most):
    args, kwargs = normal(4, length, scale)
    exact = exact_decode(*args, **kwargs)
    out, lse = decode(ARCH, args, kwargs)
    assert cosine_distance(out, exact.out) <= most
    assert_within_bound(out, lse, exact, COARSE)
    if length == 512:
        assert torch.equal(out, with_weights(True, args, kwargs)[0]), "fp8 weights are the default at 128 rows"


@pytest.mark.parametrize("length", [512, 2048])
def test_bf16_weights(length):
    args, kwargs = normal(1, length, 192)
    exact = exact_decode(*args, **kwargs)
    out, lse = with_weights(False, args, kwargs)
    assert cosine_distance(out, exact.out) <= 1e-5
    assert_within_bound(out, lse, exact)


@pytest.mark.parametrize(
    ("batch", "context", "fp8_weights"),
    [(4, 8192, False), (4, 16384, False), (32, 16384, False), (32, 16640, True), (256, 2048, False), (256, 2112, True)],
)
def test_a_plans_long_work_tiles_have_fp8_weights(batch, context, fp8_weights):
    """Up to 2,048 keys of a work tile memory takes longer than bf16 weights do, however long the sequence is."""
    args, kwargs = decode_sample((64, 64), heads=32, q_len=4, planned=True, kv_format="fp8", dtype=E4M3).make(CPU)
    problem = DECODE.problem(*args, **kwargs)._replace(batch=batch, context=context)
    assert archs.kernels(archs.get(ARCH)).decode_config(problem, 128).fp8_weights is fp8_weights


def test_bf16_weights_cost_half_as_many_clocks_again():
    counted_by_packaged_compiler(ARCH, SMALLEST)
    args, kwargs = decode_sample((1024,), heads=128, num_splits=1, kv_format="fp8", dtype=E4M3).make(CPU)
    with emulator.configured(collect=True) as reports:
        with_weights(False, args, kwargs)
    (report,) = reports
    assert report.bound(archs.get(ARCH)).matrix == 52 * 1024
    assert counted(ARCH, args, kwargs).bound(archs.get(ARCH)).matrix <= 40 * 1024
