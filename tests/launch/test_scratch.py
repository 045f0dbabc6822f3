"""Scratch memory for partials: who shares a buffer, and how it grows outside and during capture."""

import threading

import pytest
import torch

from mla_suite.launch import scratch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh():
    scratch.release()
    yield
    scratch.release()


def test_partials_are_views_of_one_buffer_that_stays():
    out, lse = scratch.partials(CPU, 3, 16, 512)
    assert (out.shape, lse.shape, out.dtype, lse.dtype) == ((3, 16, 512), (3, 16), torch.float32, torch.float32)
    assert out.is_contiguous()
    assert lse.data_ptr() == out.data_ptr() + out.numel() * 4
    again, _ = scratch.partials(CPU, 2, 16, 512)
    assert again.data_ptr() == out.data_ptr()
    larger, _ = scratch.partials(CPU, 300, 16, 512)
    assert larger.data_ptr() != out.data_ptr()
    assert scratch.partials(CPU, 3, 16, 512)[0].data_ptr() == larger.data_ptr(), "it never shrinks"


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="device meta is neither cpu nor cuda"):
        scratch.take(torch.device("meta"), 1)


@pytest.mark.parametrize("device", ["cpu", "cuda", "captured"])
def test_more_than_the_limit_is_refused_before_it_is_allocated(gpu, device):
    """128 splits of 512 sequences with 128 heads: 128 * 512 * 128 * 513 fp32 values."""
    gpu["capturing"] = device == "captured"
    place = CPU if device == "cpu" else torch.device("cuda", 0)
    with pytest.raises(ValueError, match="would take 17213423616 bytes; at most 8589934592: call with fewer"):
        scratch.partials(place, 128, 512 * 128, 512)
    assert not gpu["threads"], "nothing was allocated"


@pytest.fixture
def gpu(monkeypatch):
    """torch.cuda as scratch sees it, on the CPU: a settable stream and capture flag, and who allocated."""
    state = {"stream": 7, "capturing": False, "threads": []}
    allocate = torch.empty

    def empty(*size, device=None, **options):
        state["threads"].append(threading.current_thread().name)
        return allocate(*size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: state["stream"], raising=False)
    monkeypatch.setattr(scratch, "_kept", scratch._Kept())
    return state


def test_one_buffer_per_stream_and_device(gpu):
    device = torch.device("cuda", 0)
    first = scratch.take(device, 1000)
    assert scratch.take(torch.device("cuda"), 1000) is first
    gpu["stream"] = 8
    second = scratch.take(device, 1000)
    assert second is not first
    assert scratch.take(torch.device("cuda", 1), 1000) is not second
    gpu["stream"] = 7
    assert scratch.take(device, 500) is first
    assert len(gpu["threads"]) == 3


def test_threads_on_one_stream_do_not_share(gpu):
    """Two launches of one call may have another thread's between them."""
    device = torch.device("cuda", 0)
    mine, other = scratch.take(device, 1000), []
    thread = threading.Thread(target=lambda: other.extend(scratch.take(device, size) for size in (1000, 500)))
    thread.start()
    thread.join()
    assert other[0] is other[1] is not mine
    assert scratch.take(device, 1000) is mine


def test_growth_is_allocated_by_another_thread(gpu):
    scratch.take(torch.device("cuda", 0), 1000)
    assert gpu["threads"] != [threading.main_thread().name]


def test_capture_uses_a_plain_allocation_of_this_thread(gpu):
    device = torch.device("cuda", 0)
    kept = scratch.take(device, 1000)
    gpu["capturing"] = True
    captured = scratch.take(device, 1000)
    assert captured is not kept
    assert captured.numel() == 1000
    assert gpu["threads"][-1] == threading.main_thread().name
    gpu["capturing"] = False
    assert scratch.take(device, 1000) is kept
