"""From a tensor to the driver: arch, emulation, objects, and errors that name the operator."""

import threading
from types import SimpleNamespace

import pytest
import torch

from mla_suite import archs as arch
from mla_suite import launch
from mla_suite.build import ObjectError, manifest, params
from mla_suite.launch import launcher
from mla_suite.launch import run as running
from mla_suite.launch.driver import DriverError, Kernel, LaunchError
from mla_suite.launch.run import prepare
from mla_suite.launch.spec import CallSpec, Input, LaunchSpec, Output

NAME = "scale_threads-64"


@pytest.fixture(autouse=True)
def headers(monkeypatch, amd_objects):
    """Parameter headers are those of the sample tree."""
    csrc = amd_objects.find("gfx942", NAME).csrc
    monkeypatch.setattr(running, "load", lambda name: params.load(name, csrc))


class RecordingDriver:
    """Stands for the emulator."""

    name = "emulator"
    checks_buffers = False

    def __init__(self, record):
        self.arch = record
        self.launched = []
        self.error = None

    def load(self, entry):
        return Kernel(entry, None, self.arch)

    def bind(self, kernel, grid, block, dynamic_lds, overlap):
        def start(params, buffers):
            if self.error:
                raise self.error
            self.launched.append((kernel.entry.arch, kernel.entry.id, grid, block, dynamic_lds, params))

        return start


@pytest.fixture
def drivers(monkeypatch, amd_objects):
    """Emulator drivers by arch, as they are made; objects are the sample tree's."""
    made = {}

    def make(index):
        made[index] = RecordingDriver(arch.get(index))
        return made[index]

    monkeypatch.setattr(launcher, "_make_driver", make)
    monkeypatch.setattr(launcher, "_drivers", {})
    monkeypatch.setattr(launcher, "_prepared", {})
    monkeypatch.setattr(launcher, "_environment", lambda: None)
    monkeypatch.setattr(manifest, "_found", lambda: amd_objects)
    monkeypatch.setattr(manifest, "built", manifest.built.__wrapped__)  # without what it remembers of the real objects
    return made


def run(tensor, grid=(1, 1, 1), out=None, **numbers):
    """scale of the sample tree, as an operator would launch it."""
    out = tensor if out is None else out
    numbers = {"scale": 0.5, "count": 2, "stride": 128, **numbers}
    spec = LaunchSpec(NAME, grid, 64, 0, False, "scale", numbers, {"in": Input(0), "out": Output(0)})
    prepare("scale", CallSpec((spec,)), (out,), (tensor,))((out,), (tensor,))


def test_a_cpu_tensor_goes_to_the_emulated_arch(drivers):
    tensor = torch.empty(2)
    with launch.emulate("gfx942"):
        run(tensor, grid=(4, 1, 1))
        run(tensor)
    assert [(arch, name, grid) for arch, name, grid, *_ in drivers["gfx942"].launched] == [
        ("gfx942", NAME, (4, 1, 1)),
        ("gfx942", NAME, (1, 1, 1)),
    ]


def test_a_number_that_does_not_fit_is_refused_in_a_sentence(drivers):
    with (
        launch.emulate("gfx942"),
        pytest.raises(ValueError, match=r"scale: a size of this call exceeds 32 bits .*; ask for fewer splits"),
    ):
        run(torch.empty(2), count=2**63)


def test_without_emulation_a_cpu_tensor_is_refused(drivers):
    with pytest.raises(
        LaunchError, match=r"scale: CPU tensors have no native kernels; name an arch with mla_suite\.em"
    ):
        run(torch.empty(2))
    assert launch.current_arch(torch.empty(2)) is None
    assert drivers == {}


def test_emulation_belongs_to_the_block_and_the_thread(drivers):
    tensor, seen = torch.empty(1), {}
    with launch.emulate("gfx942") as record:
        assert record is arch.get("gfx942")
        with launch.emulate("gfx950"):
            thread = threading.Thread(target=lambda: seen.update(other=launch.current_arch(tensor)))
            thread.start()
            thread.join()
            assert launch.current_arch(tensor).name == "gfx950"
        assert launch.current_arch(tensor).name == "gfx942"
    assert launch.current_arch(tensor) is None
    assert seen == {"other": None}
    with pytest.raises(KeyError), launch.emulate("gfx942"):
        raise KeyError
    assert launch.current_arch(tensor) is None


def test_other_devices_have_no_arch():
    assert launch.current_arch(torch.empty(1, device="meta")) is None


@pytest.mark.parametrize(
    ("hip", "properties", "expected"),
    [
        (None, SimpleNamespace(major=9, minor=0), "sm_90"),
        (None, SimpleNamespace(major=8, minor=9), None),
        (None, SimpleNamespace(major=10, minor=0), None),
        ("7.0", SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4), "gfx942"),
        ("7.0", SimpleNamespace(gcnArchName="gfx950", major=9, minor=5), "gfx950"),
        ("7.0", SimpleNamespace(gcnArchName="gfx1100", major=11, minor=0), None),
    ],
)
def test_the_arch_of_a_gpu(monkeypatch, hip, properties, expected):
    properties.multi_processor_count, properties.clock_rate = 100, 0
    properties.memory_clock_rate, properties.memory_bus_width = 0, 0
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    launcher._gpu_arch.cache_clear()
    tensor = SimpleNamespace(is_cuda=True, get_device=lambda: 5)
    found = launch.current_arch(tensor)
    launcher._gpu_arch.cache_clear()
    assert (found and found.name) == expected


def test_a_gpu_without_native_kernels_is_named(monkeypatch, amd_objects):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(major=8, minor=9))
    monkeypatch.setattr(launcher, "_drivers", {})
    launcher._gpu_arch.cache_clear()
    with pytest.raises(
        LaunchError, match=r"scale: kernel scale_.*: no native kernels for sm_89; they exist for gfx942,"
    ):
        run(SimpleNamespace(get_device=lambda: 0))
    launcher._gpu_arch.cache_clear()


def test_has_kernel(drivers):
    assert launch.has_kernel("gfx942", NAME)
    assert launch.has_kernel(arch.get("gfx942"), NAME)
    assert not launch.has_kernel("gfx942", "scale_threads-32")
    assert not launch.has_kernel("gfx950", NAME), "built for gfx942 only"


def test_nothing_built(monkeypatch, drivers):
    monkeypatch.setattr(manifest, "_found", lambda: "no code objects were built into here; run it")
    assert not launch.has_kernel("gfx942", NAME)
    with pytest.raises(ObjectError, match="no code objects were built"):
        manifest.installed()
    with (
        launch.emulate("gfx942"),
        pytest.raises(LaunchError, match=r"kernel scale_.* on gfx942 cannot be loaded: no code"),
    ):
        run(torch.empty(1))


def test_no_code_object_for_this_arch(drivers):
    with launch.emulate("gfx950"), pytest.raises(LaunchError) as caught:
        run(torch.empty(1))
    assert str(caught.value).startswith("scale: kernel scale_threads-64 on gfx950 cannot be loaded: no code object")
    assert str(caught.value).endswith("run `python -m mla_suite build --arch gfx950`")


def test_an_error_names_operator_kernel_arch_shape_and_cause(drivers):
    with launch.emulate("gfx942"):
        run(torch.empty(1))
        drivers["gfx942"].error = DriverError("hipErrorIllegalAddress: an illegal memory access was encountered")
        with pytest.raises(LaunchError) as caught:
            run(torch.empty(3, 5), grid=(7, 1, 1))
    assert str(caught.value) == (
        "scale: kernel scale_threads-64 on gfx942, grid (7, 1, 1) x 64 threads, 0 bytes of dynamic LDS, "
        "shapes: in (3, 5), out (3, 5): hipErrorIllegalAddress: an illegal memory access was encountered"
    )


def test_two_threads_make_one_driver(drivers, monkeypatch):
    made, make = [], launcher._make_driver
    monkeypatch.setattr(launcher, "_make_driver", lambda index: made.append(index) or make(index))
    barrier = threading.Barrier(4)

    def work():
        with launch.emulate("gfx942"):
            barrier.wait()
            run(torch.empty(1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["gfx942"]
    assert len(drivers["gfx942"].launched) == 4


def test_machine_code_runs_end_to_end(monkeypatch, amd_objects):
    """Manifest -> driver -> emulator: the compiled kernel's numbers, and a sanitizer finding that keeps its type."""
    from mla_suite.emulator import SanitizerError

    monkeypatch.setattr(launcher, "_drivers", {})
    monkeypatch.setattr(launcher, "_prepared", {})
    monkeypatch.setattr(manifest, "_found", lambda: amd_objects)
    x, out = torch.randn(64 * 5), torch.full((64 * 5,), float("nan"))
    with launch.emulate("gfx942"):
        run(x, (2, 1, 1), out, count=x.numel())
        assert torch.equal(out, x.view(-1, 2).flip(1).reshape(-1) * 0.5)
        with pytest.raises(SanitizerError, match="scale_threads"):
            run(x, (2, 1, 1), out, count=x.numel() + 1)
