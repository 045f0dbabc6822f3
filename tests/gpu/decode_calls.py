"""Calls of decode on the native kernels of the GPU here, and what is asked of their results."""

from __future__ import annotations

import decode_grid
import pytest
import torch
from gpu_problems import Recorded

from mla_suite.archs.sm_90 import decode as sm_90
from mla_suite.core import dispatch
from mla_suite.launch import current_arch
from mla_suite.ops.decode import DECODE
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import exact_decode

Q, CACHE, LENS, TABLE, _, _, CU_SEQLENS_Q, Q_DESCALE, _, SINK, COS_SIN, PLAN = range(12)
HALF = {"kv_format": "fp16", "dtype": torch.float16}
FP8 = {"kv_format": "fp8", "dtype": torch.float8_e4m3fn}
SHAPES = {
    "one sequence": dict(lens=(1000,)),
    "many heads": dict(lens=(700, 300), heads=128),
    "edge lengths": dict(lens=(0, 1, 31, 32, 33, 63, 64, 65, 500), heads=64, q_len=2),
    "four tokens": dict(lens=(700, 1, 2, 1063), heads=32, q_len=4),
    "one head": dict(lens=(48, 333, 7), heads=1, page=32),
    "odd heads, sink": dict(lens=(48, 333, 7), heads=7, q_len=3, sink=True),
    "pages of 1": dict(lens=(70, 1, 33), page=1, q_len=3),
    "odd pages, ragged": dict(lens=(700, 100, 1063), page=7, ragged_pages=True, q_len=2),
    "large pages, ragged": dict(lens=(700, 100, 1063), page=256, ragged_pages=True),
    "ragged queries": dict(lens=(700, 100, 1063, 0), q_len=4, varlen=True, sink=True),
    "split": dict(lens=(700, 100, 0), heads=40, num_splits=5, sink=True),
    "few rows, streamed": dict(lens=(3000,), heads=16, num_splits=40),
    "128 rows, streamed": dict(lens=(6000,), heads=128, num_splits=32),
    "100 rows, streamed, empty splits": dict(lens=(3000, 33, 0), heads=100, num_splits=8, sink=True),
    "streamed, ragged queries": dict(lens=(1500, 600), heads=40, q_len=2, varlen=True, num_splits=8),
    "streamed, 512 wide, fp16": dict(lens=(5000,), heads=64, rope=0, num_splits=33, **HALF),
    "few rows, empty splits": dict(lens=(70, 1, 0, 700), heads=5, num_splits=8, sink=True),
    "few rows, ragged, odd pages": dict(lens=(70, 300, 1), heads=3, q_len=4, varlen=True, num_splits=6, page=7),
    "few rows, most splits": dict(lens=(9000,), heads=1, num_splits=128, **HALF),
    "two splits, one cluster": dict(lens=(700, 100, 1, 64, 32, 0), heads=128, num_splits=2),
    "two splits, four tokens, sink": dict(lens=(700, 1, 2, 34, 1063), heads=32, q_len=4, num_splits=2, sink=True),
    "two splits, ragged queries": dict(lens=(700, 100, 3, 0), heads=24, q_len=3, varlen=True, num_splits=2, sink=True),
    "two splits, 512 wide, fp16": dict(lens=(700, 90), heads=40, rope=0, num_splits=2, **HALF),
    "two splits, all keys": dict(lens=(90, 7), heads=64, q_len=2, causal=False, num_splits=2),
    "split by size": dict(lens=(700, 100, 0), split_size=48, heads=24),
    "planned": dict(lens=(700, 100, 2063, 500), heads=128, planned=True),
    "planned, ragged, sink": dict(lens=(700, 10, 2063, 0), planned=True, varlen=True, q_len=3, sink=True, page=16),
    "planned, nothing split": dict(lens=(64,) * 132, heads=40, planned=True),
    "planned, one of many split": dict(lens=(*[70] * 200, 9000), heads=40, q_len=2, planned=True, sink=True),
    "planned, ragged, many": dict(lens=(*[60, 0, 500, 31] * 40, 3000), heads=16, q_len=3, planned=True, varlen=True),
    "all keys": dict(lens=(90, 700), heads=64, q_len=2, causal=False, num_splits=3),
    "fp16": dict(lens=(700, 90), heads=24, **HALF),
    "512 wide": dict(lens=(700, 90), heads=128, rope=0),
    "512 wide, fp16, gathered": dict(lens=(700, 90), heads=16, rope=0, page=24, num_splits=2, **HALF),
    "e4m3 cache": dict(lens=(0, 1, 31, 32, 33, 64, 65, 500), heads=64, q_len=2, kv_format="fp8"),
    "e4m3 cache, pages of 1": dict(lens=(70, 1, 33), page=1, q_len=3, kv_format="fp8"),
    "e4m3 cache, planned": dict(lens=(700, 100, 2063, 500), heads=128, planned=True, page=16, kv_format="fp8"),
    "e4m3 cache, two splits": dict(lens=(700, 100, 1, 64, 0), heads=128, num_splits=2, sink=True, kv_format="fp8"),
    "e4m3 cache, fp16": dict(lens=(700, 90), heads=8, page=48, kv_format="fp8", dtype=torch.float16),
    "e4m3 cache, 512 wide": dict(lens=(700, 90), heads=40, rope=0, kv_format="fp8"),
    "e4m3 queries": dict(lens=(700, 1, 2, 1063), heads=32, q_len=4, **FP8),
    "e4m3 queries, 8 splits": dict(lens=(3000, 33, 0), heads=100, num_splits=8, sink=True, **FP8),
    "e4m3 queries, planned, ragged": dict(lens=(*[60, 0, 500] * 40, 3000), q_len=3, planned=True, varlen=True, **FP8),
    "un-rotated": dict(lens=(0, 1, 31, 32, 33, 64, 65, 500), heads=64, q_len=2, rotate=True),
    "un-rotated, one sequence": dict(lens=(3000,), heads=16, rotate=True),
    "un-rotated, four tokens": dict(lens=(700, 1, 2, 1063), heads=32, q_len=4, rotate=True),
    "un-rotated, pages of 1": dict(lens=(70, 1, 333), page=1, q_len=3, rotate=True),
    "un-rotated, pages of 16, ragged": dict(lens=(700, 100, 1063), page=16, ragged_pages=True, rotate=True),
    "un-rotated, two splits": dict(lens=(700, 100, 1, 64, 0), heads=128, num_splits=2, sink=True, rotate=True),
    "un-rotated, 8 splits": dict(lens=(3000, 33, 0), heads=100, num_splits=8, sink=True, rotate=True),
    "un-rotated, ragged queries": dict(lens=(700, 100, 1063, 0), q_len=4, varlen=True, sink=True, rotate=True),
    "un-rotated, planned": dict(lens=(700, 100, 2063, 500), heads=128, planned=True, rotate=True),
    "un-rotated, planned, pages of 16": dict(lens=(700, 100, 2063), heads=40, planned=True, page=16, rotate=True),
    "un-rotated, planned, ragged": dict(
        lens=(*[60, 0, 500, 31] * 40, 3000), q_len=3, planned=True, varlen=True, rotate=True
    ),
    "un-rotated, by size": dict(lens=(700, 100, 0), split_size=48, heads=24, rotate=True),
    "un-rotated, fp16": dict(lens=(700, 90), heads=24, rotate=True, **HALF),
    "un-rotated, fp16, gathered": dict(lens=(700, 90), heads=16, page=24, num_splits=2, rotate=True, **HALF),
    "256 + 64": dict(lens=(0, 1, 31, 32, 33, 64, 65, 500), heads=64, q_len=2, latent=256),
    "256 + 64, planned, sink": dict(lens=(700, 100, 2063, 500), heads=128, latent=256, planned=True, sink=True),
    "256 + 64, odd pages, ragged": dict(lens=(700, 100, 1063), page=7, q_len=2, varlen=True, latent=256),
    "256 + 64, e4m3 cache": dict(lens=(700, 1, 333), heads=40, page=16, latent=256, kv_format="fp8"),
    "256 + 64, e4m3 queries, 8 splits": dict(lens=(3000, 33, 0), heads=100, latent=256, num_splits=8, **FP8),
    "256 + 32": dict(lens=(700, 1, 2, 1063), heads=32, q_len=4, latent=256, rope=32, sink=True),
    "256 + 32, pages of 1, 3 splits": dict(lens=(70, 1, 333), page=1, latent=256, rope=32, num_splits=3),
    "256 + 32, e4m3 cache": dict(lens=(700, 64, 33), heads=128, latent=256, rope=32, kv_format="fp8"),
    "256 + 32, e4m3 queries": dict(lens=(700, 0, 64, 33), heads=8, latent=256, rope=32, planned=True, **FP8),
    "128 + 32": dict(lens=(0, 1, 31, 32, 33, 480, 481, 5000), heads=40, latent=128, rope=32),
    "128 + 32, planned, ragged": dict(
        lens=(*[60, 0, 500] * 40, 3000), q_len=3, latent=128, rope=32, planned=True, varlen=True, sink=True
    ),
    "128 + 32, pages of 24": dict(lens=(700, 100), heads=128, latent=128, rope=32, page=24, num_splits=2),
    "128 + 32, e4m3 cache, by size": dict(lens=(700, 5), heads=24, latent=128, rope=32, kv_format="fp8", split_size=48),
    "128 + 32, e4m3 queries": dict(lens=(700, 1063, 3), heads=128, q_len=2, latent=128, rope=32, **FP8),
    "an extend": dict(lens=(130, 61, 700), heads=16, q_len=61),
    "an extend behind fewer keys, two splits": dict(lens=(50, 1, 0, 90), heads=20, q_len=70, num_splits=2, sink=True),
    "an extend, ragged, planned": dict(lens=(900, 40, 70, 0) * 12, q_len=90, varlen=True, planned=True),
    "an extend by size": dict(lens=(700, 90), heads=16, q_len=90, split_size=64),
    "an extend, e4m3 cache, 8 splits": dict(lens=(700, 90), heads=16, q_len=90, num_splits=8, kv_format="fp8"),
    "an extend, e4m3 queries": dict(lens=(700, 90), heads=16, q_len=90, **FP8),
    "an extend, un-rotated, pages of 1": dict(lens=(300, 90), heads=16, q_len=90, page=1, rotate=True),
    "an extend, 256 + 64": dict(lens=(300, 90), heads=40, q_len=90, latent=256, num_splits=3),
    "more tiles than SMs": dict(lens=(40,), heads=128, q_len=70, num_splits=1),
    "more sequences than SMs": dict(lens=tuple(40 + i for i in range(140)), heads=65),
}
"""Problems of decode by name, as `decode_sample` takes them."""


def here():
    """The arch of the GPU."""
    return current_arch(torch.empty(1, device="cuda"))


def require_kernels(arch=None):
    """Skips where a plain decode has no native kernel, with dispatch's reasons; or the GPU is not of the arch named."""
    if arch is not None and (here() is None or here().name != arch):
        pytest.skip(f"this is about what only the kernels of {arch} do")
    args, kwargs = decode_sample((16,)).make(torch.device("cuda"))
    choice = dispatch.choose("decode", DECODE.backends, DECODE.problem(*args, **kwargs), here(), "cuda")
    if choice.backend.name != "native":
        pytest.skip(str(choice))


def on_gpu(args):
    return [None if tensor is None else tensor.cuda() for tensor in args]


def hostile(sample):
    """decode_grid's, on the GPU."""
    args, kwargs = decode_grid.hostile(sample, here().name)
    return on_gpu(args), kwargs


def native(args, kwargs):
    """The call's backend; anything but our own kernel fails."""
    arch = dispatch.arch_of(args[Q])
    choice = dispatch.choose("decode", DECODE.backends, DECODE.problem(*args, **kwargs), arch, "cuda")
    assert choice.backend.name == "native", str(choice)


def decode(args, kwargs):
    native(args, kwargs)
    return torch.ops.mla_suite.decode(*args, **kwargs)


def kernels(args, kwargs):
    """The kernels of a call on sm_90, decode's first."""
    given = DECODE.Args(*args, **kwargs)
    outputs = tuple(torch.empty(o.shape, dtype=o.dtype, device="meta") for o in DECODE.check(given))
    launches = sm_90.config_for(DECODE.describe(given), here()).spec(outputs, given).launches
    return [launch.kernel for launch in launches]


def on_cpu(args):
    return [None if tensor is None else tensor.cpu() for tensor in args]


def assert_right(out, lse, exact):
    """P is rounded to 16 bits: to 2^-8 of itself in bf16, 2^-11 in fp16."""
    rounding = 2.0**-8 if out.dtype == torch.bfloat16 else 2.0**-11
    decode_grid.assert_within_bound(out.cpu(), lse.cpu(), exact, rounding)


def check_arguments(args, kwargs):
    """Of the CPU, decoded on the GPU."""
    assert_right(*decode(on_gpu(args), kwargs), exact_decode(*args, **kwargs))


def check(sample):
    check_arguments(*decode_grid.hostile(sample, here().name))


def assert_right_at_other_lengths(step, args, kwargs, every_lengths, assert_right=assert_right, warm=True):
    """A graph of `step`, which decodes with these arguments, replayed at each of some lengths."""
    results = []
    recorded = Recorded(lambda: results.append(step()), torch.device("cuda"), warm)
    out, lse = results[-1]  # the graph's
    for lengths in every_lengths:
        args[LENS].copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(torch.nan)
        recorded.replay()
        torch.cuda.synchronize()
        assert_right(out, lse, exact_decode(*on_cpu(args), **kwargs))


def assert_same_bits(results, expected):
    for x, y in zip(results, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


def assert_a_graph_repeats(problems, expected):
    """50 replays of the calls, as one graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [decode(*problem) for problem in problems]
    for _ in range(50):
        for out, _ in results:
            out.fill_(7.0)
        graph.replay()
        assert_same_bits(results, expected)
