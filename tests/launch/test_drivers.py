"""The CUDA and HIP drivers against libraries that record every call they get."""

import ctypes
import dataclasses
import os
import subprocess
import sys
import threading

import pytest
import torch
from stub_drivers import FakeTorch, Stub

from mla_suite import archs as arch
from mla_suite.launch import cuda
from mla_suite.launch.cuda import CudaDriver
from mla_suite.launch.driver import DriverError, LaunchError
from mla_suite.launch.early_launch import early_launch
from mla_suite.launch.hip import HipDriver

NAME = "scale_threads-64"
VALUES = {"in": 0x7F11_2233_4455, "out": 0x7F66_7788_99AA, "scale": 0.25, "count": 1 << 33, "stride": 640}


class Rig:
    """A driver on its stub, with the decoy copy beside it."""

    def __init__(self, kind, driver, stub, decoy, torch, entry, params):
        self.kind, self.driver, self.stub, self.decoy = kind, driver, stub, decoy
        self.torch, self.entry, self.params = torch, entry, params
        self.load_call = "cuModuleLoadData" if kind == "cuda" else "hipModuleLoadData"
        self.bound = {}
        self.launch_call = "cuLaunchKernelEx" if kind == "cuda" else "hipModuleLaunchKernel"

    def use_the_gpu(self):
        """Makes the context current, as torch does on a thread's first CUDA call."""
        if self.kind == "cuda":
            self.stub.library.cuCtxSetCurrent(ctypes.c_void_p(1))

    def launch(self, **changes):
        """Launches as a call of an operator does, whose repetitions share what `bind` prepared."""
        params = changes.pop("params", self.params)
        shape = {"grid": (3, 2, 1), "block": 64, "dynamic_lds": 4096, "overlap": False, **changes}
        key = tuple(shape.values())
        kernel = self.driver.load(self.entry)
        if key not in self.bound:
            self.bound[key] = self.driver.bind(kernel, *key)
        self.bound[key](params, ())

    def launches(self):
        return self.stub.calls(self.launch_call)


@pytest.fixture(params=["cuda", "hip"])
def rig(request, stub_folder, amd_objects):
    # The stubs do not look into an image, so one kernel's object serves for both vendors.
    entry = amd_objects.find("gfx942", NAME)
    if request.param == "cuda":
        entry = dataclasses.replace(entry, arch="sm_90", compiler="nvcc 13.0.88")
    from mla_suite.build import params

    packed = params.load("scale", entry.csrc).pack(**VALUES)
    file = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so"}[request.param]
    stub, decoy = Stub(stub_folder / file), Stub(stub_folder / "decoy" / file)
    for library in (stub, decoy):
        library.reset(len(packed))
    torch = FakeTorch()
    make, name = {"cuda": (CudaDriver, "sm_90"), "hip": (HipDriver, "gfx942")}[request.param]
    driver = make(arch.get(name), 0, stub.library, torch.device())
    made = Rig(request.param, driver, stub, decoy, torch, entry, packed)
    made.use_the_gpu()
    yield made
    assert decoy.calls() == [], "a call went to the other copy of the library"


def test_a_launch_passes_everything(rig):
    rig.launch()
    (call,) = rig.launches()
    assert call.text == f"0x7f0000003000 3,2,1 64,1,1 4096 0x7f0000009000 0 0 {rig.params.hex()}"


def test_a_kernel_is_loaded_once_before_its_first_launch(rig):
    for _ in range(3):
        rig.launch()
    names = [call.function for call in rig.stub.calls()]
    assert names.count(rig.load_call) == 1
    assert names.index(rig.load_call) < names.index(rig.launch_call)
    assert names.count(rig.launch_call) == 3
    assert names[-2:] == [rig.launch_call] * 2, "a warm launch is one call"
    (load,) = rig.stub.calls(rig.load_call)
    assert load.text == "7fELF"
    (function,) = rig.stub.calls(rig.kind[:2].replace("hi", "hip") + "ModuleGetFunction")
    assert function.text == "0x7f0000002000 scale_threads_64"


def test_another_current_device(rig):
    rig.launch()
    rig.torch.current = 3
    rig.torch.guards.clear()
    rig.launch()
    assert rig.torch.guards == [0]
    assert rig.torch.current == 3
    assert len(rig.launches()) == 2


def test_a_driver_error_becomes_an_exception_with_the_drivers_words(rig):
    rig.launch()
    rig.stub.fail(rig.launch_call, 700)
    with pytest.raises(
        DriverError, match=r"ILLEGAL_ADDRESS: an illegal memory access|IllegalAddress: an illegal memory"
    ):
        rig.launch()
    rig.stub.fail(rig.launch_call, 1234)
    with pytest.raises(DriverError, match=r"(CUDA|HIP) error 1234"):
        rig.launch()
    rig.launch()


def test_a_failed_load_is_tried_again(rig):
    rig.stub.fail(rig.load_call, 700)
    with pytest.raises(DriverError, match=f"{rig.load_call}: .*illegal memory access"):
        rig.launch()
    assert rig.launches() == []
    rig.launch()
    assert len(rig.stub.calls(rig.load_call)) == 2


def test_a_first_call_inside_a_capture_loads_in_relaxed_mode(rig):
    rig.stub.capture(True)
    rig.launch()
    modes = [call.text for call in rig.stub.calls() if call.function.endswith("ExchangeStreamCaptureMode")]
    assert modes == ["2", "0"], "relaxed while loading, and back"
    assert len(rig.launches()) == 1


def test_a_driver_that_still_refuses_during_capture_says_warm_up(rig):
    rig.stub.capture(True)
    rig.stub.fail(rig.load_call, 900)
    with pytest.raises(DriverError, match=r"warm up first .* said .*not permitted wh"):
        rig.launch()
    modes = [call.text for call in rig.stub.calls() if call.function.endswith("ExchangeStreamCaptureMode")]
    assert modes == ["2", "0"], "the thread's mode is restored after a failure too"


def test_two_threads(rig):
    """One load between them; each launch has its own parameters and stream, however the threads interleave."""
    rounds = 300
    barrier = threading.Barrier(2)
    streams = threading.local()
    rig.torch.stream = lambda ordinal: streams.value
    failures = []

    def work(number):
        streams.value = 0x7F00_0000_0000 + 0x100 * number
        rig.use_the_gpu()
        barrier.wait()
        try:
            for turn in range(rounds):
                params = number.to_bytes(4, "little") + turn.to_bytes(4, "little") + rig.params[8:]
                rig.launch(params=params, grid=(number, turn + 1, 1))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(rig.stub.calls(rig.load_call)) == 1
    seen = {1: [], 2: []}
    for call in rig.launches():
        _, grid, _, _, stream, _, _, data = call.text.split()
        number, turn = int(grid.split(",")[0]), int(grid.split(",")[1]) - 1
        assert int(stream, 16) == 0x7F00_0000_0000 + 0x100 * number
        assert bytes.fromhex(data) == number.to_bytes(4, "little") + turn.to_bytes(4, "little") + rig.params[8:]
        seen[number].append(turn)
    assert seen == {1: list(range(rounds)), 2: list(range(rounds))}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"params": b"short"}, "5 bytes of parameters, the kernel takes 40"),
        ({"block": 128}, "128 threads per workgroup, the kernel was compiled for 64"),
        ({"block": 32}, "32 threads per workgroup, the kernel was compiled for 64"),
        ({"dynamic_lds": 1 << 20}, "1048576 bytes of dynamic LDS, .* leaves"),
    ],
)
def test_a_launch_that_does_not_fit_is_refused_before_the_driver_sees_it(rig, changes, sentence):
    with pytest.raises(LaunchError, match=sentence):
        rig.launch(**changes)
    assert rig.launches() == []


@pytest.mark.parametrize("rig", ["hip"], indirect=True)
@pytest.mark.parametrize("grid", [(1 << 26, 1, 1), (1, 65536, 1), (1, 1, 65536), (0, 1, 1)])
def test_hip_refuses_grids_that_the_runtime_would_wrap(rig, grid):
    with pytest.raises(LaunchError, match=r"grid .* x 64 threads; a GPU takes .* fewer than 2\^32 threads"):
        rig.launch(grid=grid)
    assert rig.launches() == []
    rig.launch(grid=((1 << 26) - 1, 65535, 65535))
    assert len(rig.launches()) == 1


NO_AMD_GPU = r"no AMD GPU is visible .*rocminfo.*/dev/kfd.*HIP_VISIBLE_DEVICES.*emulate"
NO_WORDS = "HIP error 4242, which this runtime has no words for"


@pytest.mark.parametrize("rig", ["hip"], indirect=True)
@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        ("hipThreadExchangeStreamCaptureMode", 100, NO_AMD_GPU),
        ("hipThreadExchangeStreamCaptureMode", 101, NO_AMD_GPU),
        ("hipModuleLaunchKernel", 999, "hipErrorUnknown: unknown error"),
        ("hipModuleLoadData", 4242, NO_WORDS),
        ("hipModuleLaunchKernel", 4242, NO_WORDS),
    ],
)
def test_an_error_of_hip_says_what_to_do_or_its_name_or_number(rig, call, code, words):
    """The runtime answers hipErrorUnknown for every number that it does not know."""
    rig.stub.fail(call, code)
    with pytest.raises(DriverError, match=words):
        rig.launch()


@pytest.mark.parametrize("rig", ["cuda"], indirect=True)
def test_cuda_opts_in_to_all_of_shared_memory_once(rig):
    rig.launch()
    rig.launch(dynamic_lds=200 << 10)
    (call,) = rig.stub.calls("cuFuncSetAttribute")
    assert call.text == f"0x7f0000003000 8 {(227 << 10) - rig.entry.lds}"


def test_overlap_is_an_attribute_on_cuda_and_nothing_on_hip(rig):
    rig.launch(overlap=True)
    rig.launch()
    assert [call.text.split()[5] for call in rig.launches()] == ["1" if rig.kind == "cuda" else "0", "0"]


@pytest.mark.parametrize("rig", ["cuda"], indirect=True)
def test_early_launch_is_switched_off_where_a_call_runs(rig):
    """Also a compiled one: the block around the call counts, not that around the compilation."""

    @torch.library.custom_op("mla_suite_test::launched", mutates_args=())
    def launched(x: torch.Tensor) -> torch.Tensor:
        rig.launch(overlap=True)
        return x.clone()

    launched.register_fake(torch.empty_like)
    compiled = torch.compile(lambda x: launched(x) + 1, backend="aot_eager", fullgraph=True)
    x = torch.ones(3)
    for call in (launched, compiled):
        for allow in (True, False, True):
            with early_launch(allow):
                call(x)
        call(x)
    with early_launch(False), early_launch(True):
        rig.launch(overlap=True)
    attributes = [call.text.split()[5] for call in rig.launches()]
    assert attributes == ["1", "0", "1", "1"] * 2 + ["1"]


@pytest.mark.parametrize(("value", "allowed"), [("", True), ("0", True), ("1", False)])
def test_a_variable_switches_early_launch_off(value, allowed):
    program = "from mla_suite.launch.early_launch import allowed; print(allowed.get())"
    environment = {**os.environ, "MLA_SUITE_NO_EARLY_LAUNCH": value}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(allowed)


@pytest.mark.parametrize("rig", ["cuda"], indirect=True)
def test_cuda_on_a_thread_without_a_context(rig):
    rig.launch()
    thread = threading.Thread(target=rig.launch)
    thread.start()
    thread.join()
    assert len(rig.launches()) == 3, "one on this thread; on the other one refused and one that ran"
    other = [call.function for call in rig.stub.calls() if call.thread == rig.launches()[-1].thread]
    assert other.count("cuCtxSetCurrent") == 1
    assert other[-1] == "cuLaunchKernelEx"


@pytest.mark.parametrize("rig", ["cuda"], indirect=True)
def test_cuda_pops_the_context_it_pushed(rig):
    rig.stub.fail("cuModuleGetFunction", 700)
    with pytest.raises(DriverError, match="cuModuleGetFunction"):
        rig.launch()
    assert len(rig.stub.calls("cuCtxPushCurrent")) == len(rig.stub.calls("cuCtxPopCurrent")) == 1


def test_more_streams_than_are_remembered(rig, monkeypatch):
    """Each launch has the grid and the stream of its own call, before and after what is kept was dropped."""
    monkeypatch.setattr(cuda, "_MAX_STREAMS", 2)
    calls = [(1 + turn % 5, 0x7F00_0000_0000 + 0x100 * (turn % 3)) for turn in range(30)]
    for blocks, stream in calls:
        rig.torch.stream = lambda ordinal, stream=stream: stream
        rig.launch(grid=(blocks, 1, 1))
    words = [call.text.split() for call in rig.launches()]
    assert [(int(word[1].split(",")[0]), int(word[4], 16)) for word in words] == calls


@pytest.fixture
def old_driver(stub_folder):
    """old_driver(version): a CUDA driver that says it is of this version, as cuDriverGetVersion counts."""
    stub = Stub(stub_folder / "libcuda.so.1")
    stub.reset(0)

    def make(version):
        stub.library.stub_driver_version(version)
        stub.library.cuCtxSetCurrent(ctypes.c_void_p(1))
        return CudaDriver(arch.get("sm_90"), 0, stub.library, FakeTorch().device())

    yield make
    stub.library.stub_driver_version(13000)


@pytest.mark.parametrize(
    ("version", "compiler", "needed"),
    [
        (12080, "nvcc 13.0.88", "13.0 (driver 580)"),
        (12090, "nvcc 13.5.37", "13.0 (driver 580)"),
        (11080, "nvcc 12.4.131", "12.0 (driver 525)"),
        (13020, "nvcc 14.0.1", "14.0"),
    ],
)
def test_a_driver_that_is_too_old_is_refused_in_one_sentence(old_driver, amd_objects, version, compiler, needed):
    entry = dataclasses.replace(amd_objects.find("gfx942", NAME), arch="sm_90", compiler=compiler)
    driver = old_driver(version)
    with pytest.raises(DriverError) as caught:
        driver.load(entry)
    assert str(caught.value) == (
        f"the NVIDIA driver is of CUDA {version // 1000}.{version % 100 // 10}, objects of {compiler} need one of CUDA "
        f"{needed} or newer; update the driver, or name an nvcc of an older CUDA: "
        "`python -m mla_suite build --arch sm_90 --nvcc PATH`"
    )


@pytest.mark.parametrize(
    ("version", "compiler"), [(12000, "nvcc 12.9.86"), (13000, "nvcc 13.5.37"), (13020, "nvcc 12.4.131")]
)
def test_a_driver_loads_objects_of_its_own_and_of_older_releases(old_driver, amd_objects, version, compiler):
    entry = dataclasses.replace(amd_objects.find("gfx942", NAME), arch="sm_90", compiler=compiler)
    assert old_driver(version).load(entry).entry is entry


def test_an_object_that_nvcc_did_not_make(old_driver, amd_objects):
    with pytest.raises(DriverError, match="was made by clang version .*; build it with nvcc"):
        old_driver(13000).load(amd_objects.find("gfx942", NAME))
