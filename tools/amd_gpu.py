"""The first run on a machine with an AMD GPU; any other machine gets a sentence and exit status 77.

Each step prints its command and what to expect of it; all run, and the last lines say which failed. torch must be a
ROCm build: the one of this Python, or the requirement that MLA_SUITE_TORCH names (torch==2.9.1+rocm6.4, with
PIP_EXTRA_INDEX_URL pointing at an index that has it).
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from skip import skip

KERNEL_DRIVER = Path("/dev/kfd")
PROBE = """
import torch
print(torch.__version__, torch.version.hip or "-", torch.cuda.is_available() and
      torch.cuda.get_device_properties(0).gcnArchName.split(":")[0])
"""
BENCH = "mla_suite bench --op decode --backend native"
PUBLISHED_SETS = ("aiter-3003", "aiter-3468", "v3.2", "v4", "gpu-mode-2025", "gpu-mode-2025-layer")
PUBLISHED = "mla_suite bench " + " ".join(f"--set {name}" for name in PUBLISHED_SETS)


@dataclass(frozen=True)
class Step:
    """A command, run by this Python unless it begins with a program of its own, and its expected output."""

    command: str
    expected: str
    program: str = "python -m"

    @property
    def shown(self) -> str:
        return f"{self.program} {self.command}"


@dataclass(frozen=True)
class Expected:
    """Expectations of one arch alone. Counts are the emulator's: 128 rows, for each of 2^20 keys."""

    bandwidth: str
    vector: str
    native: str
    own_tests: tuple[Step, ...] = ()


EXPECTED = {
    "gfx942": Expected(
        "3,700 GB/s (70 % of 5.3 TB/s)",
        "80 million per decode: 45 vector and 34 matrix instructions",
        "aiter-3468 and gpu-mode-2025 (triton serves OCP fp8)",
        (
            Step(
                "pytest tests/kernels/test_decode_kernel.py",
                "all pass: the emulator's tests with tensors on the GPU; its counters stay the emulator's",
            ),
        ),
    ),
    "gfx950": Expected(
        "5,600 GB/s (70 % of 8 TB/s)", "38 million per decode: 19 vector and 17 matrix instructions", "every set"
    ),
}


def steps(arch: str) -> list[Step]:
    expected = EXPECTED[arch]
    profiled = f"python -m {BENCH} --set flashmla --shapes b64-h128-q1-kv16384 --rounds 1 --sustained 0 --no-floors"
    counters = "SQ_INSTS_VALU SQ_INSTS_LDS SQ_LDS_BANK_CONFLICT SQ_LDS_IDX_ACTIVE"
    return [
        Step(f"mla_suite build --arch {arch}", f"one line that counts the kernels for {arch}, and no warning"),
        Step("tools/support.py", f"`native` for decode in the column of {arch}", program="python"),
        Step("pytest tests/gpu tests/launch/test_on_gpu.py", "a table in which nothing says FAILED or ERROR"),
        *expected.own_tests,
        Step(
            f"{BENCH} --set flashmla --set mixed-mla --shapes b64-h16-q1-kv16384 b64-h128-q1-kv16384 "
            "b64-h64-q1-kv8192 b256-h16-q1-kv8192",
            f"more than {expected.bandwidth} in every line; less means latency is not hidden",
        ),
        Step(
            PUBLISHED, f"exit status 0, so no result is wrong, and a native line for every shape of {expected.native}"
        ),
        Step(
            f"--pmc {counters} --kernel-include-regex decode_ --output-format csv -d profile -- {profiled}",
            f"SQ_LDS_BANK_CONFLICT below 5 % of SQ_LDS_IDX_ACTIVE, and SQ_INSTS_VALU about {expected.vector} for each "
            "of 2^20 keys",
            program="rocprofv3",
        ),
    ]


def lacking(arch: str) -> str | None:
    """One sentence on what this machine lacks; None when it has that GPU and a torch that sees it."""
    if not KERNEL_DRIVER.exists():
        return f"this machine has no AMD GPU ({KERNEL_DRIVER} is missing); run it on one with a {arch}"
    wanted = os.environ.get("MLA_SUITE_TORCH")
    if wanted and subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", wanted]).returncode:
        return f"{wanted} is on none of this machine's package indexes; set PIP_EXTRA_INDEX_URL to one that has it"
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if probe.returncode:
        return "this Python has no torch; set MLA_SUITE_TORCH to a build for ROCm, for example torch==2.9.1+rocm6.4"
    version, hip, gpu = probe.stdout.split()
    if hip == "-":
        return f"torch {version} is not a build for ROCm; set MLA_SUITE_TORCH to one, for example torch==2.9.1+rocm6.4"
    if gpu != arch:
        return f"torch {version} finds {'no GPU' if gpu == 'False' else f'a {gpu}'} here; it takes a {arch}"
    return None


def main(arch: str) -> int:
    missing = lacking(arch)
    if missing is not None:
        return skip(missing)
    results = []
    for step in steps(arch):
        print(f"\n$ {step.shown}\nexpected: {step.expected}", flush=True)
        words = shlex.split(step.shown)
        if words[0] == "python":
            words[0] = sys.executable
        elif shutil.which(words[0]) is None:
            results.append(f"left out, {words[0]} is not on PATH")
            continue
        code = subprocess.run(words).returncode
        results.append(f"FAILED with {code}" if code else "ran")
    print()
    for step, result in zip(steps(arch), results, strict=True):
        print(f"{result}: {step.shown}")
    return int(any(result.startswith("FAILED") for result in results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", choices=["gfx942", "gfx950"])
    sys.exit(main(**vars(parser.parse_args())))
