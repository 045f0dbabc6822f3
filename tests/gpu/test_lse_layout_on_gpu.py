"""A caller's lse on the kernels for sm_90: any strides, +inf for rows that see no key, and the same bits as otherwise.

Every schedule of decode is asked for: one split, splits merged by the two CTAs of a cluster in both ways, by combine
behind decode and beside it, with a plan, ragged; and sparse_decode. FlashMLA's interface runs beside FlashMLA where
that is installed.
"""

from __future__ import annotations

import math
from functools import partial

import decode_calls
import pytest
import torch

import mla_suite
from mla_suite.core import dispatch
from mla_suite.integrations.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.launch import launcher

pytestmark = pytest.mark.usefixtures("native_decode")
SCALE = 576**-0.5
OPERATORS = torch.ops.mla_suite


def dense(lens, heads, q_len, page=64, dtype=torch.bfloat16):
    """(args, kwargs) of decode over `lens` keys in shuffled pages; NaN where no sequence has keys."""
    counts = [max(-(-n // page), 1) for n in lens]
    order = torch.randperm(sum(counts), device="cuda").int()
    cache = torch.randn(sum(counts), page, 576, device="cuda").to(dtype)
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32, device="cuda")
    first = 0
    for b, (length, count) in enumerate(zip(lens, counts, strict=True)):
        table[b, :count] = order[first : first + count]
        slots = order[first : first + count, None].long() * page + torch.arange(page, device="cuda")
        cache.flatten(0, 1)[slots.flatten()[length:]] = torch.nan
        first += count
    seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    q = torch.randn(len(lens), q_len, heads, 576, device="cuda").to(dtype)
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    return (q, cache, seq_lens, table), dict(softmax_scale=SCALE, max_seqlen_q=q_len, kv_format=name)


def layouts(shape):
    """Name -> (memory that holds 7 everywhere, the view of it that is an lse of this shape)."""
    made = {"plain": (room := torch.full(shape, 7.0, device="cuda"), room)}
    if len(shape) == 3:
        batch, q_len, heads = shape
        room = torch.full((batch, heads, q_len), 7.0, device="cuda")
        made["by heads"] = room, room.transpose(1, 2)
        room = torch.full((batch + 1, heads + 3, q_len + 2, 2), 7.0, device="cuda")
        made["by heads, apart"] = room, room[1:, 2:-1, 1:-1, 1].transpose(1, 2)
        room = torch.full((q_len, batch, heads), 7.0, device="cuda")
        made["by tokens"] = room, room.transpose(0, 1)
    else:
        room = torch.full((shape[1] + 1, shape[0] + 5), 7.0, device="cuda")
        made["by heads"] = room, room[1:, 3:-2].t()
    return made


def assert_the_same(call, operator, out, lse):
    """`operator` gives the bits of (out, lse) into every layout, with -inf and with +inf, and writes nothing beside."""
    for name, (room, view) in layouts(lse.shape).items():
        for plus_inf in (False, True):
            room.fill_(7.0)
            mine = torch.full_like(out, 7.0)
            call(operator, out=mine, lse=view, plus_inf_lse=plus_inf)
            wanted = lse.masked_fill(lse == -math.inf, math.inf) if plus_inf else lse
            assert torch.equal(mine, out), name
            assert torch.equal(view, wanted), f"{name}, +inf {plus_inf}"
            view.fill_(7.0)
            assert bool((room == 7.0).all()), f"{name}: something was written beside lse"


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were prepared for decode and the combine behind it."""
    names = set()
    find = launcher.find

    def noting(op, kernel, tensor):
        names.add(kernel)
        return find(op, kernel, tensor)

    monkeypatch.setattr(launcher, "find", noting)
    dispatch.clear_caches()
    yield names
    dispatch.clear_caches()


LENS = {
    "one": [8192],
    "few": [900, 0, 64, 3000, 1, 2, 4096, 777],
    "many": [0, 1, *range(60, 4000, 300)] * 4,
}
SHAPES = [(16, 1), (128, 1), (32, 4), (5, 3), (64, 2)]


@torch.inference_mode()
def test_every_schedule(launched):
    for lens in LENS.values():
        for heads, q_len in SHAPES:
            for dtype, page in ((torch.bfloat16, 64), (torch.float16, 64), (torch.bfloat16, 16)):
                args, kwargs = dense(lens, heads, q_len, page, dtype)
                sink = torch.randn(heads, device="cuda")
                plan = mla_suite.plan(args[2], num_heads=heads, max_seqlen_q=q_len)
                for how in ({"num_splits": 1}, {"num_splits": 2}, {"num_splits": 4}, {"num_splits": 7}, {}):
                    given = (*args, None, None, None, None, None, sink, None, None)
                    compare(given, kwargs | how)
                compare((*args, None, None, None, None, None, None, None, plan), kwargs)
                compare((*args, None, None, None, None, None, None, None, None), kwargs | {"split_size": 256})
    words = " ".join(launched)
    for part in ("clustermode-none", "clustermode-reduce_o", "clustermode-exchange_p", "kvsource-cp_async"):
        assert part in words, f"no call used {part}"
    for part in ("persistent_combine", "streaming_combine", "combine_dv-512"):
        assert any(name.startswith(part) for name in launched), f"no call used {part}"


def compare(args, kwargs):
    decode_calls.native(list(args), kwargs)
    out, lse = OPERATORS.decode(*args, **kwargs)
    call = lambda operator, **outputs: operator(*args, **kwargs, **outputs)  # noqa: E731
    assert_the_same(call, OPERATORS.decode.out, out, lse)


@torch.inference_mode()
def test_ragged_queries():
    (q, cache, lens, table), kwargs = dense([900, 0, 64, 3000, 2], 32, 1)
    cu_seqlens_q = torch.tensor([0, 3, 4, 4, 8, 12], dtype=torch.int32, device="cuda")
    q = torch.randn(12, 32, 576, device="cuda").bfloat16()
    kwargs["max_seqlen_q"] = 4
    plan = mla_suite.plan(lens, cu_seqlens_q, num_heads=32, max_seqlen_q=4)
    for how, made in (({"num_splits": 1}, None), ({"num_splits": 2}, None), ({"num_splits": 5}, None), ({}, plan)):
        compare((q, cache, lens, table, None, None, cu_seqlens_q, None, None, None, None, made), kwargs | how)


@torch.inference_mode()
@pytest.mark.parametrize("record", ["v32", "dsv4", "bf16"])
@pytest.mark.parametrize("shape", [(3, 1), (3, 2), (7,)], ids=str)
def test_sparse(record, shape):
    kind = get_kv_format(record)
    width = 576 if record == "bf16" else kind.head_dim
    kind = kind.sized(width - 64, 64) if record == "bf16" else kind
    cache = caches.pack(kind, torch.randn(16, 64, width, device="cuda"))
    for heads in (16, 128):
        q = torch.randn(*shape, heads, width, device="cuda").bfloat16()
        index = torch.randint(-300, 1024, (*shape, 512), device="cuda").int()
        index[0] = -1
        plan = mla_suite.plan(torch.full((math.prod(shape),), 512, device="cuda").int(), num_heads=heads)
        for how, made in (({"num_splits": 1}, None), ({"num_splits": 3}, None), ({}, None), ({}, plan)):
            args = q, [cache], [index], [None], [None], torch.randn(heads, device="cuda"), made
            options = dict(kv_formats=[record], softmax_scale=SCALE, **how)
            call = lambda operator, args=args, options=options, **outputs: operator(*args, **options, **outputs)  # noqa: E731
            out, lse = call(OPERATORS.sparse_decode)
            assert bool(lse.isinf().any())
            assert_the_same(call, OPERATORS.sparse_decode.out, out, lse)


@torch.inference_mode()
def test_combine():
    partial_out, partial_lse = torch.randn(12, 40, 512, device="cuda"), torch.randn(12, 40, device="cuda")
    partial_lse[:4, 3] = -math.inf
    for options in ({"num_splits": 4}, {"num_splits": 2}, {"num_splits": 12}):
        call = partial(_combine, partial_out, partial_lse, options)
        assert_the_same(call, OPERATORS.combine.out, *call(OPERATORS.combine))


def _combine(partial_out, partial_lse, options, operator, **outputs):
    return operator(partial_out, partial_lse, out_dtype=torch.float32, **options, **outputs)


@torch.inference_mode()
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("q_len", [1, 3])
def test_flash_mla(heads, q_len):
    """The interface's results are decode's, turn after turn, and FlashMLA's within the rounding of bf16."""
    lens = [900, 3, 64, 3000, 5, 4096]
    (q, cache, seq_lens, table), kwargs = dense(lens, heads, q_len)
    cache = cache.nan_to_num()  # FlashMLA multiplies what lies past a sequence by 0
    holder, _ = get_mla_metadata()
    for _ in range(3):
        out, lse = flash_mla_with_kvcache(q, cache.unsqueeze(2), table, seq_lens, 512, holder, None, SCALE, True)
    wanted = mla_suite.decode(q, cache, seq_lens, table, plan=holder.tile_scheduler_metadata, **kwargs)
    assert lse.is_contiguous()
    assert torch.equal(out, wanted[0])
    by_heads = wanted[1].transpose(1, 2)
    assert torch.equal(lse, by_heads.masked_fill(by_heads == -math.inf, math.inf))
    peer = pytest.importorskip("flash_mla", reason="sgl-flash-mla is not installed")
    theirs = peer.flash_mla_with_kvcache(
        q,
        cache.unsqueeze(2),
        table,
        seq_lens,
        512,
        peer.get_mla_metadata()[0],
        None,
        SCALE,
        True,
        False,
        use_legacy=True,
    )
    torch.testing.assert_close(out.float(), theirs[0].float(), rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(lse, theirs[1], rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_an_interface_call_launches_what_decode_does():
    """As nodes of captured graphs, which are all kernels and copies that a call enqueues."""
    for q_len in (1, 3):
        (q, cache, seq_lens, table), kwargs = dense([900, 0, 64, 3000], 16, q_len)
        holder, _ = get_mla_metadata()
        call = partial(flash_mla_with_kvcache, q, cache.unsqueeze(2), table, seq_lens, 512, holder, None, SCALE, True)
        call()
        own = partial(mla_suite.decode, q, cache, seq_lens, table, plan=holder.tile_scheduler_metadata, **kwargs)
        own()
        assert nodes(call) == nodes(own) == 2


def nodes(call):
    import ctypes

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    count = ctypes.c_size_t()
    library = ctypes.CDLL("libcuda.so.1")
    assert library.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)) == 0
    return count.value
