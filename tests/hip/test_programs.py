"""Whole programs in a ROCm user space: the command line, and how a process with a virtual GPU ends."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ARCH, SPACE
from virtual_hip import user_space

LIMIT_S = 240
HERE = Path(__file__).parent
TOOLS = HERE.parents[1] / "tools"

LAUNCHES = f"""
import sys
sys.path[:0] = [{str(HERE)!r}, {str(TOOLS)!r}]
from conftest import Chosen
from launches import Placed, recorded
from mla_suite import archs
from mla_suite.emulator import EmulatorDriver
from virtual_hip.hip_session import HipSession
from virtual_hip.user_space import hip_library
from mla_suite.launch import launcher
from pathlib import Path
record = archs.get({ARCH!r})
session = HipSession(record, hip_library(Path({SPACE!r})))
launcher.install(Chosen(session, EmulatorDriver(record)))
made = Placed(session, recorded(session))
for _ in range(50):
    made.start()
"""


def run(*program):
    command = user_space.command(Path(SPACE), [sys.executable, *program])
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=dict(os.environ))


@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("raise ValueError('of the program')", 1)])
def test_a_program_ends_cleanly_while_launches_are_queued(end, status):
    """No crash and no waiting: the status is the program's own, and one line says what was not executed."""
    done = run("-c", LAUNCHES + end)
    assert done.returncode == status, done.stderr
    (skipped,) = re.findall(r"virtual GPU: the program ended with (\d+) launches queued", done.stderr)
    assert 1 <= int(skipped) <= 50
    assert "found nobody" not in done.stderr
    assert ("ValueError: of the program" in done.stderr) == (status == 1)
    assert "never checked" not in done.stderr


def test_what_no_program_checked_is_said_at_its_end():
    """A dispatch that was refused, by a program that never asks."""
    done = run("-c", LAUNCHES + "made.start(dynamic_lds=1024)\nsession.runtime.synchronize(session.stream())")
    assert done.returncode == 0, done.stderr
    assert "virtual GPU: never checked: " in done.stderr
    assert "bytes of LDS; the kernel takes" in done.stderr


def test_the_program_runs_a_problem_through_hip():
    """In a process of its own, which starts itself again with the user space's libraries."""
    command = [sys.executable, str(TOOLS / "emulate_hip.py"), SPACE, "decode", "--on", ARCH, "--json"]
    command += ["--heads", "8", "--kv", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["wrong"] == ""
    assert record["launches"]
    assert [launch["findings"] for launch in record["launches"]] == [[]] * len(record["launches"])
