"""benchmarks/bench_vllm.py server: two servers, vLLM's load generator, our decode counted in one: `tox -e vllm`."""

import csv
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 400


def test_two_servers_under_a_tiny_load(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_vllm.py"), "server", "--layers", "1", "--heads", "2"]
    command += ["--loads", "3x16x8", "--rounds", "2", "--backends", "CUSTOM,CPU_MLA:1"]
    command += ["--csv", str(tmp_path / "rows.csv"), "--logs", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # which the tests of the offline engine switch off
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "CUSTOM: our decode was reference on cpu\nCPU_MLA: our decode did not run\n" in done.stdout
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["backend"], row["round"]) for row in rows] == [("CUSTOM", "0"), ("CUSTOM", "1"), ("CPU_MLA", "1")]
    assert all(float(row["tokens_per_s"]) > 0 and float(row["p99_tpot_ms"]) >= float(row["tpot_ms"]) for row in rows)
