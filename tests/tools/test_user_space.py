"""A ROCm user space in a folder: where its HIP runtime lies, and under which loader a program uses it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from virtual_hip import user_space

from mla_suite.launch.driver import DriverError

ROOT = Path(__file__).parents[2]
LIBRARIES = "usr/lib/x86_64-linux-gnu"


def touch(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_an_installed_rocm_is_used_as_it_is(tmp_path):
    library = touch(tmp_path / "lib/libamdhip64.so.7")
    assert user_space.hip_library(tmp_path) == library
    assert user_space.command(tmp_path, ["python", "-V"]) == ["python", "-V"]
    assert user_space.entered(tmp_path), "it has no C library of its own"


def test_unpacked_packages_bring_their_own_loader(tmp_path):
    library = touch(tmp_path / LIBRARIES / "libamdhip64.so.7")
    loader = touch(tmp_path / LIBRARIES / "ld-linux-x86-64.so.2")
    assert user_space.hip_library(tmp_path) == library
    command = user_space.command(tmp_path, ["python", "-V"])
    assert command[0] == str(loader)
    assert command[-2:] == ["python", "-V"]
    assert command[command.index("--library-path") + 1].split(":")[0] == str(loader.parent)
    assert not user_space.entered(tmp_path)
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 00000000 08:01 131 {loader.resolve()}\n")
    assert user_space.entered(tmp_path, maps)


def test_a_folder_without_a_hip_runtime(tmp_path):
    sentence = f"no libamdhip64.so is in {re.escape(str(tmp_path))} .*; name the root of a ROCm, or a folder that"
    with pytest.raises(DriverError, match=sentence):
        user_space.hip_library(tmp_path)
    command = [sys.executable, str(ROOT / "tools" / "emulate_hip.py"), str(tmp_path), "combine"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.match(sentence, done.stderr)
