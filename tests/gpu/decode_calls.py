"""Calls of decode on the native kernels of the GPU here, and what is asked of their results."""

from __future__ import annotations

import decode_grid
import pytest
import torch
from gpu_problems import Recorded

from mla_suite.core import dispatch
from mla_suite.launch import current_arch
from mla_suite.ops.decode import DECODE
from mla_suite.ops.decode.samples import decode_sample
from mla_suite.testing import exact_decode

Q, CACHE, LENS, TABLE, _, _, _, Q_DESCALE, _, SINK, COS_SIN, PLAN = range(12)
HALF = {"kv_format": "fp16", "dtype": torch.float16}
FP8 = {"kv_format": "fp8", "dtype": torch.float8_e4m3fn}


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


def hostile(sample):
    """decode_grid's, on the GPU."""
    args, kwargs = decode_grid.hostile(sample, here().name)
    return [None if tensor is None else tensor.cuda() for tensor in args], kwargs


def native(args, kwargs):
    """The call's backend; anything but our own kernel fails."""
    arch = dispatch.arch_of(args[Q])
    choice = dispatch.choose("decode", DECODE.backends, DECODE.problem(*args, **kwargs), arch, "cuda")
    assert choice.backend.name == "native", str(choice)


def decode(args, kwargs):
    native(args, kwargs)
    return torch.ops.mla_suite.decode(*args, **kwargs)


def on_cpu(args):
    return [None if tensor is None else tensor.cpu() for tensor in args]


def assert_right(out, lse, exact):
    """P is rounded to 16 bits: to 2^-8 of itself in bf16, 2^-11 in fp16."""
    rounding = 2.0**-8 if out.dtype == torch.bfloat16 else 2.0**-11
    decode_grid.assert_within_bound(out.cpu(), lse.cpu(), exact, rounding)


def check(sample):
    args, kwargs = hostile(sample)
    out, lse = decode(args, kwargs)
    assert_right(out, lse, exact_decode(*on_cpu(args), **kwargs))


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
