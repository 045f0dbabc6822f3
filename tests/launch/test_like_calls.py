"""Calls in any order launch what each would launch alone: nothing of an earlier call is left in a later one."""

import itertools
import random
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

import mla_suite  # noqa: F401  # registers the operators
from mla_suite.core import dispatch
from mla_suite.kv_formats import cache as caches
from mla_suite.kv_formats import get_kv_format
from mla_suite.launch import run, scratch, tensor_map

OPS = torch.ops.mla_suite
INT32 = {"dtype": torch.int32}
ROOM = torch.zeros(1 << 20, dtype=torch.uint8)
IDS = torch.zeros(4096, **INT32)


def at(memory, offset, shape, dtype):
    """A contiguous tensor from a byte of `memory` on: calls with another argument share the addresses of the others."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return memory[offset : offset + size].view(dtype).view(shape)


MEMORY = [torch.zeros(1 << 22, dtype=torch.uint8) for _ in range(6)]


def decode(draw):
    batch, q_len, heads = draw.choice([1, 3, 4]), draw.choice([1, 2]), draw.choice([16, 64])
    q = at(MEMORY[0], draw.choice([0, 0, 8, 16]), (batch, q_len, heads, 576), torch.bfloat16)
    cache = at(MEMORY[1], draw.choice([0, 16]), (8, 64, 576), torch.bfloat16)
    out = at(MEMORY[2], draw.choice([0, 0, 8]), (batch, q_len, heads, 512), torch.bfloat16)
    lse = at(MEMORY[3], 0, (batch, q_len, heads), torch.float32)
    lens = IDS[:batch]
    pages = draw.choice([1, 7, 8, 63, 64, 65, 400, 401, 1000])
    if draw.random() < 0.5:
        paged = (at(ROOM, 0, (batch, pages), torch.int32), None, None)
    else:
        paged = (None, IDS[: batch + 1], IDS[64 : 64 + pages] if draw.random() < 0.9 else IDS[64 : 64 + 2 * pages : 2])
        if paged[2].stride() != (1,) and pages > 1:
            paged = (*paged[:2], paged[2].contiguous())
    longest = draw.choice([0, 0, 1, 255, 256, 257, 1000, 1024, 1025, 4096, 4097, 8191, 8192, 2**31 - 1])
    splits = draw.choice([{}, {}, {"num_splits": 3}, {"split_size": 100}, {"split_size": 4096}])
    if splits.get("split_size") == 100 and longest == 2**31 - 1:
        splits = {}  # too many partial results
    plan = None
    if not splits and draw.random() < 0.3:
        plan = at(MEMORY[4], 0, (512,), torch.int32)
    options = {"softmax_scale": draw.choice([0.1, 0.2, -0.1]), "causal": draw.random() < 0.5, "max_seqlen_kv": longest}
    options |= {**splits, "plus_inf_lse": draw.random() < 0.3}
    sink = at(MEMORY[5], 0, (heads,), torch.float32) if draw.random() < 0.3 else None
    given = (q, cache, lens, *paged, None, None, None, sink, None, plan)
    return lambda: OPS.decode.out(*given, **options, out=out, lse=lse)


def plan(draw):
    lens = IDS[: draw.choice([1, 3, 200])]
    sizes = {"num_heads": draw.choice([16, 128]), "max_seqlen_q": draw.choice([1, 2]), "num_sm_parts": 128}
    longest = draw.choice([1, 255, 1000, 1024, 1025, 4096, 4097, 100_000])
    splits = draw.choice([{}, {"num_splits": 3}, {"split_size": 100}, {"split_size": 4096}])
    return lambda: OPS.plan(lens, max_seqlen_kv=longest, **sizes, **splits)


def append_kv(draw):
    tokens = draw.choice([1, 4, 2000])
    kv_c = at(MEMORY[0], draw.choice([0, 8]), (tokens, 512), torch.bfloat16)
    k_pe = at(MEMORY[3], 0, (tokens, 64), torch.bfloat16)
    cache = at(MEMORY[1], draw.choice([0, 4, 16]), (draw.choice([4, 8]), 64, 576), torch.bfloat16)
    slots = torch.zeros(tokens, dtype=draw.choice([torch.int32, torch.int64]))
    interleaved = draw.random() < 0.5
    return lambda: OPS.append_kv(kv_c, k_pe, cache, slots, kv_format="bf16", interleaved=interleaved)


V32 = [caches.empty(get_kv_format("v32"), 8, 64) for _ in range(2)]


def sparse_decode(draw):
    batch, heads, pools = draw.choice([1, 3]), draw.choice([16, 64]), draw.choice([1, 2])
    kind = draw.choice([list, tuple])
    q = at(MEMORY[0], draw.choice([0, 8]), (batch, 1, heads, 576), torch.bfloat16)
    index = [at(MEMORY[4], 65536 * i, (batch, 1, draw.choice([128, 512])), torch.int32) for i in range(pools)]
    given = q, kind(V32[:pools]), kind(index), kind([None] * pools), kind([None] * pools)
    out = at(MEMORY[2], draw.choice([0, 8]), (batch, 1, heads, 512), torch.bfloat16)
    lse = at(MEMORY[3], 0, (batch, 1, heads), torch.float32)
    options = {"softmax_scale": draw.choice([0.1, 0.2]), **draw.choice([{}, {"num_splits": 2}, {"split_size": 128}])}
    return lambda: OPS.sparse_decode.out(*given, kv_formats=["v32"] * pools, **options, out=out, lse=lse)


def combine(draw):
    batch, splits, rows = draw.choice([1, 2]), draw.choice([1, 3, 33]), draw.choice([16, 64])
    partial_out = at(MEMORY[0], draw.choice([0, 4]), (batch * splits, rows, 128), torch.float32)
    partial_lse = at(MEMORY[3], 0, (batch * splits, rows), torch.float32)
    dtype = draw.choice([torch.bfloat16, torch.float32])
    out = at(MEMORY[2], draw.choice([0, 8]), (batch, rows, 128), dtype)
    lse = at(MEMORY[5], 0, (batch, rows), torch.float32)
    options = {"num_splits": splits, "out_dtype": dtype, "skip_single": draw.random() < 0.5}
    return lambda: OPS.combine.out(partial_out, partial_lse, **options, out=out, lse=lse)


KNOWN = [(tensor.data_ptr(), tensor.nbytes) for tensor in (*MEMORY, ROOM, IDS, *V32)]


def address(tensor):
    """Where a tensor lies; 0 for a temporary, which another call has elsewhere."""
    at = torch.Tensor.data_ptr(tensor)
    return at if any(begin <= at < begin + size for begin, size in KNOWN) else 0


def scratch_at_zero(device, elements):
    """What a launch asks of scratch."""
    scratch.take(device, elements)  # refuses what is too large
    return SimpleNamespace(data_ptr=lambda: 0)


@pytest.fixture
def launches(h200, monkeypatch):
    """A function that makes a call -> its launches with all their parameters, or the sentence that refused it."""
    # A map is its address and a number for the rest, so that a map of other contents is another.
    numbers = itertools.count()
    contents = defaultdict(lambda: next(numbers))
    monkeypatch.setattr(
        tensor_map, "swizzled", lambda address, *rest: (address, contents[rest]) + (0,) * (tensor_map.WORDS - 2)
    )
    monkeypatch.setattr(run, "_data_ptr", address)
    monkeypatch.setattr(run, "take", scratch_at_zero)

    def launched(call):
        h200.clear()
        try:
            call()
        except (ValueError, RuntimeError) as error:
            return str(error)
        return [*h200]

    return launched


MODES = [torch.inference_mode, torch.no_grad, torch.enable_grad]


@pytest.mark.parametrize("draw_call", [decode, plan, append_kv, sparse_decode, combine])
def test_a_call_launches_what_it_launches_alone(launches, draw_call, seeded):
    draw = random.Random(seeded)
    calls = [draw_call(draw) for _ in range(60)]
    for _ in range(3):  # in pairs that come at once, and anew
        for call in draw.sample(calls, len(calls)):
            for again in (call, draw.choice(calls), call):
                with draw.choice(MODES)():
                    launches(again)
    warm = []
    for call in calls:
        with draw.choice(MODES)():
            warm.append(launches(call))
    assert any(isinstance(found, list) and found for found in warm)
    for number, (call, expected) in enumerate(zip(calls, warm, strict=True)):
        dispatch.clear_caches()
        assert launches(call) == expected, number


def test_a_tensor_map_is_made_once_for_an_address(h200, monkeypatch):
    made = []
    monkeypatch.setattr(tensor_map, "swizzled", lambda at, *rest: made.append(at) or (0,) * tensor_map.WORDS)
    one, other = (at(memory, 0, (1, 1, 64, 576), torch.bfloat16) for memory in (MEMORY[0], MEMORY[2]))
    cache = at(MEMORY[1], 0, (8, 64, 576), torch.bfloat16)
    for q in (one, one, other, one, other):
        OPS.decode(q, cache, IDS[:1], IDS[:8].view(1, 8), softmax_scale=0.1)
    assert sorted(made) == sorted(tensor.data_ptr() for tensor in (one, other, cache))
    assert len(h200) >= 5
