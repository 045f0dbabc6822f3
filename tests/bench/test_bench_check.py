"""benchmarks/bench_check.py prints what a checked call and an unchecked one take, and checks a native kernel."""

from __future__ import annotations

import json
import re
import sys

import bench_check
import pytest
from built import require_built

from mla_suite.core import check_mode


def test_it_prints_a_line_for_each_n(monkeypatch, capsys, tmp_path):
    require_built("gfx942")
    checked = []
    usual = check_mode.difference
    monkeypatch.setattr(check_mode, "difference", lambda call, config: checked.append(call) or usual(call, config))
    monkeypatch.setattr(bench_check, "ROUNDS", 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    saved = tmp_path / "times.json"
    monkeypatch.setattr(sys, "argv", ["bench_check.py", "--kv", "20", "--every", "1", "3", "--save", str(saved)])
    bench_check.main()
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed[:3]] == ["0", "1", "3"]
    assert re.fullmatch(r"a call that is not checked: -?\d+\.\d us more", printed[3])
    assert len(checked) == 5 + 2  # of 5 calls each
    assert list(json.loads(saved.read_text())["ms_per_call"]) == ["0", "1", "3"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--every", "0"], "argument --every: '0'; it takes a whole number of 1 or more"),
        (["--emulate", "sm_90"], "sm_90 is not emulated; the emulator executes gfx942 and gfx950"),
        (["--save", "."], ". cannot be written; name a file in a folder of yours"),
    ],
)
def test_what_cannot_be_done_is_refused_before_it_measures(options, says, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_check, "seconds", lambda call, count: pytest.fail("it began"))
    monkeypatch.setattr(sys, "argv", ["bench_check.py", *options])
    with pytest.raises(SystemExit, match="2"):
        bench_check.main()
    assert says in capsys.readouterr().err
