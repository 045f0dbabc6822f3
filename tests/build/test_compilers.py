"""Compilers that are absent, too old or broken, and folders that cannot be written: one sentence, or another way."""

import errno
import json
import re
from pathlib import Path

import pytest
from sample_tree import IDS, edit, shell

from mla_suite.build import BuildError, build, compilers, locations, manifest

pytest.importorskip("ziglang", reason="the ziglang wheel is not installed")
ZIG = Path(compilers.packaged().clang[0])
BEFORE_GFX950 = f'case "$*" in *=gfx950*) echo "unknown target CPU" >&2; exit 1;; esac; exec {ZIG} clang "$@"'


@pytest.fixture
def rocm(tmp_path, monkeypatch):
    """Installs a ROCm whose clang is this script; nothing is on PATH."""

    def install(clang: str) -> Path:
        shell(tmp_path / "rocm/llvm/bin/amdclang++", clang)
        shell(tmp_path / "rocm/llvm/bin/ld.lld", f'exec {ZIG} ld.lld "$@"')
        monkeypatch.setattr(compilers.shutil, "which", lambda *a, **k: None)
        monkeypatch.setattr(compilers, "_SDK", tmp_path / "rocm")
        return tmp_path / "rocm"

    return install


def test_a_rocm_that_knows_the_archs_is_used(rocm, capsys):
    root = rocm(f'exec {ZIG} clang "$@"')
    assert compilers.find_amd(archs=("gfx942", "gfx950")).clang == (str(root / "llvm/bin/amdclang++"),)
    assert capsys.readouterr().err == ""


def test_a_rocm_from_before_gfx950(rocm, csrc, tmp_path, capsys, monkeypatch):
    root = rocm(BEFORE_GFX950)
    build(["gfx942", "gfx950"], csrc=csrc, out=tmp_path / "objects")
    said = capsys.readouterr().err
    assert "does not know gfx950: " in said
    assert said.endswith("of the ziglang wheel is used\n")
    steps: list[tuple[int, int]] = []
    build(["gfx942"], csrc=csrc, out=tmp_path / "objects", progress=lambda *step: steps.append(step))
    assert capsys.readouterr().err == ""
    assert steps, "it serves the archs it knows, and is another program"
    with pytest.raises(BuildError, match="--rocm .* does not know gfx950; name a newer one, or leave these out with"):
        build(["gfx942", "gfx950"], csrc=csrc, out=tmp_path / "objects", rocm=root)
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        BuildError, match="not know gfx950, and there is no ziglang wheel; `pip install ziglang` or name"
    ):
        compilers.find_amd(archs=("gfx950",))


def test_a_rocm_whose_llvm_spills_registers_serves_only_who_names_it(rocm, capsys):
    older = 'case "$*" in *--version*) echo "AMD clang version 20.0.0git (roc-7.0.0)";; *)'
    root = rocm(f'{older} exec {ZIG} clang "$@";; esac')
    assert compilers.find_amd(archs=("gfx942", "gfx950")).clang[0] == str(ZIG)
    said = capsys.readouterr().err
    assert said.startswith("AMD clang version 20.0.0git (roc-7.0.0) has an LLVM before 22, which spills registers of ")
    assert said.endswith("of the ziglang wheel is used\n")
    assert compilers.find_amd(root, ("gfx942", "gfx950")).llvm == 20


@pytest.mark.parametrize(
    ("script", "why"), [("exit 3", "cannot be run: .*exit status 3"), ("exit 0", "cannot be run: it does not say its")]
)
def test_a_rocm_that_cannot_be_run(rocm, capsys, script, why):
    root = rocm(script)
    assert compilers.find_amd().clang[0] == str(ZIG)
    said = capsys.readouterr().err
    with pytest.raises(BuildError, match=why) as caught:
        compilers.find_amd(root)
    reason = str(caught.value).removeprefix(f"--rocm {root}: ")
    assert said == f"{reason}: {compilers.packaged().version} of the ziglang wheel is used\n"


def fake_nvcc(path: Path, release: str = "12.4.131", compiles: str = "exit 0") -> Path:
    """An nvcc that says this release; `compiles` is what it does with a source."""
    return shell(path, f'case "$*" in *--version*) echo "release, V{release}";; *) {compiles};; esac')


@pytest.fixture
def nvccs(tmp_path, monkeypatch):
    """Hides this machine's nvccs; returns a function that installs the ones of a test, by place."""

    def install(**places: Path):
        which = {None: places.get("on_path"), "/usr/local/cuda/bin": places.get("in_cuda")}
        monkeypatch.setattr(compilers.shutil, "which", lambda name, path=None: which[path] and str(which[path]))
        monkeypatch.setattr(compilers, "_nvcc_of_wheel", lambda: places.get("wheel"))
        monkeypatch.delenv("CUDA_HOME", raising=False)
        if "home" in places:
            monkeypatch.setenv("CUDA_HOME", str(places["home"]))

    install()
    return install


def test_the_order_in_which_nvccs_are_tried(nvccs, tmp_path):
    made = {name: fake_nvcc(tmp_path / name / "bin/nvcc") for name in ("home", "wheel", "on_path", "in_cuda")}
    places = made | {"home": tmp_path / "home"}
    while made:
        nvccs(**places)
        assert compilers.find_nvidia() == compilers.NvidiaCompiler(str(made.pop(next(iter(made)))), "nvcc 12.4.131")
        places.pop(next(iter(places)))
    nvccs()
    assert compilers.find_nvidia() is None


@pytest.mark.parametrize(
    ("nvcc", "why"),
    [
        (dict(release="11.8.89"), "is of CUDA 11.8.89; sm_90 needs CUDA 12 or newer"),
        (dict(release="of nothing"), "does not say which CUDA release it is of"),
        (
            dict(compiles='echo "gcc: No such file or directory" >&2; echo "nvcc fatal" >&2; exit 1'),
            r"cannot compile here \(gcc: No such file or directory\); it needs a gcc that it accepts, with C\+\+",
        ),
        (None, "cannot be run: "),
    ],
)
def test_an_nvcc_that_cannot_serve(nvccs, tmp_path, capsys, nvcc, why):
    broken = tmp_path / "broken/bin/nvcc"
    good = fake_nvcc(tmp_path / "good/bin/nvcc")
    if nvcc is None:
        shell(broken, "exit 1")
    else:
        fake_nvcc(broken, **nvcc)
    for others, found in (({"in_cuda": good}, str(good)), ({}, None)):
        nvccs(wheel=broken, **others)
        nvidia = compilers.find_nvidia()
        assert (nvidia and nvidia.nvcc) == found
        said = capsys.readouterr().err
        assert re.search(f"{broken} {why}", said)
        assert said.endswith("; this nvcc is passed over\n")
    for name in (broken, broken.parent.parent):
        with pytest.raises(BuildError, match=why):
            compilers.find_nvidia(name)


def test_a_named_nvcc_comes_first(nvccs, tmp_path):
    named = fake_nvcc(tmp_path / "cuda-12.9/bin/nvcc", "12.9.86")
    nvccs(home=fake_nvcc(tmp_path / "home/bin/nvcc").parent.parent, wheel=fake_nvcc(tmp_path / "wheel/bin/nvcc"))
    for name in (named, named.parent.parent):
        assert compilers.find_nvidia(name) == compilers.NvidiaCompiler(str(named), "nvcc 12.9.86")
    with pytest.raises(BuildError, match="^--nvcc .*: there is no nvcc; name a CUDA root or the path of an nvcc$"):
        compilers.find_nvidia(tmp_path)


def test_the_wheels_nvcc_is_found_without_a_module(tmp_path, monkeypatch):
    for folder in ("first", "second"):
        fake_nvcc(tmp_path / folder / "nvidia/cu13/bin/nvcc")
    monkeypatch.setattr(
        compilers.sys, "path", [str(tmp_path / "none"), str(tmp_path / "second"), str(tmp_path / "first")]
    )
    assert compilers._nvcc_of_wheel() == tmp_path / "second/nvidia/cu13/bin/nvcc"
    monkeypatch.setattr(compilers.sys, "path", [str(tmp_path / "none")])
    assert compilers._nvcc_of_wheel() is None


def test_an_object_without_a_compiler_stays_while_it_is_up_to_date(csrc, tmp_path, monkeypatch, capsys):
    out = tmp_path / "objects"
    build(["gfx942", "gfx950"], csrc=csrc, out=out)
    table = json.loads((out / "manifest.json").read_text())
    row = next(row for row in table["kernels"] if row["arch"] == "gfx942")
    sources = ("sm_90/scale.cu", "common/device.hpp")
    cubin = {"arch": "sm_90", "object": "sm_90/made elsewhere.cubin", "text": "", "text_sha256": ""}
    cubin |= {"sources": sources, "source_hash": locations.hash_sources(csrc, sources)}
    table["kernels"].append(row | cubin)
    (out / "manifest.json").write_text(json.dumps(table))
    (out / "sm_90").mkdir()
    (out / cubin["object"]).write_bytes((out / row["object"]).read_bytes())
    monkeypatch.setattr(compilers, "find_nvidia", lambda nvcc: None)
    made = build(csrc=csrc, out=out)
    assert (
        "sm_90 is left out: no nvcc of CUDA 12 or newer serves here; `pip install nvidia-cuda-nvcc`"
        in capsys.readouterr().err
    )
    assert made.find("sm_90", row["id"]).read_object()
    assert made == manifest.read(out, csrc)
    edit(csrc / "sm_90" / "scale.cu", "p.scale \\*", "2 * p.scale *")
    made = build(csrc=csrc, out=out)
    assert {arch for arch, _ in made.kernels} == {"gfx942", "gfx950"}
    assert not list((out / "sm_90").iterdir())


@pytest.mark.parametrize("place", ["file/objects", "/proc/none/objects"])
def test_a_folder_that_cannot_be_made(csrc, tmp_path, place):
    (tmp_path / "file").write_text("")
    out = tmp_path / place
    with pytest.raises(BuildError, match=f"^{out} cannot be written .*; make room there or name another folder with"):
        build(["gfx942"], csrc=csrc, out=out)


def test_a_disk_that_is_full(csrc, tmp_path, monkeypatch):
    out = tmp_path / "objects"
    before = build(["gfx942"], csrc=csrc, out=out).to_json()
    edit(csrc / "gfx942" / "scale.hip", "p.scale \\*", "2 * p.scale *")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(locations.os, "fsync", full)
        with pytest.raises(BuildError, match=f"^{out} cannot be written .No space left on device.; make room there"):
            build(["gfx942"], csrc=csrc, out=out)
    assert (out / "manifest.json").read_text() == before
    assert {path.suffix for path in (out / "gfx942").iterdir()} == {".gz", ".hsaco"}
    build(["gfx942"], csrc=csrc, out=out).find("gfx942", IDS[0]).read_object()
