"""benchmarks/bench_flashmla.py names the commit that it measured, where the checkout or the caller knows it."""

import sys
from pathlib import Path

import bench_flashmla
import pytest

from mla_suite.bench import environment


@pytest.mark.parametrize(
    ("given", "checkout", "named"),
    [("", "89abcde", "89abcde"), ("1234567", "89abcde", "1234567"), ("1234567", "", "1234567"), ("", "", "unknown")],
)
def test_a_saved_run_names_its_commit(monkeypatch, given, checkout, named):
    monkeypatch.setattr(environment, "_commit", lambda: {"commit": checkout, "changed": False})
    assert bench_flashmla.environment(given, "cpu")["commit"] == named


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--report", "absent.json"], "absent.json is no run that --save wrote: FileNotFoundError"),
        (["--report", "other.json"], "other.json is no run that --save wrote: KeyError: 'rows'"),
        (["--plot", "dense.svg"], "--plot draws a saved run: name it with --report"),
        (["--save", "."], ". cannot be written; name a file in a folder of yours"),
    ],
)
def test_files_that_it_cannot_use_are_refused_before_it_measures(options, says, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text("{}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(bench_flashmla, "run", lambda options: pytest.fail("it began"))
    monkeypatch.setattr(sys, "argv", ["bench_flashmla.py", *options])
    with pytest.raises(SystemExit, match="2"):
        bench_flashmla.main()
    assert says in capsys.readouterr().err
