"""benchmarks/bench_transformers.py runs on a CPU, and times nothing whose logits are wrong."""

import csv
import sys

import pytest

pytest.importorskip("transformers")

import bench_transformers

import mla_suite

SIZES = {"layers": 1, "hidden": 128, "heads": 4, "intermediate": 256, "batch": 2, "context": 300, "modes": "eager"}


@pytest.fixture
def run(monkeypatch, tmp_path):
    def run():
        path = tmp_path / "lines.csv"
        monkeypatch.setattr(bench_transformers, "STEPS", 2)
        options = [f"--{name}={value}" for name, value in SIZES.items()]
        monkeypatch.setattr(sys, "argv", ["bench_transformers.py", *options, "--csv", str(path)])
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        bench_transformers.main()
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    return run


def test_both_models_are_timed_and_agree(run):
    lines = run()
    assert [(line["model"], line["mode"]) for line in lines] == [("unpatched", "eager"), ("patched", "eager")]
    assert 0 < float(lines[1]["error"]) < bench_transformers.CLOSE
    assert all(float(line["ms"]) > 0 and line["context"] == "300" for line in lines)


def test_wrong_logits_are_not_timed(run, monkeypatch):
    decode = mla_suite.decode
    monkeypatch.setattr(mla_suite, "decode", lambda *args, **kwargs: tuple(2 * t for t in decode(*args, **kwargs)))
    with pytest.raises(AssertionError, match="patched, eager: logits are off by"):
        run()
