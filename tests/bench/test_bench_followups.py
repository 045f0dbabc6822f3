"""benchmarks/vllm_followups.py finds steps in a profile, and asks engines of every number of heads for rows."""

import argparse
import os
import sys
from pathlib import Path

import profiles
import vllm_followups
import vllm_turns
from saved_figures import saved

MARK = "void at::cuda::(anonymous namespace)::spin_kernel(long)"


def test_busy_time_counts_what_overlaps_once():
    kernels = [("a", 0.0, 10.0), ("b", 4.0, 6.0), ("c", 8.0, 12.0), ("d", 20.0, 25.0)]
    assert profiles.busy_us(kernels) == 17.0


def test_a_profile_is_divided_into_the_steps_behind_marks():
    kernels = [("before", 0.0, 1.0), (MARK, 1.0, 2.0), ("a", 2.0, 3.0), ("b", 3.0, 4.0), (MARK, 5.0, 6.0)]
    assert vllm_followups.divided(kernels) == [[("a", 2.0, 3.0), ("b", 3.0, 4.0)], []]


def test_the_kernels_that_take_longest_are_named_with_their_share_of_a_layer():
    kernels = [("void gemm<float, 4>(T*)", 0.0, 6.0), ("norm", 6.0, 7.0), ("void gemm<float, 8>(T*)", 7.0, 9.0)]
    assert vllm_followups.largest(kernels, layers=2) == "gemm 4.0; norm 0.5"


ENGINE = """
import sys, vllm_turns

heads = int(sys.argv[len(sys.argv) - 1 - sys.argv[::-1].index("--heads") + 1])
backend = sys.argv[sys.argv.index("--alone") + 1]


def measure(decodes, prefix):
    row = {"prefix": prefix, "new": 8, "decodes": decodes, "threshold": "own", "keys": "absorbed", "kernels": backend}
    return {"rows": [row | {"busy_us": 8.0 * heads, "per_layer_us": heads, "first_ms": 1.0, "decode_us": 2.0}]}


check = lambda: {"compared": 1, "error": 1e-3}
raise SystemExit(vllm_turns.serve({"seconds": 1, "page": 64}, {"check": check, "measure": measure}))
"""


def test_each_number_of_heads_has_an_engine_of_each_backend(tmp_path, monkeypatch, capsys):
    program = tmp_path / "engine.py"
    program.write_text(ENGINE)
    path = tmp_path / "rows.csv"
    given = ["--backends", "A,B", "--heads", "128,16", "--prefixes", "64", "--csv", str(path)]
    parser = argparse.ArgumentParser()
    vllm_followups.add_arguments(parser)
    monkeypatch.setattr(sys, "argv", [str(program), *given])
    monkeypatch.setattr(vllm_followups, "ON_GPU", True)
    monkeypatch.setattr(vllm_followups, "versions", lambda: "none")
    monkeypatch.setenv("PYTHONPATH", str(Path(vllm_turns.__file__).parent), prepend=os.pathsep)
    assert vllm_followups.main(parser.parse_args(given)) == 0
    rows = saved(path)
    engines = [("128", "A"), ("128", "B"), ("16", "A"), ("16", "B")]
    assert [(row["decodes"], row["heads"], row["kernels"]) for row in rows] == [
        *(("0", *engine) for engine in engines),
        *(("32", *engine) for engine in engines),
    ]
    assert [float(row["per_layer_us"]) for row in rows] == [float(row["heads"]) for row in rows]
    assert "B, 16 heads: 1 attention outputs within 1.0e-03 of fp32" in capsys.readouterr().out
