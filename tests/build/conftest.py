"""Source trees of a few small kernels, for tests of the build."""

from pathlib import Path

import pytest
import sample_tree

from mla_suite.build import Manifest, build, compilers


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A source tree that the test may break."""
    return sample_tree.make(tmp_path / "csrc")


@pytest.fixture
def csrc(sources: Path, amd_compiler: compilers.AmdCompiler) -> Path:
    """The same, where AMD kernels can be built."""
    return sources


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, amd_compiler: compilers.AmdCompiler) -> Manifest:
    """The sample tree, built once for both AMD archs; not to be altered."""
    root = tmp_path_factory.mktemp("built")
    return build(["gfx942", "gfx950"], csrc=sample_tree.make(root / "csrc"), out=root / "objects")
