"""The host cost of an eager operator call: Python frames over a recording driver, and time beside torch.mul."""

import gc
import statistics
import sys
import time
from functools import partial

import pytest
import torch
from stub_drivers import FakeTorch, Stub, route

import mla_suite
from mla_suite import archs as arch
from mla_suite.build import manifest
from mla_suite.core import dispatch
from mla_suite.kv_formats import cache as caches
from mla_suite.launch import has_kernel, launcher
from mla_suite.launch.hip import HipDriver

INT32 = {"dtype": torch.int32}
NEEDED = {
    "gfx942": ("append_kv_tokens-1", "decode_dtype-bf16_rows-16_width-576_rotate-0"),
    "gfx950": ("sparse_decode_kvformat-v32_rows-16", "sparse_decode_kvformat-dsv4_rows-64"),
}


def around_attention(device, ops=mla_suite):
    """Small calls of the operators around attention, by name; `ops` is where they are found."""
    partial_out, partial_lse = torch.randn(66, 16, 512, device=device), torch.randn(66, 16, device=device)
    out = torch.empty(1, 16, 512, dtype=torch.bfloat16, device=device), torch.empty(1, 16, device=device)
    seq_lens = torch.full((4,), 1000, **INT32, device=device)
    kv_c, k_pe = torch.zeros(4, 576, dtype=torch.bfloat16, device=device).split([512, 64], dim=1)
    cache, slots = torch.zeros(8, 64, 576, dtype=torch.bfloat16, device=device), torch.arange(4, device=device)
    combine_out = torch.ops.mla_suite.combine.out
    options = {"num_splits": 66, "out_dtype": torch.bfloat16, "out": out[0], "lse": out[1]}
    return {
        "combine": lambda: ops.combine(partial_out, partial_lse, num_splits=66),
        "combine.out": lambda: combine_out(partial_out, partial_lse, **options),
        "plan": lambda: ops.plan(seq_lens, num_heads=16, max_seqlen_q=1, num_sm_parts=128, max_seqlen_kv=4096),
        "append_kv": lambda: ops.append_kv(kv_c, k_pe, cache, slots, kv_format="bf16"),
    }


def attention(device, ops=mla_suite):
    """Small calls of decode by name: one split, a number of splits, a plan, and the caller's outputs."""
    q = torch.randn(4, 1, 16, 576, device=device).bfloat16()
    cache, lens = torch.zeros(16, 64, 576, device=device).bfloat16(), torch.full((4,), 256, **INT32, device=device)
    table = torch.arange(16, **INT32, device=device).view(4, 4)
    plan = mla_suite.plan(lens, num_heads=16, num_sm_parts=128, max_seqlen_kv=256)
    call = partial(ops.decode, q, cache, lens, table, softmax_scale=0.1)
    out, lse = call(num_splits=1)
    into = partial(torch.ops.mla_suite.decode.out, *call.args, softmax_scale=0.1, out=out, lse=lse)
    return {
        "decode": partial(call, num_splits=1),
        "decode in splits": partial(call, num_splits=4),
        "decode by plan": partial(call, plan=plan),
        "decode.out by plan": partial(into, plan=plan),
    }


def selection(device, ops=mla_suite):
    """Small calls of sparse_decode by name: one pool, whole and split; two with a sink, split and by plan."""
    v32 = caches.empty("v32", 8, 64, device=device)
    dsv4 = [caches.empty("dsv4", 8, page, device=device) for page in (64, 2)]
    narrow, wide = (torch.randn(4, 1, heads, d, device=device).bfloat16() for heads, d in ((16, 576), (64, 512)))
    selected = torch.zeros(4, 1, 2048, **INT32, device=device)
    two = [torch.zeros(4, 1, width, **INT32, device=device) for width in (128, 512)]
    lengths = [torch.full((4,), length, **INT32, device=device) for length in (100, 300)]
    keys, sink = torch.full((4,), 640, **INT32, device=device), torch.randn(64, device=device)
    plan = mla_suite.plan(keys, num_heads=64, num_sm_parts=128, max_seqlen_kv=640)
    one = partial(ops.sparse_decode, narrow, [v32], [selected], [None], [None], kv_formats=["v32"], softmax_scale=0.1)
    both = partial(ops.sparse_decode, wide, dsv4, two, [None] * 2, kv_formats=["dsv4"] * 2, softmax_scale=0.1)
    return {
        "sparse_decode v32": partial(one, num_splits=1),
        "sparse_decode v32 in splits": one,
        "sparse_decode dsv4 with sink": partial(both, lengths, sink, num_splits=2),
        "sparse_decode dsv4 by plan": partial(both, [None] * 2, sink, plan),
    }


@pytest.fixture
def hip(stub_folder, monkeypatch, request):
    """Routes CPU tensors to the recording driver of gfx942, or of the arch asked for; nothing is computed."""
    name = getattr(request, "param", "gfx942")
    if isinstance(manifest.locate(), str) or name not in {built for built, _ in manifest.installed().kernels}:
        pytest.skip(f"no kernels for {name}; run `python -m mla_suite build`")
    assert [needed for needed in NEEDED[name] if not has_kernel(name, needed)] == []
    record, stub = arch.get(name), Stub(stub_folder / "libamdhip64.so")
    stub.reset(0)
    route(monkeypatch, lambda: HipDriver(record, 0, stub.library, FakeTorch().device()))
    with mla_suite.emulate(name):
        yield stub
    dispatch.clear_caches()


# Frames as counted on Python 3.11; a frame is a tenth of a microsecond and more.
FRAMES = 13
LAUNCHES = {
    "gfx942": {
        "combine": 1,
        "combine.out": 1,
        "plan": 2,
        "append_kv": 1,
        "decode": 1,
        "decode in splits": 2,
        "decode by plan": 2,
        "decode.out by plan": 2,
    },
    "gfx950": {
        "sparse_decode v32": 1,
        "sparse_decode v32 in splits": 2,
        "sparse_decode dsv4 with sink": 2,
        "sparse_decode dsv4 by plan": 2,
    },
}


@pytest.mark.parametrize("hip", LAUNCHES, indirect=True)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("ops", [mla_suite, torch.ops.mla_suite], ids=["public", "torch.ops"])
def test_python_frames_of_a_call(hip, request, mode, ops):
    arch = request.node.callspec.params["hip"]
    calls = around_attention("cpu", ops) | attention("cpu", ops) if arch == "gfx942" else selection("cpu", ops)
    assert set(calls) == set(LAUNCHES[arch])
    for name, call in calls.items():
        entered = []

        def note(frame, event, argument, entered=entered):
            if event == "call":
                path = frame.f_code.co_filename
                if "/tests/" not in path:  # the stub of the driver, and checks of values, which a GPU does not get
                    entered.append(f"{path.rsplit('/', 1)[-1]}:{frame.f_code.co_name}")

        with mode():
            for _ in range(3):  # the first is made ready, the second found by its key, the third by a guard
                call()
            hip.reset(0)
            gc.disable()  # hypothesis, imported by another test, has a callback in the collector
            sys.setprofile(note)
            try:
                call()
            finally:
                sys.setprofile(None)
                gc.enable()
        assert len(hip.calls("hipModuleLaunchKernel")) == LAUNCHES[arch][name], name
        assert len(entered) <= FRAMES, f"{name}: {' '.join(entered)}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
@torch.inference_mode()
def test_time_beside_a_multiplication(record_property):
    """A whole eager call of an operator around attention takes at most 2.5 times the host time of torch.mul on a small
    tensor, in the same run; decode and sparse_decode, with their many arguments and a combine, are reported."""
    x = torch.randn(64, device="cuda")
    small = around_attention("cuda")
    timed = {**small, **attention("cuda"), **selection("cuda")}
    if launcher.current_arch(x) is None:
        pytest.skip("no native kernels for this GPU")

    def per_call(function, times=200):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            function()
        return (time.perf_counter() - begin) / times * 1e6

    def multiply():
        torch.mul(x, x)

    for function in (multiply, *timed.values()):
        per_call(function, 20)
    # Each between two of its yardstick, since a host's clock wanders over seconds; without the garbage collector, whose
    # turns come with a whole process's allocations.
    rounds = {name: [] for name in timed}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(20):
            for name, function in timed.items():
                before, took, after = per_call(multiply), per_call(function), per_call(multiply)
                rounds[name].append((took, 2 * took / (before + after)))
    finally:
        if collecting:
            gc.enable()
    ratios = {name: statistics.median(ratio for _, ratio in rounds[name]) for name in timed}
    print({name: f"{statistics.median(us for us, _ in rounds[name]):.1f} us, {ratios[name]:.2f}x" for name in timed})
    for name, ratio in ratios.items():
        record_property(f"{name}_over_mul", ratio)
    assert max(ratios[name] for name in small) <= 2.5, ratios
