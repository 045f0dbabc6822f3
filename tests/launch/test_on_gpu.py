"""The driver on a real GPU that has loaded nothing yet: capture, threads, devices, and scratch in others' graphs.

Numbers, streams and launches that overlap are in tests/gpu, what a call costs the host in test_host_cost.py.
"""

import threading

import pytest
import sample_tree
import torch

from mla_suite import launch
from mla_suite.build import build, compilers, manifest, params
from mla_suite.launch import launcher, scratch
from mla_suite.launch import run as running
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
def scale(objects, monkeypatch):
    """scale(x, out) launches the sample tree's kernel by way of launch.run, with 3 as its factor."""
    monkeypatch.setattr(manifest, "_found", lambda: objects)
    monkeypatch.setattr(launcher, "_drivers", {})
    monkeypatch.setattr(launcher, "_prepared", {})
    csrc = objects.find(*next(iter(objects.kernels))).csrc
    monkeypatch.setattr(running, "load", lambda name: params.load(name, csrc))

    def run(x, out):
        numbers, pointers = dict(scale=3.0, count=x.numel(), stride=64 * 40), {"in": Input(0), "out": Output(0)}
        spec = LaunchSpec(NAME, (40, 1, 1), 64, 0, False, "scale", numbers, pointers)
        running.prepare("scale", CallSpec((spec,)), (out,), (x,))((out,), (x,))
        return out

    return run


def expected(x):
    return x.view(-1, 2).flip(1).reshape(-1) * 3.0


def test_a_first_call_inside_a_capture(scale):
    x, out = torch.randn(6400, device="cuda"), torch.zeros(6400, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale(x, out)
    assert torch.count_nonzero(out) == 0, "captured, not run"
    x.normal_()
    graph.replay()
    assert torch.equal(out, expected(x))


def test_a_thread_that_never_used_the_gpu(scale):
    x, out = torch.randn(6400, device="cuda"), torch.zeros(6400, device="cuda")
    for _ in range(2):
        thread = threading.Thread(target=scale, args=(x, out))
        thread.start()
        thread.join()
        torch.cuda.synchronize()
        assert torch.equal(out, expected(x))
        out.zero_()


def test_another_device_than_the_current(scale):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
    x = torch.randn(6400, device="cuda:1")
    assert torch.equal(scale(x, torch.zeros_like(x)), expected(x))
    y = torch.randn(6400, device="cuda:0")
    assert torch.equal(scale(y, torch.zeros_like(y)), expected(y))


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
