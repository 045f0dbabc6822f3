"""What an eager operator call costs the host: Python frames over a recording driver, and time beside torch.mul."""

import statistics
import sys
import time

import pytest
import torch
from stub_drivers import FakeTorch, Stub

import mla_suite
from mla_suite.core import arch, library
from mla_suite.runtime import has_kernel, launcher
from mla_suite.runtime.hip import HipDriver

INT32 = {"dtype": torch.int32}


def calls(device):
    """Small calls of the operators around attention, by name."""
    partial_out, partial_lse = torch.randn(66, 16, 512, device=device), torch.randn(66, 16, device=device)
    out = torch.empty(1, 16, 512, dtype=torch.bfloat16, device=device), torch.empty(1, 16, device=device)
    seq_lens = torch.full((4,), 1000, **INT32, device=device)
    row = torch.zeros(4, 576, dtype=torch.bfloat16, device=device)
    cache, slots = torch.zeros(8, 64, 576, dtype=torch.bfloat16, device=device), torch.arange(4, device=device)
    merge = torch.ops.mla_suite.combine.out
    options = {"num_splits": 66, "out_dtype": torch.bfloat16, "out": out[0], "lse": out[1]}
    return {
        "combine": lambda: mla_suite.combine(partial_out, partial_lse, num_splits=66),
        "combine.out": lambda: merge(partial_out, partial_lse, **options),
        "plan": lambda: mla_suite.plan(seq_lens, rows=16, workers=128, max_kv_len=4096),
        "append_kv": lambda: mla_suite.append_kv(row[:, :512], row[:, 512:], cache, slots, layout="bf16"),
    }


@pytest.fixture
def hip(stub_folder, monkeypatch):
    """CPU tensors count as a gfx942's, whose driver is the recording one; the values inside them are not looked at."""
    if not has_kernel("gfx942", "append_kv_tokens-1"):
        pytest.skip("no kernels for gfx942; run `python -m mla_suite build`")
    record, stub = arch.get("gfx942"), Stub(stub_folder / "libamdhip64.so")
    stub.reset(0)
    monkeypatch.setattr(
        launcher, "_make_driver", lambda index: HipDriver(record, 0, stub.library, FakeTorch().device())
    )
    monkeypatch.setattr(launcher, "_drivers", {})
    monkeypatch.setattr(launcher, "_prepared", {})
    monkeypatch.setattr(library, "_validate", lambda *arguments: None)
    with mla_suite.emulate("gfx942"):
        yield stub


# Frames as counted on Python 3.11, where a comprehension is one; a frame is a tenth of a microsecond and more.
@pytest.mark.parametrize(("name", "launches", "frames"), [("combine", 1, 26), ("combine.out", 1, 26), ("plan", 2, 30),
                                                          ("append_kv", 1, 26)])  # fmt: skip
def test_python_frames_of_a_call(hip, name, launches, frames):
    call, entered = calls("cpu")[name], []
    with torch.inference_mode():
        call()
        hip.reset(0)

        def note(frame, event, argument):
            if event == "call":
                entered.append(f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_code.co_name}")

        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
    assert len(hip.calls("hipModuleLaunchKernel")) == launches
    assert len(entered) <= frames, entered


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
@torch.inference_mode()
def test_time_beside_a_multiplication(record_property):
    """A whole eager call takes at most 2.5 times the host time of torch.mul on a small tensor, in the same run."""
    x = torch.randn(64, device="cuda")
    timed = {"mul": lambda: torch.mul(x, x), **calls("cuda")}
    if launcher.current_arch(x) is None:
        pytest.skip("no native kernels for this GPU")

    def per_call(function, times=200):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            function()
        return (time.perf_counter() - begin) / times * 1e6

    for function in timed.values():
        per_call(function, 20)
    rounds = [{name: per_call(function) for name, function in timed.items()} for _ in range(20)]
    ratios = {name: statistics.median(turn[name] / turn["mul"] for turn in rounds) for name in timed}
    print({name: f"{statistics.median(turn[name] for turn in rounds):.1f} us, {ratios[name]:.2f}x" for name in timed})
    for name, ratio in ratios.items():
        record_property(f"{name}_over_mul", ratio)
    assert max(ratios.values()) <= 2.5, ratios
