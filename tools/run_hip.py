"""AMD's own HIP runtime with the emulator as its GPU: fetch it, check it, run every operator through it.

The whole: comgr reads every code object, then tests/hip on gfx942 and on gfx950. --quick: comgr, every operator's
samples and a few planted faults. Other arguments are pytest's. --record writes the row of docs/rocm.md. The exit status
is 77, with a sentence, where the packages cannot be had.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import debian_space
import rocm_matrix
from skip import skip
from virtual_hip import user_space

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests" / "hip"
NAME = "hip72"
ARCHS = ("gfx942", "gfx950")
LIMIT_S = 1200
CONCURRENT = 2  # each is a process of little more than one thread
QUICK = ["-k", "test_operators or corrupted or other_arch"]


def main(rest: list[str], quick: bool, record: bool) -> int:
    """`rest`: arguments of pytest."""
    try:
        folder = debian_space.fetch(NAME)
    except debian_space.Unavailable as error:
        return skip(str(error))
    space = [sys.executable, str(HERE / "rocm_space.py"), NAME, *(["--record"] if record else [])]
    with tempfile.TemporaryDirectory() as results, ThreadPoolExecutor(CONCURRENT) as pool:
        tables = {arch: Path(results, f"{arch}.xml") for arch in ARCHS}
        runs = [pool.submit(_run, space, {})]
        for arch, table in tables.items():
            given = {"MLA_SUITE_HIP_ARCH": arch, "MLA_SUITE_HIP_SPACE": str(folder)}
            chosen = [str(TESTS), f"--junitxml={table}", *(QUICK if quick else []), *rest]
            tests = [sys.executable, "-m", "pytest", *chosen]
            runs.append(pool.submit(_run, user_space.command(folder, tests), given))
        statuses = [run.result() for run in runs]
        failed = int(any(statuses))
        counts = [f"{arch}: {_counts(table)}" for arch, table in tables.items()] if record and not failed else []
    if record and not failed:
        what = "every operator's samples, random problems, graphs, streams, threads and planted faults on a virtual GPU"
        rocm_matrix.put("hip", debian_space.named(NAME, folder), f"{what}; {', '.join(counts)}")
    return failed


def _run(command: list[str], variables: dict[str, str]) -> int:
    """Prints what a command said when it has ended, so that those that run beside it do not mix with it."""
    environment = {**os.environ, **variables}
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        print(f"{said}\nstopped: not done after {LIMIT_S} s, of which two idle cores need a few minutes", flush=True)
        return 1
    print(done.stdout, flush=True)
    return done.returncode


def _counts(table: Path) -> str:
    """Tests that passed and that were skipped, of pytest's own result file."""
    (suite,) = ElementTree.parse(table).getroot().iter("testsuite")
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    return f"{total - skipped} tests passed, {skipped} skipped (no kernel for that problem)"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="comgr, every operator's samples and a few planted faults")
    parser.add_argument("--record", action="store_true", help="write the row of docs/rocm.md")
    given, rest = parser.parse_known_args()
    sys.exit(main(rest, **vars(given)))
