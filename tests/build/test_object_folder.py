"""The object folder: what a build removes there, and which folders it refuses."""

import os
import subprocess
import sys

import pytest
from sample_tree import IDS, edit, make

from mla_suite.build import BuildError, build


def test_a_build_removes_only_what_builds_made(csrc, tmp_path):
    out = tmp_path / "objects"
    build(["gfx942"], csrc=csrc, out=out)
    ours, theirs = out / "gfx942" / f".{IDS[0]}.hsaco.12345", out / "gfx942" / ".results.csv.12345"
    kept = [theirs, *(out / arch / "results.csv" for arch in ("gfx942", "gfx950", "sm_90"))]
    for path in (ours, *kept):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    edit(csrc / "gfx942" / "arch.toml", "64, 256", "64")
    build(["gfx942"], csrc=csrc, out=out)
    assert all(path.exists() for path in kept)
    assert not ours.exists(), "a write that was killed left it"
    assert sorted(path.name for path in (out / "gfx942").glob("[!.]*")) == [
        "results.csv",
        "scale_threads-64.hsaco",
        "scale_threads-64.s.gz",
    ]


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("csrc", "holds sources"),
        ("csrc/common", "holds sources"),
        ("other clone/csrc", "holds sources"),
        ("mine", "holds gfx950, but no build made it"),
    ],
)
def test_a_folder_of_something_else_is_refused_before_anything_is_written(sources, tmp_path, place, sentence):
    make(tmp_path / "other clone" / "csrc")
    (tmp_path / "mine" / "gfx950").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BuildError, match=f"{place} {sentence}; name another folder with --out"):
        build(["gfx942"], csrc=sources, out=tmp_path / place)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_build_that_is_killed_keeps_what_it_has_made(csrc, tmp_path):
    script = (
        "import os, sys; from pathlib import Path; from mla_suite.build import build; "
        "build(['gfx942'], csrc=Path(sys.argv[1]), out=Path(sys.argv[2]), jobs=1, "
        "progress=lambda number, of: number == of and os.killpg(0, 9))"
    )
    out, steps = tmp_path / "objects", []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(csrc), str(out)]
    assert subprocess.run(command, env=environment, start_new_session=True).returncode == -9
    build(["gfx942"], csrc=csrc, out=out, progress=lambda *step: steps.append(step))
    assert steps == [(1, 1)]
