"""DeepSeek V3.2 and V4 in vLLM 0.33's engine on an H100 or H200, few layers with random weights, our attention in it.

vLLM prefills and decodes prompts that arrive one after another. `benchmarks/vllm_check.py` compares samples of
every attention call of eager steps with the definition over the engine's own caches.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("this needs vLLM 0.33 for CUDA, and an H100 or H200", allow_module_level=True)

PROGRAM = Path(__file__).parents[2] / "benchmarks/bench_vllm.py"
V4 = ["decodes, 1 pools, 128", "decodes, 2 pools, 128", "decodes, 2 pools, 512", "prompts, 640"]
CASES = {
    "V3.2": (["--model", "v32", "--backends", "MLA_SUITE_SPARSE"], ["decodes", "prompts and decodes"]),
    "V3.2, records of 656 bytes": (
        ["--model", "v32", "--backends", "MLA_SUITE_SPARSE", "--kv-cache-dtype", "fp8_ds_mla"],
        ["decodes", "prompts and decodes"],
    ),
    "V4": (["--model", "v4", "--backends", "MLA_SUITE_DSV4"], V4),
}


@pytest.mark.parametrize("case", CASES)
def test_the_engines_attention_is_the_definitions(case):
    """Window, 4:1 and 128:1 layers of V4; selections from longer contexts of V3.2. An engine starts in a minute."""
    given, kinds = CASES[case]
    command = [sys.executable, PROGRAM, "engine", *given, "--check-alone", "--layers", "6", "--batches", "8"]
    environment = os.environ | {"MLA_SUITE_LOG": "dispatch"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\d+ attention outputs within \d\.\de-03 of fp32", done.stdout), done.stdout[-4000:]
    assert [kind for kind in kinds if f"    {kind}" not in done.stdout] == []
    assert re.search(r"sparse_decode Problem.* on sm_90 -> native", done.stdout)
    assert "-> triton" not in done.stdout
