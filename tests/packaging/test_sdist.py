"""An sdist has the kernels' sources as folders of the package, no objects, and compiles what a clone compiles."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sample_tree

pytest.importorskip("setuptools", minversion="77", reason="setuptools is too old to build an sdist")
ROOT = Path(__file__).parents[2]
STUB = """\
class BuildError(Exception):
    pass


ObjectError = BuildError


def build(archs, csrc, out, fp16):
    raise BuildError(f"asked for {archs} of {sorted(path.parent.name for path in csrc.glob('*/arch.toml'))}")
"""
"""mla_suite/build.py of a copy: a build that says what it is asked for."""


def setup(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "--quiet", *words]
    inherited = {name: value for name, value in os.environ.items() if name not in ("MLA_SUITE_ARCHS", "PYTHONPATH")}
    return subprocess.run(command, cwd=folder, env=inherited | environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The unpacked sdist of a small clone in which objects were built, and of which an earlier sdist listed them."""
    clone, unpacked = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("unpacked")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    package, operators = clone / "mla_suite", clone / "ops"
    for folder in (package / "objects" / "gfx942", operators, clone / "mla_suite.egg-info"):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0.1.0"\n')
    (package / "build.py").write_text(STUB)
    (operators / "__init__.py").touch()
    sample_tree.make(clone / "csrc")
    for name in ("ops", "csrc"):
        (package / name).symlink_to(f"../{name}")
    objects = [package / "objects" / name for name in ("manifest.json", "gfx942/scale.hsaco")]
    for path in objects:
        path.touch()
    listed = "".join(f"{path.relative_to(clone)}\n" for path in objects)
    (clone / "mla_suite.egg-info" / "SOURCES.txt").write_text(listed)
    done = setup(clone, "sdist", "--dist-dir", "made")
    assert done.returncode == 0, done.stderr
    (archive,) = (clone / "made").iterdir()
    shutil.unpack_archive(archive, unpacked)
    (root,) = unpacked.iterdir()
    return root


def test_it_carries_sources_and_no_objects(sdist):
    assert (sdist / "mla_suite" / "csrc" / "gfx942" / "scale.hip").is_file()
    assert not (sdist / "csrc").exists()
    assert not (sdist / "mla_suite" / "objects").exists()


@pytest.mark.parametrize(("named", "archs"), [("", "None"), ("sm_90", "['sm_90']")])
def test_it_compiles_what_a_clone_compiles(sdist, named, archs):
    done = setup(sdist, "build_py", MLA_SUITE_ARCHS=named)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == f"asked for {archs} of ['gfx942', 'gfx950', 'sm_90']"


def test_without_sources_there_is_no_wheel(sdist, tmp_path):
    copy = shutil.copytree(sdist, tmp_path / "copy")
    for path in (copy / "mla_suite" / "csrc").glob("*/arch.toml"):
        path.unlink()
    for named in ("", "sm_90"):
        done = setup(copy, "build_py", MLA_SUITE_ARCHS=named)
        assert done.returncode != 0
        (sentence,) = done.stderr.splitlines()
        assert sentence.startswith("mla_suite/csrc has no arch: this copy lost the kernels' sources")
