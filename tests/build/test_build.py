"""The build: what it leaves, what it rebuilds, and what it says when a source or a compiler is wrong."""

import ctypes
import gzip
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from built import require_objects
from sample_tree import IDS, edit, make, outputs, shell

from mla_suite.build import BuildError, ObjectError, build, compilers, emulator_library, locations, manifest, ninja_plan

ARCHS = ["gfx942", "gfx950"]


def test_a_build_leaves_objects_texts_and_a_manifest(built):
    assert sorted(built.kernels) == sorted((arch, name) for arch in ARCHS for name in IDS)
    assert manifest.read(built.root) == built
    entry = built.find("gfx950", "scale_threads-256")
    assert entry.symbol == "scale_threads_256"
    assert entry.constants == {"THREADS": 256}
    assert entry.sources == ("common/device.hpp", "common/params/scale.hpp", "gfx950/scale.hip")
    assert (entry.threads, entry.lds, entry.spills, entry.scratch, entry.params_size) == (256, 1024, 0, 0, 40)
    assert 0 < entry.registers <= 64
    assert entry.occupancy == 8
    assert entry.loop.count("s_barrier") == 2
    assert (entry.loop.lds_reads, entry.loop.matrix, entry.loop.widest_load) == (1, 0, 4)
    text = entry.read_text()
    assert "csrc/gfx950/scale.hip:5" in text, "the text names its source lines"
    assert b"AMDGPU" in entry.read_object() or entry.read_object()[:4] == b"\x7fELF"
    assert entry.read_object()[18:20] == b"\xe0\x00", "ELF machine 224 is AMDGPU"
    assert {path.stat().st_mode & 0o022 for path in built.root.rglob("*") if path.is_file()} == {0}


def reassembled(entry, folder):
    compiler = compilers.find_amd()
    text, relocatable, linked = folder / "k.s", folder / "k.o", folder / "k.hsaco"
    text.write_text(entry.read_text())
    subprocess.run([*compiler.to_relocatable(entry.arch), str(text), "-o", str(relocatable)], check=True)
    subprocess.run([*compiler.to_object(), str(relocatable), "-o", str(linked)], check=True)
    return linked.read_bytes()


def test_the_text_assembles_to_the_identical_object(built, tmp_path):
    for entry in built.kernels.values():
        assert reassembled(entry, tmp_path) == entry.read_object(), entry.id


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_shipped_text_assembles_to_the_identical_object(tmp_path, every):
    """One instance of each kernel of an arch; a full run takes every one."""
    require_objects()
    entries = [entry for entry in manifest.installed().kernels.values() if entry.text]
    for entry in entries if every else {(entry.arch, entry.kernel): entry for entry in entries}.values():
        assert reassembled(entry, tmp_path) == entry.read_object(), (entry.arch, entry.id)


def test_the_same_bytes_from_any_directory(built, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = build(ARCHS, csrc=make(tmp_path / "another place" / "csrc"), out=Path("out of here"))
    for key, entry in other.kernels.items():
        assert entry.read_object() == built.kernels[key].read_object()
        assert entry.read_text() == built.kernels[key].read_text()
        assert str(tmp_path) not in entry.read_text()
    assert other.to_json() == built.to_json()


def test_only_what_changed_is_rebuilt(csrc, tmp_path):
    out = tmp_path / "objects"
    steps: list[tuple[int, int]] = []
    build(ARCHS, csrc=csrc, out=out, progress=lambda *step: steps.append(step))
    assert len(steps) >= len(ARCHS)
    assert steps == [(number, len(steps)) for number in range(1, len(steps) + 1)]
    every = len(steps)
    steps.clear()
    first = outputs(out)
    build(ARCHS, csrc=csrc, out=out, progress=lambda *step: steps.append(step))
    assert outputs(out) == first
    assert not steps
    edit(csrc / "gfx942" / "scale.hip", "p.scale \\*", "2 * p.scale *")
    build(ARCHS, csrc=csrc, out=out, progress=lambda *step: steps.append(step))
    changed = {path for path, data in outputs(out).items() if first[path] != data}
    assert changed == {path for path in first if "gfx942" in path.parts}
    assert len(steps) == every // 2, "gfx950 compiles nothing"
    second = outputs(out)
    edit(csrc / "common" / "device.hpp", r"static_cast<int>\(__builtin_amdgcn_workitem_id_x\(\)\)", "1")
    build(ARCHS, csrc=csrc, out=out)
    changed = {path for path, data in outputs(out).items() if second[path] != data}
    assert changed == set(first), "a header rebuilds all that include it"


@pytest.mark.parametrize("name", ["gfx942/scale.hip", "common/device.hpp"])
def test_an_edit_counts_whatever_its_time_is(csrc, tmp_path, name):
    """A copy may keep an old time, and a coarse clock gives an edit the time of the object that it is newer than."""
    out, source, steps = tmp_path / "objects", csrc / name, []
    build(["gfx942"], csrc=csrc, out=out)
    first = outputs(out)
    written = source.stat().st_mtime_ns
    source.write_text(source.read_text().replace("__builtin_amdgcn_workitem_id_x()", "1").replace("p.scale *", "2 *"))
    os.utime(source, ns=(written, written))
    build(["gfx942"], csrc=csrc, out=out)
    assert {path for path, data in outputs(out).items() if first[path] != data} == set(first)
    build(["gfx942"], csrc=csrc, out=out, progress=lambda *step: steps.append(step))
    assert not steps


def test_what_compiled_beside_a_failure_is_not_compiled_again(csrc, tmp_path):
    out, steps = tmp_path / "objects", []
    edit(csrc / "gfx950" / "scale.hip", "p.count;", "p.cuont;")
    with pytest.raises(BuildError, match="no member named 'cuont'"):
        build(ARCHS, csrc=csrc, out=out, jobs=len(ARCHS) * len(IDS))  # all begin at once
    ready = sum(path.suffix == ".hsaco" for path in outputs(out))
    assert ready
    edit(csrc / "gfx950" / "scale.hip", "p.cuont;", "p.count;")
    build(ARCHS, csrc=csrc, out=out, progress=lambda *step: steps.append(step))
    assert len(steps) == len(ARCHS) * len(IDS) - ready


def moved(program: str, levels: int, place: Path) -> str:
    """The path of a program through a link to one of its parents, 0 for its own folder."""
    folder = Path(program).parents[levels]
    place.symlink_to(folder, target_is_directory=True)
    return str(place / Path(program).relative_to(folder))


def test_the_same_compiler_elsewhere_rebuilds_nothing(csrc, tmp_path, monkeypatch):
    out, steps = tmp_path / "objects", []
    build(ARCHS, csrc=csrc, out=out)
    first, found = outputs(out), compilers.find_amd()
    clang = moved(found.clang[0], 0, tmp_path / "elsewhere")
    elsewhere = replace(found, clang=(clang, *found.clang[1:]), lld=(clang, *found.lld[1:]))
    monkeypatch.setattr(compilers, "find_amd", lambda *named: elsewhere)
    build(ARCHS, csrc=csrc, out=out, progress=lambda *step: steps.append(step))
    assert (outputs(out), steps) == (first, [])
    other = tmp_path / "another compiler"
    other.write_text(f'#!/bin/sh\nexec {clang} "$@"\n')
    other.chmod(0o755)
    monkeypatch.setattr(compilers, "find_amd", lambda *named: replace(elsewhere, clang=(str(other), "clang")))
    build(ARCHS, csrc=csrc, out=out, progress=lambda *step: steps.append(step))
    assert len(steps) >= len(ARCHS), "another program of the same version compiles"


def test_a_broken_source_shows_the_compilers_words_first(csrc, tmp_path):
    edit(csrc / "gfx942" / "scale.hip", "p.count;", "p.cuont;")
    with pytest.raises(BuildError) as caught:
        build(ARCHS, csrc=csrc, out=tmp_path / "objects")
    first, *_, last = str(caught.value).splitlines()
    assert "scale.hip:5:" in first
    assert "error: no member named 'cuont' in 'mla::ScaleParams'" in first
    assert "gfx942/scale_threads-" in last
    assert not (tmp_path / "objects" / "manifest.json").exists()


def test_warnings_are_shown(csrc, tmp_path, capsys):
    edit(csrc / "gfx942" / "scale.hip", "const int64_t at", "int unused;\n    const int64_t at")
    build(ARCHS, csrc=csrc, out=tmp_path / "objects")
    assert "warning: unused variable 'unused'" in capsys.readouterr().err
    build(ARCHS, csrc=csrc, out=tmp_path / "objects")
    assert capsys.readouterr().err == ""


def test_a_broken_budget_names_both_numbers_and_publishes_nothing(csrc, tmp_path):
    out = tmp_path / "objects"
    before = build(ARCHS, csrc=csrc, out=out).to_json()
    edit(csrc / "gfx942" / "arch.toml", "registers = 64, lds = 1024", "registers = 4, lds = 512, min_load_bytes = 16")
    edit(csrc / "gfx942" / "scale.hip", "p.scale \\*", "2 * p.scale *")
    with pytest.raises(BuildError) as caught:
        build(ARCHS, csrc=csrc, out=out)
    assert re.search(r"gfx942 scale_threads-64: registers is 1\d, at most 4 is allowed", str(caught.value))
    assert "gfx942 scale_threads-256: lds is 1024, at most 512 is allowed" in str(caught.value)
    assert "gfx942 scale_threads-256: min_load_bytes is 4, at least 16 is required" in str(caught.value)
    assert "gfx950" not in str(caught.value)
    assert (out / "manifest.json").read_text() == before
    kept = gzip.decompress((out / "gfx942/scale_threads-64.s.gz").read_bytes())
    assert locations.sha256(kept) in before


def test_spills_are_never_within_budget(csrc, tmp_path):
    path = csrc / "gfx942" / "scale.hip"
    kept = "  float kept[99];\n  for (float& x : kept) x = p.in[p.count++];\n  MLA_SHARED"
    path.write_text(path.read_text().replace("  MLA_SHARED", kept).replace("p.scale *", "kept[p.stride % 99] *"))
    with pytest.raises(BuildError, match=r"scratch is [1-9]\d*, at most 0 is allowed"):
        build(["gfx942"], csrc=csrc, out=tmp_path / "objects")


def test_a_part_of_a_build_keeps_the_rest(csrc, tmp_path):
    out = tmp_path / "objects"
    build(ARCHS, csrc=csrc, out=out)
    edit(csrc / "gfx942" / "arch.toml", "64, 256", "128")
    made = build(["gfx942"], csrc=csrc, out=out)
    assert [name for arch, name in made.kernels if arch == "gfx942"] == ["scale_threads-128"]
    assert {name for arch, name in made.kernels if arch == "gfx950"} == set(IDS)
    assert {path.name for path in (out / "gfx942").iterdir()} == {"scale_threads-128.s.gz", "scale_threads-128.hsaco"}
    assert len(list((out / "gfx950").iterdir())) == 4


def test_a_build_without_fp16(csrc, tmp_path):
    """Kernels of that dtype are not built, and those of an earlier build go."""
    out = tmp_path / "objects"
    edit(csrc / "gfx942" / "arch.toml", "64, 256", '64], DTYPE = ["bf16", "fp16"')
    made = build(["gfx942"], csrc=csrc, out=out)
    assert [name for _, name in made.kernels] == ["scale_threads-64_dtype-bf16", "scale_threads-64_dtype-fp16"]
    made = build(["gfx942"], csrc=csrc, out=out, fp16=False)
    assert [name for _, name in made.kernels] == ["scale_threads-64_dtype-bf16"]
    assert len(list((out / "gfx942").iterdir())) == 2


def test_two_processes_at_once(csrc, tmp_path):
    script = (
        "import sys; from pathlib import Path; from mla_suite.build import build; "
        "print(build(['gfx942', 'gfx950'], csrc=Path(sys.argv[1]), out=Path(sys.argv[2]), jobs=1).to_json())"
    )
    out = tmp_path / "objects"
    command = [sys.executable, "-c", script, str(csrc), str(out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    printed = [racer.communicate()[0].strip() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert printed[0] == printed[1] == (out / "manifest.json").read_text().strip()
    for entry in manifest.read(out, csrc).kernels.values():
        entry.read_object()


def test_a_second_build_says_that_it_waits(tmp_path, capsys):
    with locations.locked(tmp_path):
        second = threading.Thread(target=lambda: locations.locked(tmp_path).__enter__(), daemon=True)
        second.start()
        said = ""
        for _ in range(500):
            said += capsys.readouterr().err
            if said:
                break
            second.join(0.01)
        assert second.is_alive()
    second.join(10)
    assert not second.is_alive()
    assert said == f"waiting for another build in {tmp_path}\n"


def test_a_build_that_is_interrupted_leaves_no_compiler_behind(csrc, tmp_path):
    """The second compiler sleeps until it is ended, and the interrupt comes while it does."""
    zig = Path(compilers.packaged().clang[0])
    first, running = tmp_path / "first", tmp_path / "running"
    sleeps = f'case "$*" in *" -S "*) mkdir {first} 2> /dev/null || {{ echo $$ > {running}; sleep 20; }};; esac'
    shell(tmp_path / "sdk/llvm/bin/amdclang++", f'{sleeps}; exec {zig} clang "$@"')
    shell(tmp_path / "sdk/llvm/bin/ld.lld", f'exec {zig} ld.lld "$@"')

    def interrupt(number, of):
        for _ in range(1000):
            if running.is_file() and running.read_text().strip():
                raise KeyboardInterrupt
            time.sleep(0.01)

    out = tmp_path / "objects"
    with pytest.raises(KeyboardInterrupt):
        build(["gfx942"], csrc=csrc, out=out, rocm=tmp_path / "sdk", jobs=2, progress=interrupt)
    compiler = Path("/proc", running.read_text().strip(), "stat")
    for _ in range(300):
        if not compiler.exists() or compiler.read_text().rpartition(") ")[2].startswith("Z"):
            break
        time.sleep(0.01)
    else:
        pytest.fail("the compiler goes on after the build was interrupted")
    assert not (out / "manifest.json").exists()
    build(["gfx942"], csrc=csrc, out=out).find("gfx942", IDS[0]).read_object()


def test_a_source_edited_while_it_is_compiled(csrc, tmp_path, monkeypatch):
    """The object of the old text does not pass for one of the new."""
    honest = ninja_plan.run

    def edited_meanwhile(*arguments):
        said = honest(*arguments)
        edit(csrc / "gfx942" / "scale.hip", "p.scale \\*", "2 * p.scale *")
        return said

    out, steps = tmp_path / "objects", []
    with monkeypatch.context() as patch:
        patch.setattr(ninja_plan, "run", edited_meanwhile)
        made = build(["gfx942"], csrc=csrc, out=out).find("gfx942", IDS[0])
    with pytest.raises(ObjectError, match=r"was built from other sources than .* now holds; run `python -m mla_suite"):
        made.read_object()
    before = (out / made.object).read_bytes()
    again = build(["gfx942"], csrc=csrc, out=out, progress=lambda *step: steps.append(step))
    assert steps
    assert again.find("gfx942", IDS[0]).read_object() != before


def test_what_is_not_what_was_made_is_made_again(csrc, tmp_path):
    """A crash may leave files that never reached the disk; a copy of everything, elsewhere and later, is up to date."""
    out, steps = tmp_path / "objects", []
    made = build(["gfx942"], csrc=csrc, out=out)
    for name in (f"{IDS[0]}.hsaco", f"{IDS[1]}.s"):
        (out / ".build" / "gfx942" / name).write_bytes(b"")
    assert build(["gfx942"], csrc=csrc, out=out, progress=lambda *step: steps.append(step)) == made
    assert len(steps) == len(IDS)
    steps.clear()
    there = tmp_path / "copy"
    shutil.copytree(csrc, there / "csrc")
    shutil.copytree(out, there / "objects")
    copy = build(["gfx942"], csrc=there / "csrc", out=there / "objects", progress=lambda *step: steps.append(step))
    assert (copy.to_json(), steps) == (made.to_json(), [])


def test_a_ninja_that_cannot_be_run(csrc, tmp_path, monkeypatch):
    (tmp_path / "ninja").write_text("not a program")
    monkeypatch.setattr(ninja_plan, "ninja_program", lambda: str(tmp_path / "ninja"))
    with pytest.raises(BuildError, match=r"^ninja cannot be run: .*Permission denied"):
        build(["gfx942"], csrc=csrc, out=tmp_path / "objects")


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ('source = "scale.hip"', 'source = "gone.hip"', "no source .*gone.hip"),
        ('source = "scale.hip"', 'source = "scale.hip"\nwarp = 3', r"unknown keys \['warp'\]"),
        ("THREADS = \\[64, 256\\]", "THREADS = [64, 64]", "two instances are named scale_threads-64"),
        ("THREADS = \\[64, 256\\]", "threads = [64]", "names are UPPER_CASE"),
        ("THREADS = \\[64, 256\\]", "THREADS = [true]", r"constant THREADS = \[True\]; .*values"),
        ("THREADS = \\[64, 256\\]", 'THREADS = ["64 -fplugin=x"]', "constant THREADS = .*; names are .*values"),
        ("THREADS = \\[64, 256\\]", "THREADS = []", r"constant THREADS = \[\]; .*or a list of such"),
        ("instances =", 'tokens_per_iteration = "KEYS"\ninstances =', "tokens_per_iteration = 'KEYS' is no integer"),
    ],
)
def test_declarations_that_cannot_be_built(csrc, tmp_path, before, after, sentence):
    edit(csrc / "gfx942" / "arch.toml", before, after)
    with pytest.raises(ValueError, match=sentence):
        build(["gfx942"], csrc=csrc, out=tmp_path / "objects")


def test_cubins(sources, tmp_path):
    """Of one size, as nvcc takes a second for each."""
    nvidia = compilers.find_nvidia()
    if nvidia is None:
        pytest.skip("nvcc is not installed")
    elsewhere = make(tmp_path / "elsewhere" / "csrc")
    for csrc in (sources, elsewhere):
        edit(csrc / "sm_90" / "arch.toml", "64, 256", "256")
    made = build(["sm_90"], csrc=sources, out=tmp_path / "objects")
    entry = made.find("sm_90", "scale_threads-256")
    assert (entry.threads, entry.lds, entry.spills, entry.params_size) == (256, 1024, 0, 40)
    assert 0 < entry.registers <= 64
    assert entry.occupancy == 16
    assert entry.compiler.startswith("nvcc 1")
    assert entry.sources == ("common/device.hpp", "common/params/scale.hpp", "sm_90/scale.cu")
    (tmp_path / "objects/.build/sm_90/scale_threads-256.log").unlink()
    assert build(["sm_90"], csrc=sources, out=tmp_path / "objects").find("sm_90", "scale_threads-256") == entry
    again = build(["sm_90"], csrc=elsewhere, out=tmp_path / "others", kernels=["scale"])
    assert [e.object_sha256 for e in again.kernels.values()] == [e.object_sha256 for e in made.kernels.values()]
    steps: list[tuple[int, int]] = []
    link = moved(nvidia.nvcc, 1, tmp_path / "cuda")  # the compiler's own headers lie there, too
    build(["sm_90"], csrc=sources, out=tmp_path / "objects", nvcc=Path(link), progress=lambda *step: steps.append(step))
    assert steps == []
    debug = build(["sm_90"], csrc=sources, out=tmp_path / "objects", debug=True).find("sm_90", "scale_threads-256")
    assert debug.compiler == f"{entry.compiler}, debug", "a debug object says what it is"
    assert build(["sm_90"], csrc=sources, out=tmp_path / "objects").find("sm_90", "scale_threads-256") == entry
    with pytest.raises(ValueError, match=r"debug is for NVIDIA kernels, .*; name sm_90 or leave debug out"):
        build(["gfx942"], csrc=sources, out=tmp_path / "objects", debug=True)
    edit(sources / "sm_90" / "scale.cu", "p.count;", "p.cuont;")
    with pytest.raises(BuildError, match=r'(?s)^.*scale\.cu\(5\): error: class "mla::ScaleParams" has no member'):
        build(["sm_90"], csrc=sources, out=tmp_path / "objects")
    edit(sources / "sm_90" / "scale.cu", "p.cuont;", "p.count;")
    edit(sources / "sm_90" / "scale.cu", r"MLA_KERNEL\(THREADS, 2\)", 'extern "C" __global__')
    with pytest.raises(BuildError, match="sm_90 scale_threads-256: has no launch bound; declare the entry with"):
        build(["sm_90"], csrc=sources, out=tmp_path / "objects")


def test_the_emulators_library(csrc, tmp_path, monkeypatch, capsys):
    (csrc / "emulator").mkdir()
    (csrc / "emulator" / "probe.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) int probe() { return 7; }\n'
    )
    made = build(["gfx942"], csrc=csrc, out=tmp_path / "objects")
    assert ctypes.CDLL(str(made.library("emulator"))).probe() == 7
    assert manifest.read(made.root, csrc).files().count("emulator/emulator.so") == 1
    for broken in (b"\x7fELF of somebody else", b""):  # nothing of it may have reached the disk
        (made.root / "emulator" / "emulator.so").write_bytes(broken)
        with pytest.raises(ObjectError, match="altered or half replaced"):
            made.library("emulator")
        (made.root / ".build" / "emulator" / "emulator.so").write_bytes(broken)
        assert build(["gfx942"], csrc=csrc, out=tmp_path / "objects") == made
        made.library("emulator")
    monkeypatch.setattr(emulator_library.platform, "machine", lambda: "aarch64")
    made = build(csrc=csrc, out=tmp_path / "others", kernels=["scale"])
    assert "the emulator is left out: it runs on x86-64, this machine is aarch64" in capsys.readouterr().err
    assert made.libraries == {}
    assert made.find("gfx942", IDS[0]).read_object()
