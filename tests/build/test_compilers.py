"""Compilers that are absent, too old or broken, and folders that cannot be written: one sentence, or another way."""

import errno
import json
from pathlib import Path

import pytest
from sample_tree import IDS, edit

from mla_suite.build import BuildError, build, compilers, locations, manifest

pytest.importorskip("ziglang", reason="the ziglang wheel is not installed")
ZIG = Path(compilers.packaged().clang[0])
BEFORE_GFX950 = f'case "$*" in *=gfx950*) echo "unknown target CPU" >&2; exit 1;; esac; exec {ZIG} clang "$@"'


def shell(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


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
    assert "ziglang" not in (tmp_path / "objects/.build/amd.compiler").read_text().replace(str(ZIG), "")
    assert str(ZIG) in (tmp_path / "objects/.build/amd.compiler").read_text()
    build(["gfx942"], csrc=csrc, out=tmp_path / "objects")
    assert capsys.readouterr().err == ""
    assert "amdclang++" in (tmp_path / "objects/.build/amd.compiler").read_text(), "it serves the archs it knows"
    with pytest.raises(BuildError, match="--rocm .* does not know gfx950; name a newer one, or leave these out with"):
        build(["gfx942", "gfx950"], csrc=csrc, out=tmp_path / "objects", rocm=root)
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        BuildError, match="not know gfx950, and there is no ziglang wheel; `pip install ziglang` or name"
    ):
        compilers.find_amd(archs=("gfx950",))


@pytest.mark.parametrize(
    ("script", "why"), [("exit 3", "cannot be run: .*exit status 3"), ("exit 0", "cannot be run: it does not say its")]
)
def test_a_rocm_that_cannot_be_run(rocm, capsys, script, why):
    root = rocm(script)
    assert compilers.find_amd().clang[0] == str(ZIG)
    said = capsys.readouterr().err
    with pytest.raises(BuildError, match=why) as caught:
        compilers.find_amd(root)
    assert said == f"{caught.value}: {compilers.packaged().version} of the ziglang wheel is used\n"


def test_nvcc(tmp_path, monkeypatch, capsys):
    old = shell(tmp_path / "bin/nvcc", "echo 'Cuda compilation tools, release 11.8, V11.8.89'")
    new = shell(tmp_path / "cuda/nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.131'")

    def which(on_path: Path | None, in_cuda: Path | None):
        place = {None: on_path, "/usr/local/cuda/bin": in_cuda}
        monkeypatch.setattr(compilers.shutil, "which", lambda name, path=None: place[path] and str(place[path]))

    which(old, new)
    assert compilers.find_nvidia() == compilers.NvidiaCompiler(str(new), "nvcc 12.4.131"), "an older one is in the way"
    for places in ((old, None), (None, old), (None, None)):
        which(*places)
        assert compilers.find_nvidia() is None
    broken = shell(tmp_path / "broken/nvcc", "exit 1")
    for in_cuda, found in ((new, str(new)), (None, None)):
        which(broken, in_cuda)
        nvidia = compilers.find_nvidia()
        assert (nvidia and nvidia.nvcc) == found
        assert f"the compiler {broken} cannot be run: " in (said := capsys.readouterr().err)
        assert said.endswith("it is passed over\n")


def test_what_no_compiler_makes_stays_while_it_is_up_to_date(csrc, tmp_path, monkeypatch, capsys):
    out = tmp_path / "objects"
    build(["gfx942", "gfx950"], csrc=csrc, out=out)
    table = json.loads((out / "manifest.json").read_text())
    row = next(row for row in table["kernels"] if row["arch"] == "gfx942")
    sources = ("sm_90/scale.cu", "common/device.hpp")
    cubin = {"arch": "sm_90", "object": "sm_90/made elsewhere.cubin", "text": "", "text_sha256": ""}
    cubin |= {"sources": sources, "source_hash": manifest.hash_sources(csrc, sources)}
    table["kernels"].append(row | cubin)
    (out / "manifest.json").write_text(json.dumps(table))
    (out / "sm_90").mkdir()
    (out / cubin["object"]).write_bytes((out / row["object"]).read_bytes())
    monkeypatch.setattr(compilers, "find_nvidia", lambda: None)
    made = build(csrc=csrc, out=out)
    assert "sm_90 is left out: no nvcc of CUDA 12 or newer" in capsys.readouterr().err
    assert made.find("sm_90", row["id"]).read_object()
    assert made == manifest.read(out, csrc)
    edit(csrc / "sm_90" / "scale.cu", "p.scale \\*", "2 * p.scale *")
    made = build(csrc=csrc, out=out)
    assert {arch for arch, _ in made.kernels} == {"gfx942", "gfx950"}
    assert not list((out / "sm_90").iterdir())


def test_a_damaged_manifest_is_made_again(csrc, tmp_path, monkeypatch):
    monkeypatch.setattr(compilers, "find_nvidia", lambda: None)
    before = build(csrc=csrc, out=tmp_path / "objects")
    (tmp_path / "objects/manifest.json").write_text("{")
    assert build(csrc=csrc, out=tmp_path / "objects") == before
    assert {name for _, name in before.kernels} == set(IDS)


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
    assert {path.suffix for path in (out / "gfx942").iterdir()} == {".s", ".hsaco"}
    build(["gfx942"], csrc=csrc, out=out).find("gfx942", IDS[0]).read_object()


def test_a_library_that_never_reached_the_disk(csrc, tmp_path):
    (csrc / "emulator").mkdir()
    (csrc / "emulator" / "probe.cpp").write_text("int probe() { return 7; }\n")
    build(["gfx942"], csrc=csrc, out=tmp_path / "objects")
    kept = tmp_path / "objects/.build/emulator/emulator.so"
    whole = kept.read_bytes()
    kept.write_bytes(b"")
    build(["gfx942"], csrc=csrc, out=tmp_path / "objects")
    assert kept.read_bytes() == whole == (tmp_path / "objects/emulator/emulator.so").read_bytes()
