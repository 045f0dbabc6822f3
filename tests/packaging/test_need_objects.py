"""Objects are built where they are missing or of another compiler or source, and used where a build would make them."""

import dataclasses
import re
import subprocess
from types import SimpleNamespace

import need_objects
import pytest

from mla_suite.build import ObjectError, compilers, manifest

pytest.importorskip("ziglang", reason="the ziglang wheel is not installed")


@pytest.fixture
def commands(monkeypatch):
    """Notes what would be run."""
    ran = []

    def run(command):
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(need_objects, "subprocess", SimpleNamespace(run=run))
    return ran


@pytest.fixture
def one_kernel(monkeypatch):
    """A tree that declares one kernel, whose objects are installed; returns its entry."""
    item = need_objects.instances("gfx942")[0]
    monkeypatch.setattr(need_objects, "instances", lambda arch: (item,))
    try:
        entry = manifest.installed().find("gfx942", item.id)
    except ObjectError as error:
        pytest.skip(str(error))
    if entry.compiler != compilers.packaged().version:
        pytest.skip(f"the installed objects are of {entry.compiler}")
    return entry


def install(monkeypatch, entry):
    kernels = {(entry.arch, entry.id): entry} if entry else {}
    made = dataclasses.replace(manifest.installed(), kernels=kernels)
    monkeypatch.setattr(manifest, "installed", lambda: made)


def test_objects_that_are_up_to_date_are_used(one_kernel, commands, capsys):
    assert need_objects.main("gfx942") == 0
    assert commands == []
    assert capsys.readouterr().out == "the objects of gfx942 are up to date\n"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (None, "no code object .* for gfx942"),
        ({"compiler": "clang of yesterday"}, "is of clang of yesterday, not of "),
        ({"source_hash": "0"}, "was built from other sources"),
        ({"object_sha256": "0" * 64}, "altered or half replaced"),
        ({"text": "gfx942/none.s.gz"}, "cannot be read"),
    ],
)
def test_objects_that_a_build_would_replace(one_kernel, commands, monkeypatch, capsys, changes, why):
    install(monkeypatch, changes and dataclasses.replace(one_kernel, **changes))
    assert need_objects.main("gfx942") == 0
    assert commands[0][1:] == ["-m", "mla_suite", "build", "--arch", "gfx942"]
    assert re.search(why, capsys.readouterr().out)


def test_a_tree_without_objects(commands, monkeypatch, capsys):
    def nothing():
        raise ObjectError("no code objects were built")

    monkeypatch.setattr(manifest, "installed", nothing)
    assert need_objects.main("gfx942") == 0
    assert capsys.readouterr().out == "building the objects of gfx942: no code objects were built\n"
    assert len(commands) == 1


def test_objects_of_nvcc_count_by_its_version(commands, monkeypatch):
    installed = manifest.installed()
    entries = [entry for (arch, _), entry in installed.kernels.items() if arch == "sm_90"]
    if not entries:
        pytest.skip("no sm_90 objects are built here")
    item = next(item for item in need_objects.instances("sm_90") if item.id == entries[0].id)
    monkeypatch.setattr(need_objects, "instances", lambda arch: (item,))
    for version, up_to_date in ((entries[0].compiler, True), ("nvcc 12.0.1", False)):
        found = compilers.NvidiaCompiler("/elsewhere/nvcc", version)
        monkeypatch.setattr(compilers, "find_nvidia", lambda found=found: found)
        assert (need_objects.lacking(["sm_90"]) == "") == up_to_date
    monkeypatch.setattr(compilers, "find_nvidia", lambda: None)
    assert need_objects.lacking(["sm_90"]) == "no nvcc of CUDA 12 or newer serves here for sm_90"
