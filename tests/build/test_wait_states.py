"""Objects of another compiler than the pinned one are checked for missing wait states, or not built."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sample_tree import shell

from mla_suite.build import BuildError, build, compilers, wait_states

CLOSE = "v_mov_b32 v8, 0\\n v_mfma_f32_4x4x4_16b_f16 v[0:3], v[8:9], v[10:11], 0"
MISSING = r"scale_threads-\d+\.s: line \d+: .* 0 wait states behind line \d+: `v_mov_b32 v8, 0`, 2 are required for v8"


@pytest.fixture
def faulty(csrc):
    """The sample tree, whose kernel for gfx942 lacks two wait states."""
    kernel, before = csrc / "gfx942" / "scale.hip", "  for (int64_t base"
    kernel.write_text(kernel.read_text().replace(before, f'  asm volatile("{CLOSE}" ::: "v0", "v8");\n{before}'))
    return csrc


def use(monkeypatch: pytest.MonkeyPatch, *, pinned: bool) -> None:
    found = replace(compilers.packaged(), pinned=pinned)
    monkeypatch.setattr(compilers, "find_amd", lambda *_: found)


def test_a_build_with_another_compiler_fails_with_the_sentence(faulty, tmp_path, monkeypatch):
    use(monkeypatch, pinned=False)
    for _ in range(2):
        with pytest.raises(BuildError, match=MISSING):
            build(["gfx942"], csrc=faulty, out=tmp_path / "out", emulator=False)
        assert not (tmp_path / "out" / "manifest.json").exists()
    build(["gfx950"], csrc=faulty, out=tmp_path / "out", emulator=False)


def test_a_build_with_the_pinned_compiler_runs_no_check(faulty, tmp_path, monkeypatch):
    """CI runs it, so that a user's build needs neither the time nor the program."""
    use(monkeypatch, pinned=True)
    monkeypatch.setattr(wait_states, "CHECKER", tmp_path / "nothing.py")
    build(["gfx942"], csrc=faulty, out=tmp_path / "out", emulator=False)


def test_without_the_checker_only_the_pinned_compiler_serves(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(wait_states, "CHECKER", tmp_path / "nothing.py")
    monkeypatch.setattr(compilers, "_SDK", tmp_path / "sdk")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for program in ("amdclang++", "ld.lld"):
        shell(tmp_path / "sdk/llvm/bin" / program, "echo clang version 29.0.0")
    sentence = r"objects of clang version 29\.0\.0 need a check for missing wait states, .* build in a clone of the"
    with pytest.raises(BuildError, match=sentence):
        compilers.find_amd(tmp_path / "sdk", ["gfx942"])
    assert compilers.find_amd(None, ["gfx942"]) == compilers.packaged()
    said = capsys.readouterr().err
    assert said.startswith("objects of clang version 29.0.0 cannot be checked for missing wait states here: clang ")
    monkeypatch.setattr(compilers, "PINNED_ZIGLANG", "0.1.0")
    with pytest.raises(BuildError, match=f"^objects of {compilers.packaged().version} need a check"):
        compilers.find_amd(None, ["gfx942"])
