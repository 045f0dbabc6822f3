"""sparse_decode over rows of per-tensor fp8 on AMD's archs: descales, fp8 queries, and every code of a row.

Rows are bare: 576 or 512 values of e4m3 in the arch's own flavour, with one descale for all pools.
"""

from __future__ import annotations

import pytest
import torch
from backend_calls import BackendCalls, assert_refused
from built import emulated
from decode_grid import FP8_FORMATS, NANS, assert_nan_in, assert_within_bound
from hostile_inputs import pairwise_cover
from sparse_problems import MODES, attend, exact, in_mode, kind_of, problem, require_kernels, with_descales

from mla_suite import archs
from mla_suite.core.explain import explain_on
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats.encode import decode
from mla_suite.ops.decode import Q_FP8
from mla_suite.ops.sparse_decode import SPARSE_DECODE

WIDTHS = (576, 512)
ROPE = 512  # where the values begin that only scores see
NATIVE = BackendCalls(SPARSE_DECODE, "native")


arch = emulated(require_kernels, autouse=True)


def check(args, kwargs):
    out, lse = attend(args, kwargs)
    assert out.dtype == torch.bfloat16
    assert_within_bound(out, lse, exact(*args, **kwargs))
    return out, lse


AXES = {"heads": (8, 16, 64, 128), "width": WIDTHS, "dtype": (torch.bfloat16, *Q_FP8), "mode": MODES}


@pytest.mark.parametrize("case", pairwise_cover(AXES), ids=lambda case: "-".join(map(str, case.values())))
def test_descales_multiply_rows_and_queries(arch, case):
    """Two pools, a fifth of the indices invalid; any two of heads, width, type of the queries and mode meet."""
    pools = [(FP8_FORMATS[arch], 2, 64, 70), (FP8_FORMATS[arch], 9, 5, 33)]
    args, kwargs = problem(pools, 4, case["heads"], seed=case["heads"], width=case["width"])
    in_mode(case["mode"], args, kwargs, seed=case["width"])
    check(with_descales(args, case["heads"], case["dtype"]), kwargs)


@pytest.mark.parametrize("heads", [16, 128])
def test_descales_of_zero(arch, heads):
    """A tensor of zeros: all keys weigh as much, masked ones nothing, and results are 0."""
    args, kwargs = problem([(FP8_FORMATS[arch], 2, 64, 70)], 2, heads)
    args += [None, torch.zeros(())]
    args[5] = torch.randn(heads)
    out, lse = check(args, kwargs)
    assert not bool(out.any())
    assert bool(lse.isfinite().all())


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("at", [7, 8], ids=["q_descale", "kv_descale"])
@pytest.mark.parametrize("nan", NANS)
def test_a_descale_of_nan_is_seen(arch, nan, at, heads):
    args, kwargs = problem([(FP8_FORMATS[arch], 2, 64, 70)], 2, heads, invalid=0)
    args = with_descales(args, 0, Q_FP8[0])
    args[at] = nan.reshape(1)
    out, lse = torch.zeros(2, heads, 512, dtype=torch.bfloat16), torch.zeros(2, heads)
    # As on a GPU, where values are not checked.
    answer = NATIVE.supports(SPARSE_DECODE.problem(*args, **kwargs), archs.get(arch))
    NATIVE.run(answer.config, (out, lse), *args, **kwargs)
    assert bool(out.isnan().all() and lse.isnan().all())


def rows_of(arch, width, codes):
    """A cache of one page with these codes [tokens, width], and the values that they are."""
    kind = kind_of(FP8_FORMATS[arch], width)
    cache = caches.empty(kind, 1, len(codes))
    cache.view(torch.uint8)[:] = codes
    return cache, decode(codes.flatten(), kind.by_name["latent"].encoding).view(codes.shape)


def every_code(arch):
    """All codes but those of NaN, with -0 where the flavour has one, denormal numbers and the largest."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = decode(codes, kind_of(FP8_FORMATS[arch], 512).by_name["latent"].encoding)
    assert int(values.isnan().sum()) == (2 if archs.get(arch).fp8 == "ocp" else 1)
    return codes[~values.isnan()]


@pytest.mark.parametrize("descale", [1.0, 0.37, 2.0**-60, 2.0**60])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_code_is_exact(arch, width, descale):
    """A query token that selects one key gives the key's values times the descale, rounded once."""
    codes = every_code(arch)
    tokens = torch.stack([codes[(torch.arange(width) + shift) % len(codes)] for shift in (0, 1, 97)])
    cache, values = rows_of(arch, width, tokens)
    index = torch.arange(3, dtype=torch.int32)[:, None]
    q = torch.zeros(3, 16, width).bfloat16()
    args = [q, [cache], [index], [None], [None], None, None, None, torch.tensor(descale)]
    out, lse = attend(args, {"kv_formats": [FP8_FORMATS[arch]], "softmax_scale": 1.0})
    wanted = (values[:, :ROPE] * descale).bfloat16()
    assert torch.equal(out, wanted[:, None].expand(3, 16, ROPE))
    assert torch.equal(lse, torch.zeros_like(lse))


@pytest.mark.parametrize("width", WIDTHS)
def test_every_code_reaches_the_scores_from_every_place(arch, width):
    """Head h sees value 64 n + h of the row alone, so the lse of one key is that value; the rope part as the rest."""
    codes = every_code(arch)
    cache, values = rows_of(arch, width, codes[(torch.arange(width) * 3) % len(codes)][None])
    blocks = width // 64
    q = torch.zeros(blocks, 64, width).bfloat16()
    for n in range(blocks):
        q[n, :, 64 * n : 64 * (n + 1)] = torch.eye(64).bfloat16()
    index = torch.zeros(blocks, 1, dtype=torch.int32)
    args = [q, [cache], [index], [None], [None], None, None]
    _, lse = attend(args, {"kv_formats": [FP8_FORMATS[arch]], "softmax_scale": 0.25})
    torch.testing.assert_close(lse.flatten(), values[0] / 4, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_nan_is_seen(arch, width):
    """Each NaN code alone in a row, at the beginning, in the middle and at the end, behind a key that has none."""
    finite = every_code(arch)
    nans = sorted(set(range(256)) - set(finite.tolist()))
    places = (0, 1, 2, 3, 17, 511, width - 1)
    tokens = torch.full((1 + len(nans) * len(places), width), int(finite[len(finite) // 4]), dtype=torch.uint8)
    for i, (code, at) in enumerate([(code, at) for code in nans for at in places]):
        tokens[1 + i, at] = code
    cache, _ = rows_of(arch, width, tokens)
    index = torch.stack([torch.zeros(len(tokens)), torch.arange(len(tokens))], dim=1).int()
    q = torch.ones(len(tokens), 16, width).bfloat16()
    args = [q, [cache], [index], [None], [None], None, None]
    results = attend(args, {"kv_formats": [FP8_FORMATS[arch]], "softmax_scale": 1e-4})
    assert_nan_in(slice(1, None), *results)


@pytest.mark.parametrize("heads", [16, 128])
def test_saturated_rows(arch, heads):
    """The largest codes of both signs, at random: scores reach thousands, and one key takes nearly all weight."""
    codes = every_code(arch)
    largest = decode(codes, kind_of(FP8_FORMATS[arch], 576).by_name["latent"].encoding).abs()
    ends = codes[largest == largest.max()]
    assert len(ends) == 2
    cache, _ = rows_of(arch, 576, ends[torch.randint(0, 2, (90, 576))])
    index = torch.randint(-1, 90, (2, 90), dtype=torch.int32)
    args = [torch.randn(2, heads, 576).bfloat16(), [cache], [index], [None], [None], torch.randn(heads), None]
    check(args, {"kv_formats": [FP8_FORMATS[arch]], "softmax_scale": 576**-0.5})


def test_fp8_queries_are_copied(arch):
    args, kwargs = problem([(FP8_FORMATS[arch], 2, 64, 70)], 2, 16)
    for dtype in (torch.bfloat16, *Q_FP8):
        answer = explain_on(archs.get(arch), "sparse_decode", *with_descales(args, 0, dtype), **kwargs)
        assert ("queries are copied as bfloat16" in answer.notes) == (dtype in Q_FP8)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ("the other flavour", "with rows of 576 values; it takes dsv4"),
        ("fp16", "q is torch.float16; it takes bfloat16"),
        ("fp8 over bf16", "q is torch.float8_e4m3fn; it takes bfloat16"),
    ],
)
def test_what_is_refused(arch, changed, sentence):
    other = next(name for name in FP8_FORMATS.values() if name != FP8_FORMATS[arch])
    name = {"the other flavour": other, "fp16": FP8_FORMATS[arch], "fp8 over bf16": "bf16"}[changed]
    args, kwargs = problem([(name, 2, 64, 70)], 2, 16)
    args[0] = args[0].to({"fp16": torch.float16, "fp8 over bf16": Q_FP8[0]}.get(changed, torch.bfloat16))
    assert_refused(NATIVE.supports(SPARSE_DECODE.problem(*args, **kwargs), archs.get(arch)), sentence)
