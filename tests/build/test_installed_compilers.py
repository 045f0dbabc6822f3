"""Builds with the compilers of a machine: Clang and hipcc where they are installed or named, and none at all."""

from pathlib import Path

import pytest
from sample_tree import IDS, make, shell

from mla_suite.build import BuildError, build, compilers


def test_no_amd_compiler(csrc, tmp_path, monkeypatch):
    monkeypatch.setattr(compilers.shutil, "which", lambda *a, **k: None)
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(compilers, "_SDK", tmp_path / "no rocm")
    with pytest.raises(BuildError, match=r"no AMD compiler: .*`pip install ziglang` or name a ROCm with --rocm"):
        build(["gfx942"], csrc=csrc, out=tmp_path / "objects")


def test_no_nvidia_compiler(csrc, tmp_path, monkeypatch):
    monkeypatch.setattr(compilers, "find_nvidia", lambda nvcc: None)
    with pytest.raises(BuildError, match="no nvcc of CUDA 12 or newer serves here; .* or leave sm_90 out"):
        build(["sm_90"], csrc=csrc, out=tmp_path / "objects")
    made = build(csrc=csrc, out=tmp_path / "objects")
    assert {arch for arch, _ in made.kernels} == {"gfx942", "gfx950"}, "unasked, sm_90 is left out"


@pytest.mark.parametrize(
    ("clang", "lld", "named"),
    [
        ("llvm/bin/amdclang++", "llvm/bin/ld.lld", "."),
        ("usr/bin/clang-19", "usr/bin/ld.lld-19", "usr/bin/clang-19"),
    ],
)
def test_an_installed_clang_is_used_in_the_same_steps(built, tmp_path, clang, lld, named):
    zig = Path(compilers.find_amd().clang[0])
    log = tmp_path / "log"
    shell(tmp_path / "sdk" / clang, f'echo "$@" >> {log}; exec {zig} clang "$@"')
    shell(tmp_path / "sdk" / lld, f'echo "$@" >> {log}; exec {zig} ld.lld "$@"')
    made = build(["gfx942"], csrc=make(tmp_path / "csrc"), out=tmp_path / "objects", rocm=tmp_path / "sdk" / named)
    asked = ("--version", "-fsyntax-only")  # about itself
    assert len([line for line in log.read_text().splitlines() if not any(a in line for a in asked)]) == 3 * len(IDS)
    for key, entry in made.kernels.items():
        assert entry.read_object() == built.kernels[key].read_object()


def hipcc(root, clang, lld=True):
    """A hipcc as Debian has it: its clang lies elsewhere, and its hipconfig names the folder, or CUDA's beside one."""
    shell(root / "bin/hipcc", "echo hipcc must not be called; exit 1")
    answer = f'test "$HIP_PLATFORM" = amd && echo {root / "llvm-22/bin"} || echo /usr/local/cuda'
    shell(root / "bin/hipconfig", f'test "$1" = --hipclangpath && {{ {answer}; }}')
    shell(root / "llvm-22/bin/clang++", clang)
    if lld:
        shell(root / "llvm-22/bin/ld.lld", clang.replace("clang", "ld.lld"))
    return root


def test_a_hipcc_serves_through_its_own_clang(built, tmp_path):
    zig = Path(compilers.find_amd().clang[0])
    root = hipcc(tmp_path / "sdk", f'exec {zig} clang "$@"')
    for named in (root, root / "bin/hipcc"):
        assert compilers.find_amd(named, ["gfx942", "gfx950"]).clang == (str(root / "llvm-22/bin/clang++"),)
    made = build(["gfx942"], csrc=make(tmp_path / "csrc"), out=tmp_path / "objects", rocm=root)
    assert made.kernels
    for key, entry in made.kernels.items():
        assert entry.read_object() == built.kernels[key].read_object()


def test_a_hipcc_that_cannot_serve_is_not_passed_over_silently(tmp_path, monkeypatch, capsys):
    zig = Path(compilers.find_amd().clang[0])
    root = hipcc(tmp_path / "sdk", f'exec {zig} clang "$@"', lld=False)
    with pytest.raises(
        BuildError, match=r"--rocm .*: .*hipcc compiles with .*clang\+\+, which has no ld.lld beside it"
    ):
        compilers.find_amd(root)
    on_path = {"hipcc": str(root / "bin/hipcc")}
    monkeypatch.setattr(compilers.shutil, "which", lambda name, **_: on_path.get(name))
    monkeypatch.setattr(compilers, "_SDK", tmp_path / "no rocm")
    assert compilers.find_amd().version == compilers.packaged().version
    assert "which has no ld.lld beside it; install the lld of that LLVM: clang" in capsys.readouterr().err
    (root / "bin/hipconfig").unlink()
    with pytest.raises(BuildError, match="has no hipconfig beside it that names its clang"):
        compilers.find_amd(root)


def test_a_named_rocm_that_is_none(csrc, tmp_path):
    with pytest.raises(BuildError, match=r"--rocm .*: no amdclang"):
        build(["gfx942"], csrc=csrc, out=tmp_path / "objects", rocm=tmp_path)
