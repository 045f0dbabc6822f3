"""A copy whose links became files, as in a zip, is not installed without its operators or kernels."""

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


def test_the_links_are_links():
    for name in ("ops", "csrc"):
        assert (ROOT / "mla_suite" / name).is_symlink()
