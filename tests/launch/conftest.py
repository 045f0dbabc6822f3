"""Built objects and recording drivers, for tests of launching."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sample_tree
import stub_drivers
from built import require_built
from stub_drivers import FakeTorch, Stub, route

from mla_suite import archs
from mla_suite.build import Manifest, build, compilers
from mla_suite.core import dispatch
from mla_suite.launch.cuda import CudaDriver


@pytest.fixture(scope="session")
def amd_objects(tmp_path_factory: pytest.TempPathFactory, amd_compiler: compilers.AmdCompiler) -> Manifest:
    """The sample tree, built once for gfx942; not to be altered."""
    root = tmp_path_factory.mktemp("amd_objects")
    return build(["gfx942"], csrc=sample_tree.make(root / "csrc"), out=root / "objects")


@pytest.fixture(scope="session")
def stub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where libcuda.so.1, libamdhip64.so and a decoy copy of each were compiled."""
    return stub_drivers.compile_all(tmp_path_factory.mktemp("stub_drivers"))


@pytest.fixture
def h200(stub_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[object, ...], bytes]]]:
    """CPU tensors stand for those of an H200, over a driver that records: (kernel, its launch, parameters) of each."""
    require_built("sm_90", "decode_dtype-bf16_dqk-576_kvsource-tma_clustermode-none")
    record, stub = archs.get("sm_90"), Stub(stub_folder / "libcuda.so.1")
    launches: list[tuple[str, tuple[object, ...], bytes]] = []
    stub.reset(0)
    stub.library.cuCtxSetCurrent(1)
    bind = CudaDriver.bind

    def noting(self, kernel, *how):
        start = bind(self, kernel, *how)
        return lambda params, buffers: launches.append((kernel.entry.id, how[:3], params)) or start(params, buffers)

    monkeypatch.setattr(CudaDriver, "bind", noting)
    route(monkeypatch, lambda: CudaDriver(record, 0, stub.library, FakeTorch().device()))
    token = dispatch.emulated.set(record)
    yield launches
    dispatch.emulated.reset(token)
    dispatch.clear_caches()


@pytest.fixture(autouse=True)
def _no_kernels_to_emulate() -> None:
    """Launches here go to drivers that record them, and need none of the package's kernels."""
