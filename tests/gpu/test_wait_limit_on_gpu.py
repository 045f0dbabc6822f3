"""A streaming combine whose decode never comes ends in a trap; one that only waits for its turn does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("sm_90_decode")
HERE = Path(__file__).parent
WITHOUT_DECODE = """
import torch
import mla_suite
from mla_suite.core import dispatch
from mla_suite.launch import run, scratch
from mla_suite.ops.decode.samples import decode_sample

def without_decode(op, call, outputs, tensors):
    assert "streaming" in call.launches[1].kernel
    return run.prepare(op, call._replace(launches=call.launches[1:]), outputs, tensors)

dispatch.launcher = without_decode
scratch.take(torch.device("cuda"), 1 << 20).view(torch.int32).fill_(-1)  # the sentinel, which decode would store
args, kwargs = decode_sample((700,), heads=16, num_splits=8).make(torch.device("cuda"))
torch.ops.mla_suite.decode(*args, **kwargs)
torch.cuda.synchronize()
"""


def run_with_limit(*command):
    environment = {**os.environ, "MLA_SUITE_WAIT_SECONDS": "1"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120, env=environment)


def test_a_wait_for_what_never_comes_is_a_trap_with_a_message():
    done = run_with_limit("-c", WITHOUT_DECODE)
    assert done.returncode != 0
    assert "decode has stored the log-sum-exp of a partial" in done.stderr
    assert "device-side assert" in done.stderr


def test_time_slices_of_another_process_are_no_wait():
    done = run_with_limit(str(HERE / "soak_streaming.py"), "--cases", "quick", "--calls", "50000")
    assert done.returncode == 0, done.stdout + done.stderr
