"""Follow-ups of benchmarks/bench_vllm.py in a real vLLM engine on a CPU, not timed: `tox -e vllm,vllm33`."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "vllm_followups_cpu.py"


def test_followups_are_absorbed_up_to_a_threshold_and_right():
    """4, 12 and 20 new tokens behind 32 cached ones, which the program checks, alone and beside three sequences."""
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    alone, others_start, beside = 1 + 0 + 2, 3, (4 + 3 + 3) + (3 + 3 + 3) + (4 + 4 + 3)
    assert found["checked"]["compared"] == 2 * (alone + others_start + beside)  # in the first and the last layer
    assert found["checked"]["error"] < 1e-5
    keys = {(row["decodes"], row["threshold"], row["new"]): row["keys"] for row in found["rows"]}
    absorbed = {key for key, how in keys.items() if how == "absorbed"}
    assert absorbed == {
        (decodes, threshold, new) for decodes, threshold, new in keys if new <= {"own": 8, 1: 1, 16: 16}[threshold]
    }
    assert len(keys) == 2 * 3 * 3
