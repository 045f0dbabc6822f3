"""Check mode on a GPU: right kernels are not reported, and a call that a graph captures is left out."""

from __future__ import annotations

import logging

import pytest
import torch

import mla_suite
from mla_suite.core import dispatch, register
from mla_suite.ops.decode.samples import decode_sample

SAMPLES = [
    pytest.param(op, sample, id=f"{op.name}-{sample.name}")
    for op in register.registry().values()
    for sample in op.samples()
]


@pytest.mark.parametrize(("op", "sample"), SAMPLES)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_no_sample_is_reported(op, sample, precision, caplog):
    """Products of fp32 in fewer bits, which a program may allow, do not reach the exact results."""
    args, kwargs = sample.make(torch.device("cuda"))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with mla_suite.allow_reference(), mla_suite.check(on_difference="raise"):
            getattr(torch.ops.mla_suite, op.name)(*args, **kwargs)
    finally:
        torch.set_float32_matmul_precision(before)
    assert not [entry for entry in caplog.records if "not checked" in entry.getMessage()]


def test_a_captured_call_is_left_out_and_its_replay_is_right(caplog):
    dispatch.clear_caches()  # a reason is logged once
    args, kwargs = decode_sample((200, 70)).make(torch.device("cuda"))
    expected, _ = mla_suite.decode(*args, **kwargs)
    caplog.set_level(logging.WARNING)
    graph = torch.cuda.CUDAGraph()
    with mla_suite.check(on_difference="raise"), torch.cuda.graph(graph):
        out, _ = mla_suite.decode(*args, **kwargs)
    graph.replay()
    assert torch.equal(out, expected)
    assert [entry for entry in caplog.records if "a CUDA graph captures it" in entry.getMessage()]
