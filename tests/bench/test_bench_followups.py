"""benchmarks/vllm_followups.py finds steps in a profile, and asks engines of every number of heads for rows."""

import argparse
import sys

import profiles
import vllm_followups
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


def test_each_number_of_heads_has_an_engine_of_each_backend(turn_engine, tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.csv"
    given = ["--backends", "A,B", "--heads", "128,16", "--prefixes", "64", "--csv", str(path)]
    parser = argparse.ArgumentParser()
    vllm_followups.add_arguments(parser)
    monkeypatch.setattr(sys, "argv", [turn_engine, *given])
    monkeypatch.setattr(vllm_followups, "ON_GPU", True)
    monkeypatch.setattr(vllm_followups, "versions", lambda: "none")
    assert vllm_followups.main(parser.parse_args(given)) == 0
    rows = saved(path)
    engines = [("128", "A"), ("128", "B"), ("16", "A"), ("16", "B")]
    assert [(row["decodes"], row["heads"], row["kernels"]) for row in rows] == [
        *(("0", *engine) for engine in engines),
        *(("32", *engine) for engine in engines),
    ]
    assert [float(row["per_layer_us"]) for row in rows] == [float(row["heads"]) for row in rows]
    assert "B, 16 heads: 1 attention outputs within 1.0e-03 of fp32" in capsys.readouterr().out
