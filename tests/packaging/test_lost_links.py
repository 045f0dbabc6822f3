"""A copy whose links became files, as in a zip, is neither installed nor imported without its operators or kernels."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("lost", ["ops", "csrc"])
@pytest.mark.parametrize("left", ["a file", "nothing"])
def test_installing_a_copy_that_lost_a_link_fails_in_one_sentence(tmp_path, lost, left):
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "mla_suite").mkdir()
    for name in ("ops", "csrc"):
        (tmp_path / name).mkdir()
        if name != lost:
            (tmp_path / "mla_suite" / name).symlink_to(f"../{name}")
        elif left == "a file":
            (tmp_path / "mla_suite" / name).write_text(f"../{name}")
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith(f"mla_suite/{lost} is not a link to ../{lost}: this copy lost its links")


def linked(folder, source, *but):
    """Makes a folder of links to all of another one's files but these."""
    folder.mkdir()
    for path in source.iterdir():
        if path.name not in (*but, "__pycache__"):
            (folder / path.name).symlink_to(path)
    return folder


def run(folder, code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True)


@pytest.mark.parametrize("lost", ["ops", "csrc"])
def test_importing_a_copy_that_lost_a_link_fails_in_one_sentence(tmp_path, lost):
    (linked(tmp_path / "mla_suite", ROOT / "mla_suite", lost) / lost).write_text(f"../{lost}")
    done = run(tmp_path, "import mla_suite")
    assert done.returncode != 0
    sentence = done.stderr.splitlines()[-1]
    assert sentence.startswith(f"ImportError: mla_suite/{lost} is not a link to ../{lost}: this copy lost its links")
    assert f"ln -s ../{lost} mla_suite/{lost}" in sentence


def test_sources_are_found_beside_the_package_and_not_beside_a_file_that_it_links_to(tmp_path):
    """A package made of links to another copy's modules compiles its own sources."""
    package = linked(tmp_path / "mla_suite", ROOT / "mla_suite", "core", "csrc")
    linked(package / "core", ROOT / "mla_suite" / "core")
    shutil.copytree(ROOT / "csrc" / "sm_90", tmp_path / "csrc" / "sm_90")
    (package / "csrc").symlink_to("../csrc")
    done = run(tmp_path, "from mla_suite import archs; print(archs.names(), archs.CSRC)")
    assert done.stdout.split(" ", 1) == ["('sm_90',)", f"{package}/csrc\n"], done.stderr


def test_the_links_are_links():
    for name in ("ops", "csrc"):
        assert (ROOT / "mla_suite" / name).is_symlink()
