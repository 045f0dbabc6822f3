"""Built objects and recording drivers, for tests of launching."""

from pathlib import Path

import pytest
import sample_tree
import stub_drivers

from mla_suite.build import Manifest, build, compilers


@pytest.fixture(scope="session")
def amd_objects(tmp_path_factory: pytest.TempPathFactory, amd_compiler: compilers.AmdCompiler) -> Manifest:
    """The sample tree, built once for gfx942; not to be altered."""
    root = tmp_path_factory.mktemp("amd_objects")
    return build(["gfx942"], csrc=sample_tree.make(root / "csrc"), out=root / "objects")


@pytest.fixture(scope="session")
def stub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where libcuda.so.1, libamdhip64.so and a decoy copy of each were compiled."""
    return stub_drivers.compile_all(tmp_path_factory.mktemp("stub_drivers"))


@pytest.fixture(autouse=True)
def _no_kernels_to_emulate() -> None:
    """Launches here go to drivers that record them, and need none of the package's kernels."""
