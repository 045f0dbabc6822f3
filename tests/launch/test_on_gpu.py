"""The CUDA driver on a real GPU: numbers, streams, capture, threads, devices, and what a launch costs the host."""

import statistics
import threading
import time

import pytest
import sample_tree
import torch

from mla_suite import launch
from mla_suite.build import build, compilers, manifest, params
from mla_suite.launch import launcher, scratch
from mla_suite.launch import run as running
from mla_suite.launch.driver import LaunchError
from mla_suite.launch.spec import CallSpec, Input, LaunchSpec, Output

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
NAME = "scale_threads-64"


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    record = launch.current_arch(torch.empty(1, device="cuda"))
    if record is None:
        pytest.skip("no native kernels for this GPU")
    if record.vendor == "nvidia" and compilers.find_nvidia() is None:
        pytest.skip("nvcc is not installed")
    root = tmp_path_factory.mktemp("gpu_objects")
    return build([record.name], csrc=sample_tree.make(root / "csrc"), out=root / "objects")


@pytest.fixture
def prepared(objects, monkeypatch):
    """prepared(x, factor, out): the launch that launch.run makes for such calls; nothing is loaded yet."""
    monkeypatch.setattr(manifest, "_found", lambda: objects)
    monkeypatch.setattr(launcher, "_drivers", {})
    monkeypatch.setattr(launcher, "_prepared", {})
    csrc = objects.find(*next(iter(objects.kernels))).csrc
    monkeypatch.setattr(running, "load", lambda name: params.load(name, csrc))

    def prepare(x, factor, out, **changes):
        shape = {"grid": (40, 1, 1), "block": 64, "dynamic_lds": 0, "overlap": False, **changes}
        numbers, pointers = dict(scale=factor, count=x.numel(), stride=64 * 40), {"in": Input(0), "out": Output(0)}
        spec = LaunchSpec(NAME, *shape.values(), "scale", numbers, pointers)
        return running.prepare("scale", CallSpec((spec,)), (out,), (x,))

    return prepare


@pytest.fixture
def scale(prepared):
    """scale(x, factor, out) through launch.run."""

    def run(x, factor, out, **changes):
        prepared(x, factor, out, **changes)((out,), (x,))
        return out

    return run


def expected(x, factor):
    return (x.view(-1, 2).flip(1).reshape(-1) * factor).float()


def test_numbers(scale):
    x = torch.randn(64 * 1001, device="cuda")
    out = torch.full_like(x, float("nan"))
    assert torch.equal(scale(x, 0.25, out), expected(x, 0.25))


def test_large_shared_memory(scale):
    x = torch.randn(6400, device="cuda")
    assert torch.equal(scale(x, 2.0, torch.empty_like(x), dynamic_lds=100 << 10), expected(x, 2.0))
    with pytest.raises(LaunchError, match=r"scale: kernel scale_threads-64 on .* bytes of dynamic LDS, .* leaves"):
        scale(x, 2.0, torch.empty_like(x), dynamic_lds=1 << 20)


def test_the_current_stream(scale):
    """A launch lies between the operations of its stream: the copy before it is slow, so another stream would lose."""
    side = torch.cuda.Stream()
    source = torch.randn(1 << 26, device="cuda")
    x, out = torch.zeros_like(source), torch.empty_like(source)
    scale(x[:64], 1.0, out[:64])
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(20):
            x.copy_(source)
        scale(x, 1.0, out, grid=(1320, 1, 1))
    side.synchronize()
    assert torch.equal(out[: 64 * 40], expected(source[: 64 * 40], 1.0))


def test_overlap_with_the_kernel_before(scale):
    x = torch.randn(6400, device="cuda")
    out = torch.empty_like(x)
    for _ in range(3):  # nothing it reads is written by the kernels before it
        scale(x, 2.0, out, overlap=True)
    assert torch.equal(out, expected(x, 2.0))


def test_a_first_call_inside_a_capture(scale):
    x, out = torch.randn(6400, device="cuda"), torch.zeros(6400, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale(x, 3.0, out)
    assert torch.count_nonzero(out) == 0, "captured, not run"
    x.normal_()
    graph.replay()
    assert torch.equal(out, expected(x, 3.0))


def test_a_thread_that_never_used_the_gpu(scale):
    x, out = torch.randn(6400, device="cuda"), torch.zeros(6400, device="cuda")
    failures = []

    def work():
        try:
            scale(x, 3.0, out)
        except Exception as error:
            failures.append(error)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    torch.cuda.synchronize()
    assert failures == []
    assert torch.equal(out, expected(x, 3.0))


def test_another_device_than_the_current(scale):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
    x = torch.randn(6400, device="cuda:1")
    assert torch.equal(scale(x, 3.0, torch.zeros_like(x)), expected(x, 3.0))
    y = torch.randn(6400, device="cuda:0")
    assert torch.equal(scale(y, 3.0, torch.zeros_like(y)), expected(y, 3.0))


def test_scratch_survives_cuda_graphs_of_inductor():
    """reduce-overhead warms up with allocations sent to a graph's pool; scratch outlives the call: it must stay out."""

    @torch.library.custom_op("mla_suite_test::through_scratch", mutates_args=())
    def through_scratch(x: torch.Tensor) -> torch.Tensor:
        kept = scratch.take(x.device, x.numel())[: x.numel()].view_as(x)
        torch.mul(x, 2, out=kept)
        return kept + 1

    @through_scratch.register_fake
    def _(x):
        return torch.empty_like(x)

    scratch.release()
    compiled = torch.compile(lambda x: through_scratch(x * 3).relu(), mode="reduce-overhead")
    for _ in range(5):
        x = torch.randn(64, 1000, device="cuda")
        assert torch.equal(compiled(x).clone(), (x * 3 * 2 + 1).relu())


def per_call(function, calls=200, rounds=30):
    """Median microseconds of host time per call, the GPU idle at the start of each round."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    return statistics.median(times)


@torch.inference_mode()
def test_host_time_of_a_launch(prepared, record_property):
    """A prepared launch, as a warm call runs it: addresses are read, parameters packed, the kernel launched."""
    x, y = torch.randn(64, device="cuda"), torch.randn(64, device="cuda")
    out = torch.empty_like(x)
    run = prepared(x, 1.0, out, grid=(1, 1, 1))

    def launch_once():
        run((out,), (x,))

    def multiply():
        torch.mul(x, y)

    per_call(multiply, rounds=5), per_call(launch_once, rounds=5)
    ratios = []
    for _ in range(5):
        multiplied, launched = per_call(multiply), per_call(launch_once)
        ratios.append(launched / multiplied)
    print(f"torch.mul {multiplied:.2f} us, launch {launched:.2f} us, ratios {[round(r, 2) for r in ratios]}")
    record_property("launch_over_mul", statistics.median(ratios))
    assert statistics.median(ratios) <= 1.2
