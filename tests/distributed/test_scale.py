"""docs/scale.md prints what benchmarks/scale_model.py computes, and the model agrees with what was measured."""

from __future__ import annotations

import csv
import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MODEL = runpy.run_path(str(ROOT / "benchmarks" / "scale_model.py"))


def test_the_tables_of_the_guide_are_the_models():
    guide = (ROOT / "docs" / "scale.md").read_text()
    for machine in MODEL["MACHINES"]:
        assert MODEL["table"](machine) in guide


def test_floors_of_two_gpus_are_below_what_was_measured():
    saved = (ROOT / "benchmarks" / "results" / "distributed" / "h200x2.csv").read_text().splitlines()
    h200 = MODEL["MACHINES"][0]
    rows = {row["what"]: row for row in csv.DictReader(line for line in saved if not line.startswith("#"))}
    for kv_len in (512, 4096):
        row = rows[f"layer B128 kv {kv_len}"]
        floor = MODEL["tensor_parallel"](h200, 2, 128, kv_len) * 1e6
        one_us, many_us = float(row["one_us"]), float(row["many_us"])
        assert 1.0 < many_us / floor < 1.9
        one = MODEL["tensor_parallel"](h200, 1, 128, kv_len) * 1e6
        assert abs(many_us / one_us - floor / one) < 0.12
