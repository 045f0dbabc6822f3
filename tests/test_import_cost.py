"""`import mla_suite` adds little to `import torch`: no tracer, a quarter of its time and 40 MB at most."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = """
import sys, time
start = time.process_time()
import torch
torch_seconds = time.process_time() - start
from pathlib import Path
def resident():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024
modules, memory, seconds = set(sys.modules), resident(), time.process_time()
import mla_suite
print((time.process_time() - seconds) / torch_seconds, resident() - memory, *sorted(set(sys.modules) - modules))
"""
HEAVY = ("torch._dynamo", "torch._inductor", "torch.fx", "sympy", "triton", "matplotlib", "rich", "transformers")


@pytest.fixture(scope="module")
def imports():
    """(processor time as a share of torch's, bytes, modules) that the import added, in two fresh processes.

    The first may compile to bytecode.
    """
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MLA_SUITE")}
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", PROGRAM]
        printed = subprocess.run(command, env=clean, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        share, memory, *modules = printed.split()
        found.append((float(share), int(memory), modules))
    return found


def test_importing_it_imports_nothing_heavy(imports):
    for _, _, modules in imports:
        assert not [name for name in modules if name.startswith(HEAVY)]


def test_importing_it_takes_little_time_and_memory(imports):
    assert min(share for share, _, _ in imports) <= 0.25
    assert max(memory for _, memory, _ in imports) <= 40_000_000
