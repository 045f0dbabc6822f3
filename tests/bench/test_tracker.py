"""pytest-benchmark stores and compares what a meter was given: counts without a GPU, to the last instruction."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import meter
import pytest
from built import require_objects

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed (pip install 'mla_suite[bench]')")

ROOT = Path(__file__).parents[2]
END = "that was a run with status"
SHAPE = "combine-b4-r16-s8-v512"
PLANT = """
from mla_suite.emulator import Emulator

load = Emulator.load_text


def planted(self, text, kernel):
    return load(self, text.replace(f"\\n{kernel}:", f"\\n{kernel}:\\n\\ts_sleep 10", 1), kernel)


Emulator.load_text = planted
"""


@pytest.fixture(scope="module", autouse=True)
def _built():
    require_objects()


# Neither plugin nor rewriting of assertions is needed, and both take seconds to begin.
QUICK = ["-p", "no:hypothesispytest", "-p", "no:anyio", "--assert=plain", "-q"]
COUNTED = [
    *QUICK,
    "benchmarks/bench_operators.py",
    "--set",
    "counted",
    "--arch",
    "gfx942",
    "-k",
    f"{SHAPE} and not time",
]


RUNS = """
import pytest, sys, traceback

for words in {runs}:
    try:
        status = int(pytest.main(words))
    except Exception:  # so pytest-benchmark ends a comparison
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    print({end!r}, status, flush=True)
"""


def benchmarks(*runs: Sequence[str], where: Path) -> list[tuple[int, str]]:
    """The status of each run of pytest, one after the other in one process, and what it said."""
    program = RUNS.format(runs=[list(words) for words in runs], end=END)
    # pytest-benchmark saves nothing in what it takes for a process of pytest-xdist.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    environment["PYTHONPATH"] = f"{where}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        timeout=300, env=environment,
    )  # fmt: skip
    said = re.split(rf"{END} (\d+)\n", done.stdout)
    assert len(said) == 2 * len(runs) + 1, done.stdout
    return [(int(status), text) for text, status in zip(said[::2], said[1::2], strict=False)]


def test_one_planted_instruction_fails_the_comparison(tmp_path):
    """That equal counts pass is what CI's `counts` shows."""
    saved = tmp_path / "counted.json"
    ((status, said),) = benchmarks([*COUNTED, f"--benchmark-json={saved}"], where=tmp_path)
    assert status == 0, said[-2000:]
    run = json.loads(saved.read_text())
    assert {entry["name"] for entry in run["benchmarks"]} == {
        f"test_{what}[gfx942-{SHAPE}]" for what in ("clocks", "instructions", "modelled")
    }
    modelled = next(entry for entry in run["benchmarks"] if entry["name"].startswith("test_modelled"))
    known = r"(launch|memory|matrix)-bound: (held-out median error [0-9.]+ %|unvalidated)"
    assert re.match(f"modelled ns, gfx942, {known}", modelled["group"])
    assert re.search(known, modelled["extra_info"]["modelled"])
    assert set(run["machine_info"]) == {"emulated", "compiler"}
    counts = {entry["group"]: entry["stats"]["median"] for entry in run["benchmarks"]}
    assert counts["instructions"] == int(counts["instructions"]) > 0
    assert run["benchmarks"][0]["extra_info"]["clocks"]["memory"] > 0

    # A wait at the beginning that costs a twentieth of the modelled time, and one instruction. At a limit of 3 % the
    # instruction does not matter, so the first comparison is the one of CI and the second finds the time alone.
    (tmp_path / "waits_longer.py").write_text(PLANT)
    compare = [*COUNTED, f"--benchmark-compare={saved}", "-p", "waits_longer"]
    limits = ("0%", "3%")
    runs = benchmarks(*([*compare, f"--benchmark-compare-fail=median:{limit}"] for limit in limits), where=tmp_path)
    for (status, said), instructions in zip(runs, (True, False), strict=True):
        assert status != 0
        regressed = said.split("Performance has regressed")[1]
        assert f"test_modelled[gfx942-{SHAPE}]" in regressed
        assert (f"test_instructions[gfx942-{SHAPE}]" in regressed) == instructions


def test_what_a_comparison_judges_and_a_set_that_is_unknown(tmp_path):
    """Benchmarks that are not collected are not compared: without a filter, counts and device times are; times of the
    host fail a comparison only when asked to."""
    # The others are programs, whose imports take longer than all else here.
    files = [str(path) for path in (ROOT / "benchmarks").glob("bench_*.py") if "def test_" in path.read_text()]
    collect = [*QUICK, *files, "--set", "counted", "--arch", "gfx942", "--collect-only"]
    collect += ["--benchmark-compare-fail=median:5%"]
    *found, (status, said) = benchmarks(
        collect, [*collect, "--host-times"], [*QUICK, files[0], "--set", "fast"], where=tmp_path
    )
    steady = {"test_clocks", "test_instructions", "test_modelled", "test_device_time"}
    for (_, listed), more in zip(found, (set(), {"test_host_time"}), strict=True):
        names = {line.split("::")[1].split("[")[0] for line in listed.splitlines() if "::" in line}
        assert names - {"test_layer"} == steady | more, listed[-2000:]
        assert ("test_layer" in names) == bool(more)
    assert status == 4
    assert "ERROR: --set fast: there is no such set of shapes; there are quick, " in said
    assert "Traceback" not in said


def test_the_stored_baseline_has_every_kind_of_kernel():
    run = json.loads((ROOT / "benchmarks" / "baselines" / "counted.json").read_text())
    names = {entry["name"] for entry in run["benchmarks"]}
    for arch in ("gfx942", "gfx950"):
        for op in ("decode", "combine", "plan", "append_kv", "sparse_decode"):
            for what in ("instructions", "modelled"):
                assert any(f"{what}[{arch}-{op}-" in name for name in names), (arch, op)
    assert set(run["machine_info"]) == {"emulated", "compiler"}


def test_a_meter_moves_by_what_it_is_given():
    meter.reset()
    meter.add(2.5)
    meter.add(0.0)
    assert meter.meter() == 2.5
    with pytest.raises(ValueError, match="0 or more"):
        meter.add(-1.0)
    meter.reset()
    assert meter.meter() == 0.0
