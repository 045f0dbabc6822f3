"""The library's build: made once, again when a source changes, and a compiler's own words when it fails."""

import ctypes
import os
from types import SimpleNamespace

import pytest

from mla_suite.build import compilers, emulator_library, manifest
from mla_suite.build.locations import BuildError
from mla_suite.emulator import core
from mla_suite.launch.driver import DriverError


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) int answer() { return 41; }\n'
    )
    return folder


def test_built_once_and_again_when_a_source_changes(tmp_path, sources):
    killed = tmp_path / "out" / ".emulator.12345.so"
    killed.parent.mkdir()
    killed.touch()
    first = emulator_library.build_library(tmp_path / "out", sources)
    assert not killed.exists()
    os.utime(first, ns=(0, 0))  # a file that is made again has a time of its own, however coarse the clock is
    assert ctypes.CDLL(str(first)).answer() == 41
    assert emulator_library.build_library(tmp_path / "out", sources).stat().st_mtime_ns == 0
    (sources / "answer.cpp").write_text((sources / "answer.cpp").read_text().replace("41", "42"))
    second = emulator_library.build_library(tmp_path / "out", sources)
    assert second.stat().st_mtime_ns > 0
    # The loader keeps the first file open under its path, so the new one is loaded from another.
    copy = tmp_path / "copy.so"
    copy.write_bytes(second.read_bytes())
    assert ctypes.CDLL(str(copy)).answer() == 42


@pytest.mark.parametrize(
    "home", ["/dev/null", pytest.param("", marks=pytest.mark.full), pytest.param(None, marks=pytest.mark.full)]
)
def test_no_home_to_write_to(tmp_path, sources, monkeypatch, home):
    for name in ("XDG_CACHE_HOME", "ZIG_GLOBAL_CACHE_DIR", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    assert emulator_library.build_library(tmp_path / "out", sources).is_file()


def test_same_sources_same_bytes(tmp_path, sources):
    one = emulator_library.build_library(tmp_path / "one", sources).read_bytes()
    assert one == emulator_library.build_library(tmp_path / "two", sources).read_bytes()


def test_broken_source(tmp_path, sources):
    (sources / "broken.cpp").write_text("int missing_semicolon() { return 1 }\n")
    with pytest.raises(BuildError, match=r"(?s)^.*broken\.cpp:1:\d+: error: expected ';'.*could not be compiled"):
        emulator_library.build_library(tmp_path / "out", sources)
    assert not (tmp_path / "out" / "emulator.so").exists()


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=r"its C\+\+ compiler is not installed: `pip install ziglang`"):
        emulator_library.build_library(tmp_path / "out")


def test_a_compiler_that_cannot_be_run(tmp_path, monkeypatch):
    (tmp_path / "zig").write_text("not a program")
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: found)
    with pytest.raises(BuildError, match=r"^the compiler .*zig cannot be run: .*Permission denied"):
        emulator_library.build_library(tmp_path / "out")


def test_a_library_that_cannot_be_put_anywhere(monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(core, "_made_from", lambda path: "other sources")
    monkeypatch.setattr(emulator_library, "build_library", full)
    with pytest.raises(DriverError, match=r"library cannot be built \(.*No space left on device: .*\); run"):
        core.load.__wrapped__()


@pytest.fixture
def usual(tmp_path, monkeypatch):
    """The library that was loaded before what a build leaves is looked for in `tmp_path`."""
    library = core.load().path
    monkeypatch.setattr(manifest, "locate", lambda: tmp_path)
    manifest.forget()
    yield library
    manifest.forget()


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("damaged", ["emulator/emulator.so", "manifest.json"])
def test_a_damaged_library_is_named_and_nothing_is_compiled(tmp_path, monkeypatch, damaged):
    """With or without a compiler, which an installed wheel does not have."""
    (tmp_path / "emulator").mkdir()
    built = manifest.Manifest(tmp_path, {}, {"emulator": manifest.Library("emulator/emulator.so", "0" * 64)})
    (tmp_path / "manifest.json").write_text(built.to_json())
    (tmp_path / "emulator" / "emulator.so").touch()
    (tmp_path / damaged).write_bytes(b"of somebody else")
    monkeypatch.setattr(emulator_library, "build_library", lambda folder: pytest.fail("compiles"))
    with pytest.raises(DriverError, match=f"{damaged} .*run `python -m mla_suite build`"):
        core.load.__wrapped__()


@pytest.mark.parametrize("found", [lambda folder: "no code objects", lambda folder: folder], ids=["nothing", "kernels"])
def test_a_library_that_is_not_installed_is_compiled(tmp_path, monkeypatch, usual, found):
    (tmp_path / "manifest.json").write_text(manifest.Manifest(tmp_path, {}, {}).to_json())
    asked = []
    monkeypatch.setattr(manifest, "locate", lambda: found(tmp_path))
    monkeypatch.setattr(emulator_library, "build_library", lambda folder: asked.append(folder) or usual)
    assert core.load.__wrapped__().path == usual
    assert len(asked) == 1


def test_a_library_of_another_version(tmp_path, sources):
    assert core._made_from(emulator_library.build_library(tmp_path / "out", sources)) == ""
    assert core.load().library.emulator_source_hash().decode() == emulator_library.source_hash()


def test_every_instruction_belongs_to_an_arch():
    machine = core.load()
    names = machine.opcodes()
    assert len(names) == len(set(names))
    assert set(machine.opcodes("gfx942")) | set(machine.opcodes("gfx950")) == set(names)
    assert "v_mfma_f32_16x16x8_xf32" not in machine.opcodes("gfx950")
    assert "ds_read_b64_tr_b16" not in machine.opcodes("gfx942")
