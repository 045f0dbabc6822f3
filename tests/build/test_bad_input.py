"""Every damaged, stale, foreign or absent file is refused in one sentence that says what to do."""

import gzip
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sample_tree import IDS, edit

from mla_suite.__main__ import main
from mla_suite.build import BuildError, ObjectError, build, locations, manifest
from mla_suite.cli import kernels as kernels_command

NAME = "scale_threads-64"


@pytest.fixture
def objects(built, tmp_path):
    """A copy that the test may damage."""
    return shutil.copytree(built.root, tmp_path / "objects", ignore=shutil.ignore_patterns(".build"))


@contextmanager
def refused(sentence, error=ObjectError):
    """What is done inside is refused in one line that says what to do."""
    with pytest.raises(error, match=sentence) as caught:
        yield
    text = str(caught.value)
    assert "\n" not in text
    assert "run `python -m mla_suite build" in text or "make it private" in text


def with_bytes(change):
    """The damage of a file that changes its bytes."""
    return lambda path: path.write_bytes(change(path.read_bytes()))


def altered(packed: bytes) -> bytes:
    return gzip.compress(gzip.decompress(packed).replace(b"v_mul_f32", b"v_add_f32", 1))


def linked(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def folder_in_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


OTHER = "has sha256 .*its manifest says .*altered or half replaced"
NO_GZIP = "is not a whole gzip file"
DAMAGED = {
    "an object with another bit": ("hsaco", with_bytes(lambda data: data[:-100] + b"?" + data[-99:]), OTHER),
    "no object": ("hsaco", Path.unlink, r"cannot be read \(No such file"),
    "a link in the place of an object": ("hsaco", linked, "cannot be read"),
    "a folder in the place of an object": ("hsaco", folder_in_place, r"cannot be read \(Is a directory"),
    "an object that others may write": ("hsaco", lambda path: path.chmod(0o666), "may be written by others .*0666"),
    "another text": ("s.gz", with_bytes(altered), OTHER),
    "a text of too many bytes": ("s.gz", with_bytes(lambda packed: gzip.compress(bytes(65 << 20))), NO_GZIP),
    "a text cut off": ("s.gz", with_bytes(lambda packed: packed[:-9]), f"{NO_GZIP}; it was altered or truncated"),
    "a text with a hole": ("s.gz", with_bytes(lambda packed: packed[:20] + bytes(40) + packed[60:]), NO_GZIP),
    "a text that is not packed": ("s.gz", with_bytes(gzip.decompress), NO_GZIP),
}
"""Of a kernel: which file, what is done to it, and what is said."""


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_and_no_other(objects, name):
    suffix, damage, sentence = DAMAGED[name]
    damage(objects / "gfx942" / f"{NAME}.{suffix}")
    entry = manifest.read(objects, objects / "no csrc").find("gfx942", NAME)
    reads = {"hsaco": entry.read_object, "s.gz": entry.read_text}
    with refused(sentence):
        reads.pop(suffix)()
    for read in reads.values():
        read()


def test_edited_sources(csrc, tmp_path):
    entry = build(["gfx942"], csrc=csrc, out=tmp_path / "objects").find("gfx942", NAME)
    entry.read_object()
    edit(csrc / "gfx942" / "scale.hip", "p.scale \\*", "2 * p.scale *")
    for read in (entry.read_object, entry.read_text):
        with refused("was built from other sources than .*csrc now holds"):
            read()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda text: text[: len(text) // 2], "manifest.json is damaged"),
        (lambda text: "[]", "manifest.json is damaged"),
        (lambda text: text.replace('"schema": 2', '"schema": 1'), "has schema 1, this version reads 2"),
        (lambda text: text.replace('"symbol"', '"name"', 1), r"fields \['name', 'symbol'\] are missing or unknown"),
        (lambda text: text.replace('"threads": 64', '"threads": "64"', 1), "threads is '64'"),
        (lambda text: text.replace('"object": "gfx942', '"object": "../gfx942', 1), "outside its folder"),
        (lambda text: text.replace('"text": "gfx942', '"text": "/gfx942', 1), "outside its folder"),
    ],
)
def test_a_damaged_manifest(objects, damage, sentence):
    path = objects / "manifest.json"
    path.write_text(damage(path.read_text()))
    with refused(sentence):
        manifest.read(objects)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (with_bytes(lambda data: data[:30] + b"\x80" + data[31:]), "manifest.json is damaged .*can't decode byte 0x80"),
        (with_bytes(lambda data: b"[" * 100_000), "manifest.json is damaged .*recursion"),
        (folder_in_place, r"manifest.json cannot be read \(Is a directory\)"),
    ],
    ids=["bytes that are no text", "deep lists", "a folder"],
)
def test_a_manifest_that_is_none(csrc, tmp_path, damage, sentence):
    """A part of a build would lose the rest, and refuses; a complete build starts anew."""
    out = tmp_path / "objects"
    shutil.rmtree(csrc / "gfx950")
    shutil.rmtree(csrc / "sm_90")
    made = build(csrc=csrc, out=out)
    damage(out / "manifest.json")
    with refused(sentence):
        manifest.read(out)
    with refused(sentence):
        build(["gfx942"], csrc=csrc, out=out)
    assert build(csrc=csrc, out=out) == made == manifest.read(out, csrc)


def test_a_kernel_that_was_not_built(built):
    with pytest.raises(ObjectError, match=r"no code object scale_threads-32 for gfx942 in .* 2 kernels for gfx942"):
        built.find("gfx942", "scale_threads-32")
    with pytest.raises(ObjectError, match=r"no code object .* objects for gfx942, gfx950\); run .*--arch sm_90`"):
        built.find("sm_90", NAME)
    with pytest.raises(ObjectError, match="no emulator library in"):
        built.library("emulator")


@pytest.mark.parametrize(("name", "mode"), [("manifest.json", 0o666), (".", 0o777)])
def test_a_manifest_or_a_folder_that_others_may_write(objects, name, mode):
    (objects / name).chmod(mode)
    with refused(f"may be written by others .*mode 0{mode:o}"):
        manifest.read(objects)


def test_write_access_of_our_own_group_is_accepted(objects):
    (objects / "manifest.json").chmod(0o664)
    manifest.read(objects)
    if os.geteuid() == 0:
        os.chown(objects / "manifest.json", 0, 12345)
        with pytest.raises(ObjectError, match="may be written by others"):
            manifest.read(objects)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file belong to somebody else")
def test_a_file_that_belongs_to_somebody_else(objects):
    os.chown(objects / "manifest.json", 12345, 12345)
    with refused("belongs to user 12345"):
        manifest.read(objects)


@pytest.fixture
def read_only_package(tmp_path, monkeypatch):
    """A package folder that cannot be written, also for root, and a private cache."""
    package = tmp_path / "package" / "objects"
    package.parent.mkdir()
    honest = os.access
    monkeypatch.setattr(locations.os, "access", lambda path, mode: path != package.parent and honest(path, mode))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return package


def test_a_read_only_install_builds_into_a_private_cache(read_only_package, csrc):
    out = locations.writable_objects(csrc, read_only_package)
    assert out == locations.cache_root() / locations.tree_hash(csrc)
    assert [part.stat().st_mode & 0o777 for part in (out, out.parent)] == [0o700, 0o700]
    assert isinstance(manifest.locate(csrc, read_only_package), str)
    build(["gfx942"], csrc=csrc, out=out)
    assert manifest.locate(csrc, read_only_package) == out
    edit(csrc / "gfx942" / "scale.hip", "p.scale \\*", "2 * p.scale *")
    sentence = manifest.locate(csrc, read_only_package)
    assert "no code objects were built into" in sentence, "a cache of other sources is not this package's"


@pytest.mark.parametrize("which", ["cache", "cache/mla_suite", "hash"])
def test_a_cache_that_others_may_write(read_only_package, csrc, tmp_path, which):
    out = locations.writable_objects(csrc, read_only_package)
    build(["gfx942"], csrc=csrc, out=out)
    folder = out if which == "hash" else tmp_path / which
    folder.chmod(0o775)
    with refused(r"may be written by others \(mode 0775\)"):
        manifest.locate(csrc, read_only_package)
    with pytest.raises(BuildError, match="may be written by others"):
        locations.writable_objects(csrc, read_only_package)


def test_a_relative_cache_home_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locations.cache_root() == tmp_path / ".cache" / "mla_suite"


@pytest.mark.parametrize(
    ("home", "sentence"),
    [
        ("", "this user has no home; set XDG_CACHE_HOME"),
        ("/proc/none", "cannot be written, nor can the cache be written .*; set XDG_CACHE_HOME"),
    ],
    ids=["no home", "no folder"],
)
def test_a_cache_that_cannot_be_made(read_only_package, csrc, monkeypatch, home, sentence):
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.setattr(locations.os.path, "expanduser", lambda path: path)
    assert "no code objects were built into" in manifest.locate(csrc, read_only_package)
    with pytest.raises(BuildError, match=sentence):
        locations.writable_objects(csrc, read_only_package)


def test_import_survives_everything(tmp_path):
    """No compiler, no objects, a wrong MLA_SUITE_EMULATE, no cache: importing is not the moment to say so."""
    code = (
        "import mla_suite.build, mla_suite.launch, mla_suite.launch.cuda, mla_suite.launch.hip\n"
        "import torch\n"
        "try:\n    mla_suite.launch.current_arch(torch.empty(1))\n"
        "except ValueError as error:\n    print(error)\n"
    )
    environment = {"PATH": "", "HOME": "/proc/none", "MLA_SUITE_EMULATE": "gfx000", "XDG_CACHE_HOME": "/proc/none"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "MLA_SUITE_EMULATE=gfx000: unknown arch 'gfx000': known are gfx942, gfx950, sm_90"


def test_the_table_of_kernels(built, capsys, objects):
    def table(*words: str, of: Path = built.root) -> tuple[int, str, str]:
        code = main(["kernels", "--objects", str(of), *words])
        return code, *capsys.readouterr()

    code, printed, _ = table("--arch", "gfx950")
    assert (code, NAME in printed, "gfx950: " in printed, "gfx942" in printed) == (0, True, True, False)
    code, printed, _ = table("--kernel", "scale_threads_64")  # its symbol
    assert (code, NAME in printed, IDS[1] in printed) == (0, True, False)
    (objects / "manifest.json").write_text("{")
    for words, where, sentence in (
        (["--arch", "gfx90a"], built.root, "nothing that was built is for gfx90a; .* holds kernels of gfx942"),
        (["--kernel", NAME + "x"], built.root, rf"has {NAME + 'x'!r} in its name; near it are .*{NAME}"),
        ([], objects, "is damaged"),
    ):
        code, _, error = table(*words, of=where)
        assert code > 0
        assert re.search(sentence, error)


def test_kernels_of_tuned_rows_are_shown_with_their_folder(built, capsys, monkeypatch):
    other = replace(built.find("gfx950", IDS[1]), id="tuned_threads-512", root=Path("/cache/tuned"))
    both = replace(built, kernels={**built.kernels, ("gfx950", other.id): other})
    monkeypatch.setattr(kernels_command, "installed", lambda: both)
    assert main(["kernels", "--arch", "gfx950"]) == 0
    tables = capsys.readouterr().out.split("LDS: static")[:-1]
    shown = {"/cache/tuned" in table: [key in table for key in (*IDS, other.id)] for table in tables}
    assert shown == {True: [False, False, True], False: [True, True, False]}


@pytest.mark.parametrize(("option", "arch"), [("--nvcc", "gfx942"), ("--rocm", "sm_90")])
def test_a_compiler_that_is_named_is_there_even_where_nothing_needs_it(option, arch, capsys, tmp_path):
    words = [option, str(tmp_path / "none"), "--arch", arch, "--kernel", "plan", "--out", str(tmp_path / "out")]
    assert main(["build", *words]) == 1
    assert capsys.readouterr().err.startswith(f"{option} {tmp_path / 'none'}: ")
