"""FlashMLA's sparse prefill on a real GPU against fp64: out, max_logits and lse."""

from __future__ import annotations

import math

import pytest
import torch

from mla_suite.integrations.flash_mla import flash_mla_sparse_fwd
from mla_suite.launch import current_arch
from mla_suite.ops.sparse_decode import SparseDecodeArgs, max_logits

KEYS = 3000


@pytest.fixture(autouse=True)
def gpu():
    arch = current_arch(torch.empty(1, device="cuda"))
    if arch is None or arch.name != "sm_90":
        pytest.skip("the kernel that returns max_logits is of sm_90")


def problem(tokens, heads, width, topk, seed=0):
    """Arguments with absent keys, lengths from 0 on, and a sink; scores of both signs."""
    draw = torch.Generator("cuda").manual_seed(seed)
    q = torch.randn(tokens, heads, width, device="cuda", generator=draw).bfloat16()
    kv = torch.randn(KEYS, 1, width, device="cuda", generator=draw).bfloat16()
    indices = torch.randint(0, KEYS, (tokens, 1, topk), device="cuda", generator=draw).int()
    absent = torch.rand(indices.shape, device="cuda", generator=draw)
    indices[absent < 0.1], indices[absent > 0.95] = -1, KEYS
    indices[0] = -1
    lengths = torch.randint(0, topk + 1, (tokens,), device="cuda", generator=draw).int()
    lengths[1], lengths[-1] = 0, topk
    sink = torch.randn(heads, device="cuda", generator=draw)
    return q, kv, indices, sink, lengths


def exact(q, kv, indices, scale, sink, lengths):
    out, largest, lse = [], [], []
    for token, (chosen, length) in enumerate(zip(indices[:, 0], lengths.tolist(), strict=True)):
        chosen = chosen[:length]
        keys = kv[chosen[(chosen >= 0) & (chosen < KEYS)].long(), 0].double()
        scores = q[token].double() @ keys.T * scale
        found = scores.logsumexp(-1)
        weights = torch.exp(scores - torch.logaddexp(found, sink.double())[:, None])
        out.append(weights @ keys[:, :512])
        lse.append(found.masked_fill(found == -math.inf, math.inf))
        largest.append(scores.amax(-1) if len(keys) else torch.full_like(found, -math.inf))
    return torch.stack(out), torch.stack(largest), torch.stack(lse)


def assert_right(got, right):
    (out, largest, lse), (right_out, right_largest, right_lse) = got, right
    assert float((out.double() - right_out).norm() / right_out.norm()) < 4e-3
    torch.testing.assert_close(largest.double(), right_largest, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [0.04, -0.04])
@pytest.mark.parametrize(("tokens", "topk"), [(3, 2048), (200, 300), (140, 31)])
@pytest.mark.parametrize("heads", [5, 64, 128])
@pytest.mark.parametrize("width", [512, 576])
def test_against_fp64(monkeypatch, width, heads, tokens, topk, scale):
    """Three tokens are split, others are not; every call takes max_logits from the kernel."""
    q, kv, indices, sink, lengths = problem(tokens, heads, width, topk)
    right = exact(q, kv, indices, scale, sink, lengths)
    arguments = q, kv, indices, scale, 512, sink, lengths
    monkeypatch.setattr(max_logits, "largest_scores", None)
    first = flash_mla_sparse_fwd(*arguments)
    assert_right(first, right)
    for _ in range(2):
        again = flash_mla_sparse_fwd(*arguments)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_largest_scores_of_zero_and_below(monkeypatch):
    """-0, and rows all of whose scores are negative: floats are compared by integer atomics."""
    q = torch.zeros(140, 64, 576, device="cuda").bfloat16()
    q[:, ::2, 0] = -1.0
    kv = torch.zeros(KEYS, 1, 576, device="cuda").bfloat16()
    kv[:, 0, 0] = torch.linspace(1.0, 3.0, KEYS, device="cuda").bfloat16()
    indices = torch.randint(1000, KEYS, (140, 1, 96), device="cuda").int()
    record = SparseDecodeArgs(
        *(q, [kv], [indices[:, 0]], [None], [None]), kv_formats=["bf16"], softmax_scale=0.5, plus_inf_lse=True
    )
    wanted = q.new_empty(q.shape[:2], dtype=torch.float32)
    max_logits.largest_scores(None, (wanted,), record)
    monkeypatch.setattr(max_logits, "largest_scores", None)
    found = flash_mla_sparse_fwd(q, kv, indices, 0.5)[1]
    assert bool((found[:, ::2] < 0).all())
    assert torch.equal(found, wanted)


def test_compiled(monkeypatch):
    """Inductor's code calls the operator, which takes max_logits from the kernel."""
    q, kv, indices, sink, lengths = problem(140, 128, 576, 200)
    monkeypatch.setattr(max_logits, "largest_scores", None)
    compiled = torch.compile(flash_mla_sparse_fwd, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        got = [tensor.clone() for tensor in compiled(q, kv, indices, 0.04, 512, sink, lengths)]
        assert_right(got, exact(q, kv, indices, 0.04, sink, lengths))


def test_captured_and_replayed_with_other_inputs():
    q, kv, indices, sink, lengths = held = problem(140, 128, 576, 200)
    flash_mla_sparse_fwd(q, kv, indices, 0.04, 512, sink, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = flash_mla_sparse_fwd(q, kv, indices, 0.04, 512, sink, lengths)
    for seed in (1, 2):
        for tensor, other in zip(held, problem(140, 128, 576, 200, seed), strict=True):
            tensor.copy_(other)
        graph.replay()
        assert_right(results, exact(q, kv, indices, 0.04, sink, lengths))
