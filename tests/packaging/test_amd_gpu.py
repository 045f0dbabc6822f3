"""The first run on an AMD GPU: what a machine lacks is one sentence, and a step that failed is the run's failure."""

import re
import subprocess
import sys
from pathlib import Path

import amd_gpu
import pytest

from mla_suite.bench import sets

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(amd_gpu.KERNEL_DRIVER.exists(), reason="this machine has an AMD GPU")
def test_without_a_gpu_it_says_so_and_does_not_pass():
    command = [sys.executable, str(ROOT / "tools" / "amd_gpu.py"), "gfx942"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 77
    assert done.stdout == "skipped: this machine has no AMD GPU (/dev/kfd is missing); run it on one with a gfx942\n"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(probe=(exit status, output), failing=words): a machine with the kernel driver; returns what it ran."""

    def make(probe, failing=()):
        ran = []

        def run(command, **kwargs):
            if "-c" in command:
                return subprocess.CompletedProcess(command, *probe, stderr="")
            ran.append(command)
            return subprocess.CompletedProcess(command, int(any(word in command for word in failing)))

        monkeypatch.setattr(amd_gpu, "KERNEL_DRIVER", tmp_path)
        monkeypatch.setattr(amd_gpu.subprocess, "run", run)
        monkeypatch.setattr(amd_gpu.shutil, "which", lambda program: None)
        return ran

    return make


@pytest.mark.parametrize(
    ("probe", "sentence"),
    [
        ((1, ""), "this Python has no torch"),
        ((0, "2.13.0+cpu - False"), "torch 2.13.0\\+cpu is not a build for ROCm"),
        ((0, "2.9.1+rocm6.4 6.4.43484 False"), "finds no GPU here"),
        ((0, "2.9.1+rocm6.4 6.4.43484 gfx90a"), "finds a gfx90a here; it takes a gfx942"),
    ],
)
def test_the_missing_part_is_named(machine, capsys, probe, sentence):
    assert not machine(probe)
    assert amd_gpu.main("gfx942") == 77
    assert re.match(f"skipped: .*{sentence}", capsys.readouterr().out)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_other_steps_run_when_one_fails(machine, capsys, arch):
    failing = "tools/support.py"
    ran = machine((0, f"2.9.1+rocm6.4 6.4.43484 {arch}"), [failing])
    assert amd_gpu.main(arch) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith("FAILED")] == [f"FAILED with 1: python {failing}"]
    assert sum(line.startswith("ran: ") for line in printed) == len(ran) - 1
    assert printed[-1].startswith("left out, rocprofv3 is not on PATH")


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_every_published_grid_is_measured(arch):
    (step,) = (step for step in amd_gpu.steps(arch) if "--set aiter-3003" in step.command)
    for name in amd_gpu.PUBLISHED_SETS:
        assert sets.named(name)
        assert f"--set {name}" in step.command
    assert "--op" not in step.command
