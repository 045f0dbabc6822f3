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

from mla_suite.build import manifest

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed (pip install 'mla_suite[bench]')")

ROOT = Path(__file__).parents[2]
SHAPE = "combine-b4-r16-s8-v512"
PLANT = """
from mla_suite.emulator import Emulator

load = Emulator.load_text


def planted(self, text, kernel):
    return load(self, text.replace(f"\\n{kernel}:", f"\\n{kernel}:\\n\\tPLANTED", 1), kernel)


Emulator.load_text = planted
"""


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if isinstance(manifest.locate(), str):
        pytest.skip("the package's own kernels are not built: run `python -m mla_suite build`")


def benchmarks(
    *arguments: str,
    where: Path,
    files: Sequence[str] = ("benchmarks/bench_operators.py",),
    chosen: str = f"{SHAPE} and not time",
) -> subprocess.CompletedProcess[str]:
    # Neither plugin nor rewriting of assertions is needed, and both take seconds to begin.
    command = [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", "-p", "no:anyio", "--assert=plain", *files]
    command += ["-q", "--set", "counted", "--arch", "gfx942"]
    command += [*(["-k", chosen] if chosen else []), *arguments]
    # pytest-benchmark saves nothing in what it takes for a process of pytest-xdist.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    environment["PYTHONPATH"] = f"{where}:{ROOT}"
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, env=environment)


def test_one_planted_instruction_fails_the_comparison(tmp_path: Path) -> None:
    """That equal counts pass is what CI's `counts` shows."""
    saved = tmp_path / "counted.json"
    first = benchmarks(f"--benchmark-json={saved}", where=tmp_path)
    assert first.returncode == 0, first.stdout[-2000:]
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

    compare = (f"--benchmark-compare={saved}", "--benchmark-compare-fail=median:0%")
    (tmp_path / "one_more_instruction.py").write_text(PLANT.replace("PLANTED", "s_nop 0"))
    planted = benchmarks(*compare, "-p", "one_more_instruction", where=tmp_path)
    assert planted.returncode != 0
    assert "Performance has regressed" in planted.stdout + planted.stderr
    assert f"test_instructions[gfx942-{SHAPE}]" in planted.stdout + planted.stderr

    # A wait at the beginning that costs a twentieth of the modelled time, and no count that matters.
    (tmp_path / "waits_longer.py").write_text(PLANT.replace("PLANTED", "s_sleep 10"))
    compare = (f"--benchmark-compare={saved}", "--benchmark-compare-fail=median:3%")
    slower = benchmarks(*compare, "-p", "waits_longer", where=tmp_path)
    assert slower.returncode != 0
    regressed = (slower.stdout + slower.stderr).split("Performance has regressed")[1]
    assert f"test_modelled[gfx942-{SHAPE}]" in regressed
    assert f"test_instructions[gfx942-{SHAPE}]" not in regressed


def test_times_of_the_host_fail_a_comparison_only_when_asked_to(tmp_path: Path) -> None:
    """Benchmarks that are not collected are not compared: without a filter, counts and device times are."""
    # The others are programs, whose imports take longer than all else here.
    files = [str(path) for path in (ROOT / "benchmarks").glob("bench_*.py") if "def test_" in path.read_text()]
    steady = {"test_clocks", "test_instructions", "test_modelled", "test_device_time"}
    for options, more in (([], set()), (["--host-times"], {"test_host_time"})):
        fail = "--benchmark-compare-fail=median:5%"
        found = benchmarks(fail, "--collect-only", *options, where=tmp_path, files=files, chosen="")
        names = {line.split("::")[1].split("[")[0] for line in found.stdout.splitlines() if "::" in line}
        assert names - {"test_layer"} == steady | more, found.stdout[-2000:] + found.stderr
        assert ("test_layer" in names) == bool(options)


def test_the_stored_baseline_has_every_kind_of_kernel() -> None:
    run = json.loads((ROOT / "benchmarks" / "baselines" / "counted.json").read_text())
    names = {entry["name"] for entry in run["benchmarks"]}
    for arch in ("gfx942", "gfx950"):
        for op in ("decode", "combine", "plan", "append_kv", "sparse_decode"):
            for what in ("instructions", "modelled"):
                assert any(f"{what}[{arch}-{op}-" in name for name in names), (arch, op)
    assert set(run["machine_info"]) == {"emulated", "compiler"}


def test_an_unknown_set_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "benchmarks/bench_operators.py", "--set", "fast", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 4
    assert "ERROR: --set fast: there is no such set of shapes; there are quick, " in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_meter_moves_by_what_it_is_given() -> None:
    meter.reset()
    meter.add(2.5)
    meter.add(0.0)
    assert meter.meter() == 2.5
    with pytest.raises(ValueError, match="0 or more"):
        meter.add(-1.0)
    meter.reset()
    assert meter.meter() == 0.0
