"""What setup.py does: two variables limit what `pip install .` compiles, and a wheel is of its machine."""

import os
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from mla_suite import build
from mla_suite.build import locations, manifest

setuptools = pytest.importorskip("setuptools", minversion="77", reason="setuptools is too old to build a wheel")
ROOT = Path(__file__).parents[2]


ARCHS = "the archs are gfx942, gfx950, sm_90"


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("MLA_SUITE_ARCHS", "sm_91", f"names sm_91; {ARCHS}"),
        ("MLA_SUITE_ARCHS", "gfx942,hopper", f"names hopper; {ARCHS}"),
        ("MLA_SUITE_ARCHS", "gfx942;sm_90", f"names gfx942;sm_90; {ARCHS}"),
        ("MLA_SUITE_DISABLE_FP16", "yes", "is 'yes'; it takes 1, which leaves out kernels for fp16 caches, or 0"),
    ],
)
def test_a_wrong_value_is_refused_in_one_sentence(variable, value, sentence):
    command = [sys.executable, "setup.py", "--quiet", "egg_info"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {variable: value}, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr == f"{variable} {sentence}\n"


def command_of_setup(monkeypatch, name):
    """The command of this name that setup.py makes in the environment of now."""
    found = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: found.update(given))
    runpy.run_path(str(ROOT / "setup.py"))
    return found["cmdclass"][name](found["distclass"]({"name": "mla_suite"}))


@pytest.mark.parametrize(
    ("machine", "tag"), [("linux-x86_64", "manylinux_2_28_x86_64"), ("linux-aarch64", "linux_aarch64")]
)
def test_a_wheel_is_of_the_machine_that_makes_it(monkeypatch, machine, tag):
    monkeypatch.setattr(sysconfig, "get_platform", lambda: machine)
    command = command_of_setup(monkeypatch, "bdist_wheel")
    command.ensure_finalized()
    assert command.get_tag() == ("py3", "none", tag)


@pytest.mark.parametrize(
    ("named", "archs", "without_fp16", "editable"),
    [
        (None, None, None, False),
        ("", None, "0", True),
        ("sm_90", ["sm_90"], "1", True),
        (" sm_90, gfx942,", ["gfx942", "sm_90"], None, False),
    ],
)
def test_the_named_archs_are_built(monkeypatch, tmp_path, archs_left_out, named, archs, without_fp16, editable):
    """The build is replaced by one that notes what it is asked for, and the wheel carries what the tree holds."""
    for variable, value in (("MLA_SUITE_ARCHS", named), ("MLA_SUITE_DISABLE_FP16", without_fp16)):
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value)
    asked = []
    wanted = set(archs or ["gfx942", "gfx950", "sm_90"])
    lacking = wanted & archs_left_out
    if lacking and not editable:
        pytest.skip(f"no objects of {', '.join(sorted(lacking))} are built here; run `python -m mla_suite build`")
    tree = manifest.read(locations.PACKAGE_OBJECTS)

    def fake(archs, csrc, out, fp16):
        asked.append((archs, out, fp16))
        return tree

    monkeypatch.setattr(build, "build", fake)
    command = command_of_setup(monkeypatch, "build_py")
    command.build_lib = str(tmp_path / "lib")
    command.editable_mode = editable
    gone, other = (
        tmp_path / "lib/mla_suite" / name for name in ("gone.py", "objects/sm_90/of_another_selection.cubin")
    )

    def copy(self):
        """Copies what the tree has, as setuptools does with package data."""
        other.parent.mkdir(parents=True)
        other.touch()

    monkeypatch.setattr(type(command).__base__, "run", copy)
    gone.parent.mkdir(parents=True)
    gone.touch()
    command.run()
    assert asked == [(archs, ROOT / "mla_suite" / "objects", without_fp16 != "1")]
    assert [path.exists() for path in (gone, other)] == [editable] * 2
    if editable:
        return
    carried = manifest.read(tmp_path / "lib/mla_suite/objects")
    assert {arch for arch, _ in carried.kernels} == wanted
    assert carried.kernels == {key: entry for key, entry in tree.kernels.items() if not archs or key[0] in archs}
    assert carried.libraries == tree.libraries
    assert carried.files() == sorted(
        path.relative_to(carried.root).as_posix() for path in carried.root.rglob("*") if path.is_file()
    )
