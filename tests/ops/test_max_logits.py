"""The overload sparse_decode.max_logits: out and lse of sparse_decode, and the largest scaled score of every row."""

import math

import pytest
import torch
from sparse_problems import FNUZ_POOLS, POOLS, problem

import mla_suite
from mla_suite.core import dispatch
from mla_suite.kv_formats import cache as caches
from mla_suite.ops.sparse_decode import max_logits

CALL = torch.ops.mla_suite.sparse_decode.max_logits
SHAPES = {name: POOLS[name] for name in ("v4", "v32", "bf16", "three pools")} | {"fnuz": FNUZ_POOLS["v4 in fnuz"]}


def given(shape, tokens=6, heads=8):
    """Arguments of queries [2, tokens / 2, heads, D] with one length for both tokens of a sequence in the first pool,
    one for each in the second; the first sequence selects nothing."""
    (q, kv_caches, indices, *_), options = problem(SHAPES[shape], tokens, heads, seed=1, spread=0)
    dims = 2, tokens // 2
    indices = [index.unflatten(0, dims) for index in indices]
    for index in indices:
        index[0, 0] = -1
    lengths = [torch.tensor([0, 5]).int(), torch.arange(tokens).int().view(dims), None][: len(indices)]
    tensors = q.unflatten(0, dims), kv_caches, indices, [None] * len(indices), lengths, torch.randn(heads)
    return tensors, options | {"softmax_scale": 0.3}


def largest(tensors, options):
    """By a loop in fp32 over rows that each token selects."""
    q, kv_caches, indices, _, topk_lengths, _ = tensors
    found = torch.full(q.shape[:-1], -math.inf)
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            pools = zip(options["kv_formats"], kv_caches, indices, topk_lengths, strict=True)
            for name, cache, index, lengths in pools:
                length = index.shape[-1] if lengths is None else lengths[b] if lengths.dim() == 1 else lengths[b, i]
                chosen = index[b, i, : int(length)]
                chosen = chosen[(chosen >= 0) & (chosen < cache.shape[0] * cache.shape[1])].long()
                keys = caches.unpack(name, cache).flatten(0, 1)[chosen]
                keys = keys.bfloat16().float() if name == "v32" else keys  # its keys are defined as rounded
                for score in (q[b, i].float() @ keys.T * options["softmax_scale"]).unbind(-1):
                    found[b, i] = torch.maximum(found[b, i], score)
    return found


@pytest.mark.parametrize("tokens_at_once", [1, 4, None])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_a_loop(monkeypatch, shape, tokens_at_once):
    tensors, options = given(shape)
    if tokens_at_once:
        row = 4 * tensors[0].shape[-1] * max(index.shape[-1] for index in tensors[2])
        monkeypatch.setattr(max_logits, "CHUNK_BYTES", tokens_at_once * row)
    out, lse, found = CALL(*tensors, **options)
    wanted_out, wanted_lse = mla_suite.sparse_decode(*tensors, **options)
    assert torch.equal(out, wanted_out)
    assert torch.equal(lse, wanted_lse)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, largest(tensors, options))
    assert bool((found[0] == -math.inf).any())


def test_descales_multiply_scores():
    (q, *pools), options = problem([("fp8", 3, 16, 20)], 4, 8, dtype=torch.float8_e4m3fn)
    tensors, names = (q, *pools[:4]), options["kv_formats"]
    descales = dict(q_descale=torch.tensor([0.25]), kv_descale=torch.tensor(8.0))
    *_, found = CALL(*tensors, None, None, *descales.values(), kv_formats=names, softmax_scale=0.1)
    *_, plain = CALL(*tensors, kv_formats=names, softmax_scale=0.2)
    assert torch.equal(found, plain)


def test_opcheck():
    tensors, options = given("v4")
    torch.library.opcheck(CALL, tensors, options | dict(plus_inf_lse=True))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_a_backend_without_max_logits(arch):
    """AMD's kernels return none: torch computes it beside them, in eager and compiled calls."""
    tensors, options = given("bf16", heads=16)
    compiled = torch.compile(lambda *tensors: CALL(*tensors, **options), fullgraph=True, backend="aot_eager")
    with mla_suite.emulate(arch), dispatch.count_calls() as calls:
        for out, lse, found in (CALL(*tensors, **options), compiled(*tensors)):
            torch.testing.assert_close(found, largest(tensors, options))
            assert torch.equal(out[0, 0], torch.zeros_like(out[0, 0]))
            assert torch.equal(lse[0, 0], torch.full_like(lse[0, 0], -math.inf))
    assert [(*key[:2], count) for key, count in calls.items()] == [("sparse_decode.max_logits", "native", 2)]


def test_ragged_indices_are_refused():
    (q, kv_caches, indices, _, _, sink), options = given("bf16")
    indptr = torch.arange(7).int()
    with pytest.raises(ValueError, match=r"sparse_decode.max_logits: indptrs are given; it takes dense indices"):
        CALL(q, kv_caches, [indices[0].flatten()], [indptr], [None], sink, **options)


def test_backward_is_refused():
    tensors, options = given("bf16")
    found = CALL(tensors[0].requires_grad_(), *tensors[1:], **options)[2]
    with pytest.raises(RuntimeError, match="sparse_decode.max_logits has no backward"):
        found.sum().backward()


@pytest.mark.parametrize("dims", [(0, 1, 8), (2, 0, 8), (2, 1, 0), (0, 0, 0)], ids=str)
def test_nothing_to_compute(dims):
    rows, picks = torch.randn(9, 1, 576).bfloat16(), torch.zeros(*dims[:2], 4, dtype=torch.int32)
    tensors = torch.randn(*dims, 576).bfloat16(), [rows], [picks], [None], [None], None
    out, lse, found = CALL(*tensors, kv_formats=["bf16"], softmax_scale=0.3)
    assert (out.shape, lse.shape, found.shape) == ((*dims, 512), dims, dims)
